"""The picture of a partition: one bubble for each client and class, and the clients' sizes above."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import FedstillError, printable
from fedstill.report import drawn, new_figure, shortened
from fedstill.storage.files import write_whole

COUNTS_FILE = "partition.json"
_MOST_COUNTS = 2**22  # about 10 MB of JSON
_MOST_CLIENTS = 100
_INK = "#222222"
_QUIET = "#8a8a8a"
_GRID = "#ececec"
_BARS = "#9aa5b1"
_SMALLEST_DOT = 1.0  # points squared: one sample stays visible
_LARGEST_DISC = 12.0  # points: where cells are smaller, the largest bubbles overlap
_LONGEST_NAME = 24
_WIDEST = 9.5  # inches of the picture: its text stays legible where a page shows it 900 pixels wide


def write_counts(
    counts: np.ndarray, folder: Path, *, classes: Sequence[str], names: Sequence[str] = (), hidden: bool = False
) -> None:
    """Write partition.json: class counts (clients, classes), the names of the classes and of the clients, if any.

    Of a federation with more than four million counts, the file holds as many clients as fit. hidden: it has no
    counts, because they are not to be published.
    """
    counts = np.asarray(counts)
    shown = counts[: max(1, _MOST_COUNTS // max(1, counts.shape[1]))].astype(int).tolist()
    tree = {"clients": len(counts), "classes": list(classes), "names": list(names[: len(shown)])}
    tree["counts"] = [] if hidden else shown
    write_whole(folder / COUNTS_FILE, json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n")


def partition_picture(
    counts: np.ndarray, path: str | Path, *, title: str, classes: Sequence[str] | None = None
) -> Path:
    """Draw class counts (clients, classes) as bubbles into a PNG (or PDF, SVG) file and return its path.

    The area of a bubble is the number of samples (one sample is at least a dot), its colour the share of the
    client's samples. Of more than 100 clients the first 100 are drawn, and the title says so. `classes` names the
    classes (default 0, 1, ...).
    """
    counts = np.asarray(counts)
    names = [str(name) for name in (classes if classes is not None else range(counts.shape[-1]))]
    if counts.ndim != 2 or 0 in counts.shape or len(names) != counts.shape[1]:
        raise FedstillError(
            f"cannot draw counts of shape {counts.shape} with {len(names)} class names: "
            "give one row a client and one column a class"
        )
    if len(counts) > _MOST_CLIENTS:
        title = f"{title} (first {_MOST_CLIENTS} of {len(counts):,} clients)"
        counts = counts[:_MOST_CLIENTS]
    figure, bubbles = _draw(counts, names, title)
    figure.draw_without_rendering()  # the layout fixes the size of a cell, which fixes the largest bubble
    _scale(figure, bubbles, counts)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(counts: np.ndarray, names: list[str], title: str) -> tuple[Any, Any]:
    clients, classes = counts.shape
    width = min(3.2 + 0.5 * clients, _WIDEST)
    height = 2.1 + classes * float(np.interp(classes, [5, 20, 100], [0.40, 0.26, 0.095]))
    figure: Any = new_figure(max(width, 5.5), max(height, 3.6))
    figure.get_layout_engine().set(h_pad=0.06, w_pad=0.08)
    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=[0.75, max(height - 2.1, 1.6)])
    wrapped = textwrap.fill(printable(title), max(30, int(figure.get_figwidth() * 8)))
    figure.suptitle(wrapped, color=_INK, fontsize=12, fontweight="bold", parse_math=False)
    _draw_sizes(bars, counts.sum(axis=1))
    return figure, _draw_bubbles(figure, cells, counts, names)


def _draw_sizes(axes: Any, sizes: np.ndarray) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.72, color=_BARS)
    axes.set_ylabel("samples", color=_INK, fontsize=9)
    axes.set_ylim(0, max(sizes.max(), 1) * 1.05)
    most = max(int(sizes.max()), 1)
    axes.set_yticks([0, most], labels=["0", f"{most:,}"])
    axes.tick_params(axis="x", length=0, labelbottom=False)
    _quiet(axes, keep=("bottom",))


def _draw_bubbles(figure: Any, axes: Any, counts: np.ndarray, names: list[str]) -> Any:
    clients, classes = counts.shape
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    client, label = _largest_first(counts)
    colours = shares[client, label]
    bubbles = axes.scatter(client, label, c=colours, cmap=_colours(), vmin=0, vmax=1, edgecolors="white", zorder=3)
    _ticks(axes.xaxis, [str(i) for i in range(clients)], most=30)
    _ticks(axes.yaxis, [shortened(name, _LONGEST_NAME) for name in names], most=30)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(classes - 0.3, -0.7)
    axes.set_xlabel("client", color=_INK)
    axes.set_ylabel("class", color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    _quiet(axes, keep=())
    bar = figure.colorbar(bubbles, ax=axes, fraction=0.03, aspect=18, pad=0.015, shrink=0.9)
    bar.set_label("share of the client's samples", color=_INK, fontsize=9)
    bar.set_ticks([0, 0.5, 1], labels=["0%", "50%", "100%"])
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=_INK)
    bar.outline.set_visible(False)
    return bubbles


def _ticks(axis: Any, names: list[str], *, most: int) -> None:
    step = 1 if len(names) <= most else 5 if len(names) <= 2 * most else 10
    axis.set_ticks(range(0, len(names), step), labels=list(map(drawn, names[::step])))
    axis.set_tick_params(length=0, labelsize=8, labelcolor=_INK)


def _quiet(axes: Any, *, keep: tuple[str, ...]) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(_QUIET)
    axes.tick_params(labelsize=8, labelcolor=_INK, color=_QUIET)


def _colours() -> Any:
    """Viridis (even steps with every common colour blindness, and in grey) without the yellow that fades on white."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.92, 0.0, 256)))


def _largest_first(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clients and classes of the non-zero counts, so that small bubbles lie on top of large ones."""
    client, label = np.nonzero(counts)
    order = np.argsort(-counts[client, label], kind="stable")
    return client[order], label[order]


def _scale(figure: Any, bubbles: Any, counts: np.ndarray) -> None:
    """Bubble areas in points: the largest count has the area of a disc in its cell; a line says how many it is."""
    axes = bubbles.axes
    box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    wide, high = 72 * box.width / (counts.shape[0] + 0.4), 72 * box.height / (counts.shape[1] + 0.4)
    diameter = max(min(0.96 * np.sqrt(wide * high), 0.96 * high, 2 * wide), _LARGEST_DISC)
    largest = max(int(counts.max()), 1)
    areas = np.maximum(diameter**2 * counts[_largest_first(counts)] / largest, _SMALLEST_DOT)
    bubbles.set_sizes(areas)
    bubbles.set_linewidths(np.minimum(0.05 * np.sqrt(areas), 0.6))
    axes.set_title(f"largest bubble: {largest:,} samples", loc="right", fontsize=8, color=_QUIET, pad=3)
