"""Learning curves: accuracy over rounds, the mean over seeds as a line and its spread as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import FedstillError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito (2008): eight colours that stay apart for colour-blind readers; yellow last (weak on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A900")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)))

Curve = tuple[Sequence[int], Sequence[float]]  # rounds, accuracies


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, mean and sample standard deviation over the seeds, at the rounds that all of them evaluated."""
    shared = sorted(set.intersection(*(set(rounds) for rounds, _ in curves)))
    rows = np.array([[dict(zip(rounds, values, strict=True))[at] for at in shared] for rounds, values in curves])
    spread = rows.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(len(shared))
    return np.array(shared), rows.mean(axis=0), spread


def learning_curves(
    curves: Mapping[str, Sequence[Curve]], path: Path, *, title: str, target: float | None = None
) -> Path:
    """Draw one line a method (names at their ends) into a PNG; several seeds make a band of one standard deviation."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    figure = Figure(figsize=(8.0, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends: list[tuple[float, str, str]] = []
    last = 1
    for place, (method, runs) in enumerate(curves.items()):
        rounds, mean, spread = band(runs)
        colour, dash = COLOURS[place % len(COLOURS)], _DASHES[place // len(COLOURS) % len(_DASHES)]
        marker = "o" if len(rounds) == 1 else None
        axes.plot(rounds, 100 * mean, color=colour, linestyle=dash, linewidth=1.8, marker=marker)
        axes.fill_between(rounds, 100 * (mean - spread), 100 * (mean + spread), color=colour, alpha=0.13, linewidth=0)
        ends.append((100 * float(mean[-1]), method, colour))
        last = max(last, int(rounds[-1]))
    fewest, seeds = (choose(len(runs) for runs in curves.values()) for choose in (min, max))
    count = f"{seeds}" if fewest == seeds else f"{fewest} to {seeds}"
    note = f"; {count} seeds, band: one standard deviation" if seeds > 1 else ""
    _dress(axes, title + note, last, target)
    name_ends(axes, ends)
    figure.savefig(path)
    return path


def _dress(axes: Axes, title: str, last: int, target: float | None) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy (%)")
    axes.set_xlim(0, last)
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if target is not None:
        axes.axhline(100 * target, color="0.4", linewidth=1, linestyle=":")
        axes.annotate(
            f"target {100 * target:g} %",
            (0, 100 * target),
            xytext=(4, 3),
            textcoords="offset points",
            color="0.4",
            fontsize=8,
        )


def name_ends(axes: Axes, ends: list[tuple[float, str, str]], *, gap: float = 0.052, form: str = ".1f") -> None:
    """Names right of the lines' ends, moved apart where they would overlap; a thin line leads back to the end.

    gap: least distance of two names, in heights of the axes.
    """
    low, high = axes.get_ylim()
    ordered = sorted(ends)
    heights = [(value - low) / (high - low) for value, _, _ in ordered]
    for height, place, (value, method, colour) in zip(heights, spread_apart(heights, gap), ordered, strict=True):
        axes.plot([1.0, 1.03], [height, place], color=colour, linewidth=0.8, transform=axes.transAxes, clip_on=False)
        axes.text(
            1.04, place, f"{value:{form}}  {method}", color=colour, fontsize=9, va="center", transform=axes.transAxes
        )


def spread_apart(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places, moved so that neighbours are at least `gap` apart and every crowd keeps its middle.

    >>> [round(place, 2) for place in spread_apart([0.1, 0.5, 0.5], 0.2)]
    [0.1, 0.4, 0.6]
    """
    crowds: list[list[float]] = []
    for place in places:
        crowds.append([place])
        while len(crowds) > 1 and _start(crowds[-1], gap) - _end(crowds[-2], gap) < gap:
            tail = crowds.pop()
            crowds[-1] = crowds[-1] + tail
    return [_start(crowd, gap) + i * gap for crowd in crowds for i in range(len(crowd))]


def _start(crowd: Sequence[float], gap: float) -> float:
    return sum(crowd) / len(crowd) - gap * (len(crowd) - 1) / 2


def _end(crowd: Sequence[float], gap: float) -> float:
    return _start(crowd, gap) + gap * (len(crowd) - 1)
