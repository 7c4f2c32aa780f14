"""The picture of a probe: what models see of the test set, in one plane, and how far training carried them apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.report import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CLASSES = 20  # that a legend can name


class View(NamedTuple):
    """One model: its features (M, 2) and its accuracy."""

    name: str
    points: np.ndarray
    accuracy: float


class Level(NamedTuple):
    """How clients were split, and the two measures."""

    name: str
    gradient_variance: float
    weight_divergence: float


def divergence_picture(
    views: Sequence[View],
    levels: Sequence[Level],
    path: Path,
    *,
    labels: np.ndarray,
    title: str,
    classes: Sequence[str] = (),
) -> Path:
    """Features of the views in two rows, column by column (MrTF, Fig. 3), and the measures of the levels as bars.

    labels: (M,) the class of each point, its colour. All views have the same axes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    columns = -(-len(views) // 2)
    figure = Figure(figsize=(2.1 * columns + 2.9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    grid = figure.subplots(2, columns + 1, squeeze=False, width_ratios=[*[2.1] * columns, 2.7])
    places = [grid[row, column] for column in range(columns) for row in (0, 1)]
    colours = _class_colours(int(labels.max()) + 1)
    edges = _edges([view.points for view in views])
    for axes, view in zip(places, views, strict=False):
        _draw_view(axes, view, labels, colours, edges)
    for axes in places[len(views) :]:
        axes.set_axis_off()
    _draw_bars(grid[0, -1], {level.name: level.gradient_variance for level in levels}, "gradient variance")
    _draw_bars(grid[1, -1], {level.name: level.weight_divergence for level in levels}, "weight divergence")
    names = list(classes) or [str(c) for c in range(len(colours))]
    if len(colours) <= MOST_CLASSES:
        dots = [places[0].scatter([], [], color=colour, s=18) for colour in colours]
        figure.legend(dots, names[: len(dots)], loc="outside lower left", ncols=10, fontsize=8, frameon=False)
    figure.savefig(path)
    return path


def _class_colours(count: int) -> np.ndarray:
    import matplotlib

    if count <= 10:
        return np.array(matplotlib.colormaps["tab10"](np.arange(count)))
    return np.array(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def _edges(clouds: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    everything = np.concatenate(clouds)
    low, high = everything.min(axis=0), everything.max(axis=0)
    margin = 0.04 * (high - low) + 1e-9
    return low - margin, high + margin


def _draw_view(
    axes: Axes, view: View, labels: np.ndarray, colours: np.ndarray, edges: tuple[np.ndarray, np.ndarray]
) -> None:
    axes.scatter(view.points[:, 0], view.points[:, 1], c=colours[labels], s=5, alpha=0.6, linewidth=0)
    axes.set_title(view.name, fontsize=9)
    paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
    accuracy = f"{100 * view.accuracy:.1f} %"
    axes.text(0.97, 0.96, accuracy, transform=axes.transAxes, ha="right", va="top", fontsize=8, bbox=paper)
    axes.set_xlim(edges[0][0], edges[1][0])
    axes.set_ylim(edges[0][1], edges[1][1])
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("0.7")


def _draw_bars(axes: Axes, values: dict[str, float], label: str) -> None:
    bars = axes.barh(list(values), list(values.values()), color=COLOURS[0], height=0.6)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set_title(label, fontsize=9)
    axes.set_xlim(0, 1.3 * max(*values.values(), 1e-12))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
