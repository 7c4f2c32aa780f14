"""The picture of a probe: every model on the same axes, every number on its bar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from divergence_picture import Level, View, divergence_picture
from matplotlib.figure import Figure
from pictures import assert_no_label_is_clipped, saved_figures

LEVELS = [Level("iid", 0.5, 0.01), Level("alpha = 0.1", 20.0, 0.3)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Draw a picture and return its figure."""
    figures = saved_figures(monkeypatch)

    def draw(views: list[View], labels: np.ndarray, **options: object) -> Figure:
        path = divergence_picture(
            views, LEVELS, tmp_path / "probe.png", labels=labels, **{"title": "a probe", **options}
        )
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def views_of(count: int, points: int = 30) -> list[View]:
    generator = np.random.default_rng(0)
    return [View(f"model {i}", i + generator.normal(size=(points, 2)), i / 10) for i in range(count)]


def panels(figure: Figure) -> dict[str, object]:
    return {axes.get_title(): axes for axes in figure.axes}


@pytest.mark.parametrize("count", [1, 5, 10])
def test_every_model_has_a_panel_with_its_points_on_the_same_axes(drawn, count):
    views = views_of(count)
    panel_of = panels(drawn(views, np.arange(30) % 10))
    assert {view.name for view in views} <= set(panel_of)
    for view in views:
        axes = panel_of[view.name]
        assert np.asarray(axes.collections[0].get_offsets()) == pytest.approx(view.points)
        assert axes.texts[0].get_text() == f"{10.0 * int(view.name.split()[1]):.1f} %"
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert (left, right, low, high) == (*panel_of["model 0"].get_xlim(), *panel_of["model 0"].get_ylim())
        assert left < view.points[:, 0].min() < view.points[:, 0].max() < right
        assert low < view.points[:, 1].min() < view.points[:, 1].max() < high


def test_bars_are_the_measures_in_the_order_given(drawn):
    panel_of = panels(drawn(views_of(4), np.arange(30) % 3))
    for title, values in (("gradient variance", [0.5, 20.0]), ("weight divergence", [0.01, 0.3])):
        assert [bar.get_width() for bar in panel_of[title].patches] == values
        assert [text.get_text() for text in panel_of[title].get_yticklabels()] == ["iid", "alpha = 0.1"]


def test_points_of_a_class_have_its_colour_and_the_legend_names_it(drawn):
    figure = drawn(views_of(2), np.arange(30) % 3, classes=("cat", "dog", "eel"))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["cat", "dog", "eel"]
    colours = panels(figure)["model 0"].collections[0].get_facecolors()[:, :3]
    assert np.array_equal(colours[0], colours[3])
    assert len(np.unique(colours, axis=0)) == 3
    assert np.allclose(legend.legend_handles[1].get_facecolor()[0, :3], colours[1])


def test_a_hundred_classes_have_no_legend(drawn):
    assert drawn(views_of(2, points=100), np.arange(100)).legends == []


def test_no_label_is_clipped(drawn):
    figure = drawn(views_of(8), np.arange(30) % 10, classes=[f"class {c}" for c in range(10)])
    assert_no_label_is_clipped(figure, at_least=20)
