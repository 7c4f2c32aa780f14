"""What privacy costs: accuracy over epsilon, a line for each strength of the penalty, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.report import style
from fedstill.report.curves import End, name_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# lambda -> epsilon (math.inf: no noise) -> the accuracies of the seeds
Costs = Mapping[float, Mapping[float, Sequence[float]]]
BEST = "best lambda"
LEVEL = "0.4"  # colour of what has no epsilon


def best_lambda(costs: Costs, epsilon: float) -> float:
    """The lambda with the highest mean accuracy at this epsilon; of equal ones the first.

    >>> best_lambda({0.1: {1.0: [0.3, 0.5]}, 0.01: {1.0: [0.6]}, 0.001: {8.0: [0.9]}}, 1.0)
    0.01
    """
    known = [lam for lam, line in costs.items() if line.get(epsilon)]
    if not known:
        raise FedstillError(f"no run has epsilon = {epsilon:g}: run one before its best lambda is asked for")
    return max(known, key=lambda lam: float(np.mean(costs[lam][epsilon])))


def epsilons_of(costs: Costs) -> list[float]:
    """All that occur, from the strongest promise to none."""
    return sorted({epsilon for line in costs.values() for epsilon, seeds in line.items() if seeds})


def privacy_cost_picture(costs: Costs, path: Path, *, title: str, levels: Mapping[str, Sequence[float]]) -> Path:
    """Draw the lines into a PNG; several seeds make a band of one standard deviation.

    levels: what has no epsilon (a method without a claim, one that does not need it), a dotted line across each.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    places = {epsilon: place for place, epsilon in enumerate(epsilons_of(costs))}
    if not places:
        raise FedstillError(f"cannot draw {path.name}: there is no run with an epsilon, or without noise")
    figure = Figure(figsize=(8.0, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = _draw_lambdas(axes, costs, places)
    _draw_best(axes, costs, places)
    for name, seeds in levels.items():
        height = 100 * float(np.mean(seeds))
        axes.axhline(height, color=LEVEL, linewidth=1, linestyle=":")
        ends.append((height, name, (LEVEL, ":")))
    _dress(axes, places, title, most=max(len(seeds) for line in costs.values() for seeds in line.values()))
    name_ends(axes, ends)
    figure.savefig(path)
    return path


def _draw_lambdas(axes: Axes, costs: Costs, places: Mapping[float, int]) -> list[End]:
    ends = []
    for number, (lam, line) in enumerate(costs.items()):
        known = [epsilon for epsilon in places if line.get(epsilon)]
        if not known:
            continue
        x = [places[epsilon] for epsilon in known]
        mean = np.array([100 * np.mean(line[epsilon]) for epsilon in known])
        spread = np.array([100 * np.std(line[epsilon], ddof=1) if len(line[epsilon]) > 1 else 0.0 for epsilon in known])
        colour, dash = style(number)
        axes.plot(x, mean, color=colour, linestyle=dash, linewidth=1.6, marker="o", markersize=4)
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.13, linewidth=0)
        ends.append((float(mean[-1]), f"lambda = {lam:g}", (colour, dash)))
    return ends


def _draw_best(axes: Axes, costs: Costs, places: Mapping[float, int]) -> None:
    heights = [100 * float(np.mean(costs[best_lambda(costs, epsilon)][epsilon])) for epsilon in places]
    axes.plot(list(places.values()), heights, color="black", linewidth=3.5, alpha=0.35, zorder=1, label=BEST)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.94))


def _dress(axes: Axes, places: Mapping[float, int], title: str, *, most: int) -> None:
    axes.set_title(title + ("; band: one standard deviation" if most > 1 else ""), loc="left", fontsize=11)
    axes.set_xticks(
        list(places.values()), labels=["no noise" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in places]
    )
    axes.set_xlabel("epsilon of the certainty scores (stronger promise to the left)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_xlim(-0.2, max(len(places) - 1, 0.2))
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])  # none waits beyond the edge
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
