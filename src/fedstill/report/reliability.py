"""The reliability curve: how often answers of a confidence are right, before and after calibration."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstill.calibrate import Reliability
from fedstill.core.errors import FedstillError
from fedstill.report.curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST_DOT = 150.0  # points squared, of a bin with all rows; the area is the share of the rows
SMALLEST_DOT = 8.0
GAP = 0.16  # of a bin, between the bars of two bins


def reliability_picture(before: Reliability, after: Reliability | None, path: Path, *, title: str) -> Path:
    """Accuracy over confidence above, rows in each bin below; on the diagonal, confidence is what it says.

    A thin upright line is the 95 % interval of a bin's accuracy: a bin of few rows says little.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    figure = Figure(figsize=(6.2, 7.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    lines = {"not calibrated": before} if after is None else {"before calibration": before, "after calibration": after}
    for place, (name, measured) in enumerate(lines.items()):
        _draw_curve(curve, measured, name, COLOURS[place])
        _draw_counts(counts, measured, COLOURS[place], place=place, of=len(lines))
    figure.suptitle(textwrap.fill(title, 76), x=0.01, ha="left", fontsize=10)
    _dress(curve, counts)
    figure.savefig(path)
    return path


def wilson(right: float, rows: int, deviations: float = 1.96) -> tuple[float, float]:
    """The interval of a share seen in `rows` (Wilson, 1927): within [0, 1], and wide for few rows.

    >>> [round(bound, 3) for bound in wilson(1.0, 3)]
    [0.438, 1.0]
    """
    square = deviations**2
    centre = (right * rows + square / 2) / (rows + square)
    spread = deviations * math.sqrt(right * (1 - right) * rows + square / 4) / (rows + square)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _draw_curve(axes: Axes, measured: Reliability, name: str, colour: str) -> None:
    sure = [100 * one.confidence for one in measured.bins]
    right = [100 * one.accuracy for one in measured.bins]
    bounds = np.array([wilson(one.accuracy, one.count) for one in measured.bins])
    sizes = [max(LARGEST_DOT * one.count / measured.rows, SMALLEST_DOT) for one in measured.bins]
    told = f"{name}: ECE {100 * measured.ece:.1f} %, mean confidence {100 * measured.confidence:.1f} %"
    axes.vlines(sure, 100 * bounds[:, 0], 100 * bounds[:, 1], color=colour, linewidth=0.9, alpha=0.5)
    axes.plot(sure, right, color=colour, linewidth=1.0, alpha=0.6)
    axes.scatter(sure, right, s=sizes, color=colour, zorder=3, linewidth=0, label=told, clip_on=False)


def _draw_counts(axes: Axes, measured: Reliability, colour: str, *, place: int, of: int) -> None:
    low = np.array([100 * one.low for one in measured.bins])
    span = np.array([100 * (one.high - one.low) for one in measured.bins])
    width = span * (1 - GAP) / of
    axes.bar(low + span * GAP / 2 + width * place, [o.count for o in measured.bins], width, align="edge", color=colour)


def _dress(curve: Axes, counts: Axes) -> None:
    curve.plot([0, 100], [0, 100], color="0.5", linewidth=1, linestyle=":", zorder=1)
    curve.text(
        5, 7, "as often right as sure", color="0.4", fontsize=8,
        rotation=45, rotation_mode="anchor", transform_rotates_text=True,
    )  # fmt: skip
    curve.set_ylabel("answers that are right (%)")
    curve.set_ylim(0, 100)
    legend = curve.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=8, frameon=False, borderpad=0.1)
    for dot in legend.legend_handles:
        dot.set_sizes([30.0])  # type: ignore[union-attr]
    counts.set_ylabel("rows")
    counts.set_xlabel("confidence (%)")
    counts.set_xlim(0, 100)
    for axes in (curve, counts):
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
