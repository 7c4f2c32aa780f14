"""What every picture must keep."""


def assert_no_label_is_clipped(figure, *, at_least: int) -> None:
    """All visible text, of which there is enough, lies inside the figure."""
    texts = figure.findobj(lambda item: hasattr(item, "get_text") and item.get_visible() and item.get_text())
    assert len(texts) >= at_least
    for box in [text.get_window_extent() for text in texts]:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
