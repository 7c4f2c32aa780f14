"""The bubble picture: nothing clipped, areas that mean counts, no global state of matplotlib."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from pictures import assert_no_label_is_clipped, saved_figures

from fedstill.core.errors import FedstillError
from fedstill.report import partition as module
from fedstill.report.partition import COUNTS_FILE, partition_picture, write_counts

TITLE = "a rather long title of an experiment with very many clients, a dataset, a scheme and its alpha"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Draw a picture and return its figure."""
    figures = saved_figures(monkeypatch)

    def draw(counts: np.ndarray, **options: object) -> Figure:
        path = partition_picture(counts, tmp_path / "deep" / "picture.png", **{"title": "t", **options})
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def bubbles_of(figure: Figure) -> PathCollection:
    return next(axes.collections[0] for axes in figure.axes if axes.get_xlabel() == "client")


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (3, 2), (10, 10), (100, 10), (40, 100)])
def test_no_label_is_clipped(drawn: Callable[..., Figure], clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 200_000, (clients, classes))
    names = [f"a class with the name {c}" for c in range(classes)]
    figure = drawn(counts, title=TITLE, classes=names)
    assert_no_label_is_clipped(figure, at_least=10)


@pytest.mark.parametrize("clients", [5, 50, 100])
def test_text_is_legible_where_a_page_shows_the_picture_900_pixels_wide(
    drawn: Callable[..., Figure], clients: int
) -> None:
    figure = drawn(np.ones((clients, 10), int))
    smallest = min(text.get_fontsize() for axes in figure.axes for text in axes.get_xticklabels() if text.get_text())
    assert smallest / 72 * 900 / max(figure.get_figwidth(), 6.0) > 10  # pixels


def test_areas_are_proportional_to_counts_and_colours_to_shares(drawn: Callable[..., Figure]) -> None:
    bubbles = bubbles_of(drawn(np.array([[100, 300], [0, 0], [50, 0]])))
    at = {}
    for place, area, share in zip(bubbles.get_offsets(), bubbles.get_sizes(), bubbles.get_array(), strict=True):
        at[(int(place[0]), int(place[1]))] = (float(area), float(share))
    assert set(at) == {(0, 0), (0, 1), (2, 0)}
    assert at[(0, 1)][0] == pytest.approx(3 * at[(0, 0)][0])
    assert at[(0, 0)][0] == pytest.approx(2 * at[(2, 0)][0])
    assert [at[key][1] for key in ((0, 0), (0, 1), (2, 0))] == pytest.approx([0.25, 0.75, 1.0])


def test_small_bubbles_lie_on_top_of_large_ones(drawn: Callable[..., Figure]) -> None:
    sizes = bubbles_of(drawn(np.random.default_rng(1).integers(1, 500, (30, 6)))).get_sizes()
    assert (np.diff(sizes) <= 0).all()


def test_more_than_a_hundred_clients_show_the_first_hundred_and_say_so(drawn: Callable[..., Figure]) -> None:
    counts = np.full((1234, 3), 5)
    figure = drawn(counts, title="lda")
    assert figure._suptitle.get_text() == "lda (first 100 of 1,234 clients)"
    assert len(bubbles_of(figure).get_sizes()) == 300


def test_empty_clients_and_no_samples_at_all_can_be_drawn(drawn: Callable[..., Figure]) -> None:
    assert len(bubbles_of(drawn(np.zeros((4, 3), int))).get_sizes()) == 0


def test_pyplot_is_never_imported(drawn: Callable[..., Figure]) -> None:
    before = "matplotlib.pyplot" in sys.modules
    drawn(np.ones((2, 2), int))
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(("shape", "names"), [((3,), None), ((0, 2), None), ((3, 2), ["only one"])])
def test_counts_of_a_wrong_shape_are_one_line(tmp_path: Path, shape: tuple[int, ...], names: list[str] | None) -> None:
    with pytest.raises(FedstillError, match=r"one row a client and one column a class"):
        partition_picture(np.ones(shape, int), tmp_path / "x.png", title="t", classes=names)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FedstillError, match=r"fedstill\[plots\]"):
        module.partition_picture(np.ones((2, 2), int), tmp_path / "x.png", title="t")


def test_a_title_is_drawn_as_it_is_whatever_its_signs_mean(drawn: Callable[..., Figure]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph 20013 ")
        figure = drawn(np.ones((2, 2), int), title="$\\frac{a^b^c$ \x1b[2J of \u4e2d")
    assert figure.get_suptitle() == "$\\frac{a^b^c$ ?[2J of \u4e2d"


def test_settings_of_the_working_folder_do_not_have_texts_run_through_latex(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\ntext.latex.preamble: \\input{/etc/passwd}\n")
    (tmp_path / "latex").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\nexit 1\n")
    (tmp_path / "latex").chmod(0o755)
    script = "from fedstill.report.partition import partition_picture as draw; draw([[1, 2]], 'x.png', title='t')"
    place = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, env=place, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "x.png").exists()
    assert not (tmp_path / "ran").exists()


def test_the_counts_of_clients_are_written_with_their_names(tmp_path):
    write_counts(np.array([[3, 0], [1, 2]]), tmp_path, classes=("cat", "<dog>"), names=("Ulm", "Köln"))
    written = json.loads((tmp_path / COUNTS_FILE).read_text(encoding="utf-8"))
    expected = {"clients": 2, "classes": ["cat", "<dog>"], "names": ["Ulm", "Köln"], "counts": [[3, 0], [1, 2]]}
    assert written == expected


def test_of_very_many_clients_as_many_as_fit_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("fedstill.report.partition._MOST_COUNTS", 5)
    write_counts(np.array([[3, 0], [1, 2], [4, 4]]), tmp_path, classes=("cat", "dog"))
    written = json.loads((tmp_path / COUNTS_FILE).read_text(encoding="utf-8"))
    assert (written["clients"], written["counts"]) == (3, [[3, 0], [1, 2]])
