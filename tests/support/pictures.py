"""What every picture must keep, and how a test gets at the figure that a function writes."""

from typing import Any

import pytest


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from now on, as they are saved."""
    from matplotlib.figure import Figure  # where it is not installed the tests of pictures are skipped

    figures: list[Figure] = []
    save = Figure.savefig

    def noted(figure: Figure, *where: Any, **how: Any) -> None:
        figures.append(figure)
        save(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", noted)
    return figures


def assert_no_label_is_clipped(figure, *, at_least: int) -> None:
    """All visible text, of which there is enough, lies inside the figure."""
    texts = figure.findobj(lambda item: hasattr(item, "get_text") and item.get_visible() and item.get_text())
    assert len(texts) >= at_least
    for box in [text.get_window_extent() for text in texts]:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
