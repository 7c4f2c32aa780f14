"""Learning curves of many methods: each can be told from all others by its name's own piece of line."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from pictures import saved_figures

from fedstill.report import COLOURS, style
from fedstill.report.curves import learning_curves

LONG = 'method{}(form="mean", epsilon=0.5, steps=2000)+simclr(epochs=100)'


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Figure]:
    """Draw so many methods that end close to each other, and return the figure."""
    figures = saved_figures(monkeypatch)

    def draw(count: int, name: str = "method{}") -> Figure:
        curves = {name.format(place): [([1, 2, 3], [0.1, 0.5, 0.6 + place / 500])] for place in range(count)}
        learning_curves(curves, tmp_path / "curves.png", title="a title")
        return figures[-1]

    return draw


def look(line) -> tuple:
    """Colour, width and the dashes as they are drawn."""
    _, dashes = line._dash_pattern
    return line.get_color(), line.get_linewidth(), tuple(dashes or ())


def pieces_beside_names(axes) -> dict[str, object]:
    """By name, the level line that ends left of it at its height."""
    level = [line for line in axes.lines if not line.get_clip_on() and len(set(line.get_ydata())) == 1]
    found = {}
    for text in axes.texts:
        x, y = text.get_position()
        (found[text.get_text().split()[1]],) = (
            one for one in level if one.get_ydata()[0] == y and x - 0.02 < one.get_xdata()[-1] < x
        )
    return found


def test_a_name_stands_behind_a_piece_of_its_own_line(drawn):
    axes = drawn(12).axes[0]
    curves = [line for line in axes.lines if line.get_clip_on()]
    pieces = pieces_beside_names(axes)
    assert [look(pieces[f"method{place}"]) for place in range(12)] == [look(curve) for curve in curves]
    assert len({look(piece) for piece in pieces.values()}) == 12


def test_a_piece_is_long_enough_to_tell_its_dashes(drawn):
    figure = drawn(30)
    axes = figure.axes[0]
    for piece in pieces_beside_names(axes).values():
        begin, end = (axes.transAxes.transform((x, 0))[0] for x in piece.get_xdata())
        points = (end - begin) * 72 / figure.dpi
        assert points > 1.8 * sum(look(piece)[2])


def test_no_two_of_thirty_two_methods_look_alike():
    styles = [style(place) for place in range(32)]
    assert len(set(styles)) == 32
    assert [colour for colour, _ in styles] == list(COLOURS) * 4
    assert style(32) == style(0)


@pytest.mark.parametrize(("count", "name"), [(12, "method{}"), (30, "method{}"), (12, LONG)])
def test_names_of_many_methods_find_room_beside_the_picture(drawn, count, name):
    figure = drawn(count, name)
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == count
    assert all(below.y1 <= above.y0 for below, above in pairwise(boxes))
    for box in boxes:
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_few_methods_leave_the_picture_as_high_as_ever(drawn):
    assert drawn(3).get_size_inches().tolist() == [8.0, 4.6]
