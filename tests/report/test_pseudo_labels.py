"""The picture of what the server believes: the numbers of the rows, all of them, in their places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from quick import first_quick

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from pictures import assert_no_label_is_clipped, saved_figures

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.report import COLOURS
from fedstill.report.pseudo_labels import has_pseudo_labels, pseudo_label_picture


def row(number: int, counts: list[int] | None = None, right: float | None = None, **more: float) -> dict:
    told = {} if counts is None else {"pseudo_labels": sum(counts), "pseudo_label_counts": counts}
    return {"round": number, **told, **({} if right is None else {"pseudo_label_accuracy": right}), **more}


ONE = [row(1, accuracy=0.2), row(2, [3, 1], 0.5, accuracy=0.4, accuracy_aggregated=0.3), row(3, [2, 6], 0.75)]
OTHER = [row(1, [4, 4], 0.5), row(2, [1, 0], 1.0), row(3, [0, 0])]  # nothing kept in the end


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Draw a picture and return its figure."""
    figures = saved_figures(monkeypatch)

    def draw(runs: dict, **options: object) -> Figure:
        path = pseudo_label_picture(runs, tmp_path / "pseudo_labels.png", **{"title": "t", **options})
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def panel(figure: Figure, label: str):
    return next(axes for axes in figure.axes if axes.get_ylabel().startswith(label))


def lines_of(axes) -> list[list[tuple[float, float]]]:
    """Points of the curves; the thin lines that lead to names are drawn in parts of the axes."""
    return [
        list(zip(*(np.round(part, 6).tolist() for part in line.get_data()), strict=True))
        for line in axes.lines
        if line.get_transform() is not axes.transAxes and line.get_clip_on()
    ]


def shares_of(axes) -> np.ndarray:
    values = axes.collections[0].get_array()
    return np.ma.filled(values.astype(float), np.nan)


def names_of(axes) -> list[str]:
    return sorted(text.get_text() for text in axes.texts)


def test_one_run_shows_its_labels_beside_its_test_accuracies(drawn):
    accuracy = panel(drawn({"d2cfl": [ONE]}), "accuracy")
    assert lines_of(accuracy) == [[(2, 50.0), (3, 75.0)], [(1, 20.0), (2, 40.0)], [(2, 30.0)]]
    assert names_of(accuracy) == ["30.0  test set, before refining", "40.0  test set", "75.0  pseudo-labels"]


def test_the_number_kept_is_drawn_in_the_rounds_that_have_one(drawn):
    kept = panel(drawn({"d2cfl": [ONE]}), "pseudo-labels kept")
    assert lines_of(kept) == [[(2, 4.0), (3, 8.0)]]
    assert kept.get_ylim()[0] == 0


def test_the_classes_of_every_round_are_shares_and_a_round_without_labels_is_blank(drawn):
    classes = panel(drawn({"d2cfl": [[*ONE, row(4, [0, 0])]]}, classes=("cat", "dog")), "class")
    shares = shares_of(classes)
    assert shares[:, 1:3].tolist() == [[75.0, 25.0], [25.0, 75.0]]
    assert np.isnan(shares[:, [0, 3]]).all()
    assert [label.get_text() for label in classes.get_yticklabels()] == ["cat", "dog"]


def test_of_several_methods_the_last_rounds_classes_stand_side_by_side(drawn):
    figure = drawn({"d2cfl": [ONE], "feddf": [OTHER], "fedavg": [[row(1, accuracy=0.9)]]}, classes=("cat", "dog"))
    assert panel(figure, "pseudo-labels kept,").get_xlabel() == "class"
    bars = panel(figure, "pseudo-labels kept,").patches
    assert [bar.get_height() for bar in bars] == [2.0, 6.0, 0.0, 0.0]
    assert [to_hex(bar.get_facecolor()).upper() for bar in bars] == [COLOURS[0]] * 2 + [COLOURS[1]] * 2
    right = panel(figure, "pseudo-labels that are right")
    assert lines_of(right) == [[(2, 50.0), (3, 75.0)], [(1, 50.0), (2, 100.0)]]
    assert "fedavg" not in " ".join(names_of(right))


def test_a_method_has_one_colour_in_all_panels_though_it_is_missing_in_one(drawn):
    silent = [row(1, [0, 0])]
    figure = drawn({"silent": [silent], "feddf": [OTHER]})
    right = panel(figure, "pseudo-labels that are right")
    assert [line.get_color() for line in right.lines if line.get_clip_on()] == [COLOURS[1]]


@pytest.mark.parametrize("others", [["feddf"], []])
def test_a_methods_colour_is_that_of_its_place_in_the_whole_comparison(drawn, others):
    silent = {"fedavg": [[row(1, accuracy=0.9)]]}
    runs = {**silent, "d2cfl": [ONE], **{name: [OTHER] for name in others}}
    figure = drawn(runs)
    kept = panel(figure, "pseudo-labels kept")
    drawn_in = list(dict.fromkeys(line.get_color() for line in kept.lines))
    assert drawn_in == [COLOURS[1], COLOURS[2]][: 1 + len(others)]
    assert {text.get_color() for text in kept.texts} == set(drawn_in)
    above = panel(figure, "pseudo-labels that are right" if others else "accuracy")
    assert COLOURS[0] not in {line.get_color() for line in above.lines}  # fedavg's, which is not shown
    if others:
        bars = panel(figure, "pseudo-labels kept,").patches
        assert [to_hex(bar.get_facecolor()).upper() for bar in bars] == [COLOURS[1]] * 2 + [COLOURS[2]] * 2


def test_lines_beyond_the_colours_are_dashed_as_in_the_learning_curves(drawn):
    figure = drawn({f"method {number}": [OTHER] for number in range(len(COLOURS) + 1)})
    kept = [line for line in panel(figure, "pseudo-labels kept").lines if line.get_clip_on()]
    assert kept[0].get_color() == kept[-1].get_color() == COLOURS[0]
    assert (kept[0].get_linestyle(), kept[-1].get_linestyle()) == ("-", "--")


LONG = "fedaux(student.steps=20)+simclr(training.epochs=20)+fedprox(mu=0.01)"


@pytest.mark.parametrize("methods", first_quick([1, 2, 8]))
def test_long_names_leave_the_panels_their_room_and_do_not_overlap(drawn, methods):
    figure = drawn({f"{LONG}+kd(beta={number})": [OTHER] for number in range(methods)})
    for axes in [axes for axes in figure.axes if axes.texts]:
        assert axes.get_position().width > 0.5
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height for box in boxes)
        assert not [1 for i, one in enumerate(boxes) for two in boxes[:i] if Bbox.intersection(one, two)]


@pytest.mark.parametrize(
    ("seeds", "rounds", "note"),
    first_quick(
        [
            ({"d2cfl": 1, "feddf": 1}, 3, ""),
            ({"d2cfl": 2, "feddf": 2}, 3, "; 2 seeds, band: one standard deviation"),
            ({"d2cfl": 2, "feddf": 3}, 3, "; 2 to 3 seeds, band: one standard deviation"),
            ({"d2cfl": 2, "feddf": 2}, 1, "; 2 seeds, line: one standard deviation"),
        ],
        2,
    ),
)
def test_the_picture_says_what_is_drawn_around_the_means(drawn, seeds, rounds, note):
    figure = drawn({name: [OTHER[:rounds]] * count for name, count in seeds.items()})
    assert figure.get_suptitle() == f"t{note}"


def test_seeds_of_a_single_round_have_a_line_of_their_spread(drawn):
    twin = [row(1, [2, 0], 1.0)]
    figure = drawn({"d2cfl": [OTHER[:1], twin], "feddf": [OTHER[:1]]})
    first, *_ = panel(figure, "pseudo-labels kept").collections
    ((low, high),) = (sorted(end[1] for end in segment) for segment in first.get_segments())
    assert (low, high) == pytest.approx((5 - np.sqrt(18), 5 + np.sqrt(18)))  # of 8 and 2


def test_seeds_are_averaged(drawn):
    twin = [row(1, [1, 1], 0.3), row(2, [5, 3], 1.0), row(3, [2, 2], 0.25)]
    figure = drawn({"d2cfl": [ONE, twin]})
    assert lines_of(panel(figure, "accuracy"))[0] == [(2, 75.0), (3, 50.0)]
    assert lines_of(panel(figure, "pseudo-labels kept")) == [[(2, 6.0), (3, 6.0)]]
    assert shares_of(panel(figure, "class"))[0].tolist() == pytest.approx([50.0, 100 * 4 / 6, 100 * 2 / 6])


def test_without_the_truth_and_an_evaluation_there_is_no_panel_of_accuracies(drawn):
    figure = drawn({"d2cfl": [[row(1, [3, 1]), row(2, [4, 0])]]})
    assert not [axes for axes in figure.axes if "accuracy" in axes.get_ylabel()]
    assert lines_of(panel(figure, "pseudo-labels kept")) == [[(1, 4.0), (2, 4.0)]]


@pytest.mark.parametrize("methods", [1, 3])
@pytest.mark.parametrize("classes", first_quick([2, 10, 100]))
def test_no_label_is_clipped(drawn, methods, classes):
    counts = np.random.default_rng(0).integers(0, 5000, (4, classes)).tolist()
    rows = [row(number, count, 0.5, accuracy=0.5) for number, count in enumerate(counts, 1)]
    runs = {f"a method with the options {number}": [rows] for number in range(methods)}
    figure = drawn(runs, title="a rather long title of an experiment " * 3, classes=["a class's name"] * classes)
    assert_no_label_is_clipped(figure, at_least=10)


def test_rows_without_pseudo_labels_are_refused_in_one_line(tmp_path):
    assert not has_pseudo_labels([row(1, accuracy=0.5)])
    assert has_pseudo_labels(ONE)
    with pytest.raises(FedstillError, match=r"cannot draw x\.png: no run has pseudo-labels"):
        pseudo_label_picture({"fedavg": [[row(1, accuracy=0.5)]]}, tmp_path / "x.png", title="t")


@pytest.mark.parametrize(
    ("method", "there"), [({"name": "feddf", "student": {"steps": 2}}, True), ({"name": "fedavg"}, False)]
)
def test_a_run_folder_gets_the_picture_where_the_method_makes_pseudo_labels(tmp_path, method, there):
    experiment = fedstill.Experiment(
        rounds=2, cohort=2, method=method, data={"unlabeled": 40}, model={"name": "mlp", "hidden": [8]},
        partition={"scheme": "iid", "clients": 4},
    )  # fmt: skip
    fedstill.run(experiment, run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "curves.png").exists()
    assert (tmp_path / "run" / "pseudo_labels.png").exists() == there


@pytest.mark.parametrize("last", first_quick([1, 3, 4, 40]))
def test_rounds_are_whole_numbers(drawn, last):
    rows = [row(number, [3, 1], 0.5, accuracy=0.5) for number in range(1, last + 1)]
    for runs in ({"d2cfl": [rows]}, {"d2cfl": [rows], "feddf": [rows]}):
        figure = drawn(runs)
        panels = [axes for axes in figure.axes if axes.get_xlim() == (0.5, last + 0.5)]
        assert len(panels) == (3 if len(runs) == 1 else 2)
        for axes in panels:
            ticks = [tick for tick in axes.get_xticks() if 0.5 <= tick <= last + 0.5]
            assert ticks
            assert all(tick == round(tick) for tick in ticks)
