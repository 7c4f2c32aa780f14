"""Pictures of the pseudo-labels on the server, round by round: how right, how many, of which classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.report import Style, drawn, new_figure, quiet, shortened, style, whole_rounds, wrapped
from fedstill.report.curves import NAME_WIDTH, Curve, about_seeds, band, name_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]  # History.rows of one run
Lines = Mapping[str, tuple[Sequence[Curve], Style]]  # by name: a curve a seed, and how it is drawn
# Greys, since every colour may be that of a method in the comparison's other pictures.
BESIDE = {"accuracy": ("test set", "0.3"), "accuracy_aggregated": ("test set, before refining", "0.6")}
MOST_BARS = 200  # classes times methods; beyond it lines
MOST_NAMES = 30  # of classes
TALL, LOW, LINE = 3.4, 2.2, 0.19  # inches: of panels, and of a line of names


def has_pseudo_labels(rows: Rows) -> bool:
    return any(row.get("pseudo_labels") is not None for row in rows)


def pseudo_label_picture(
    runs: Mapping[str, Sequence[Rows]], path: Path, *, title: str, classes: Sequence[str] = ()
) -> Path:
    """Accuracy of the pseudo-labels (where the truth is known), how many are kept, and their classes, into a PNG.

    runs: the rows of every seed of a method, by its name; means over the seeds are drawn. One method alone is shown
    beside its test accuracy, and its classes in every round; of several, the classes in the last (D2C-FL, Fig. 9).
    """
    shown = {name: [rows for rows in seeds if has_pseudo_labels(rows)] for name, seeds in runs.items()}
    styles = {name: style(place) for place, name in enumerate(runs) if shown[name]}
    runs = {name: shown[name] for name in styles}
    if not runs:
        raise FedstillError(f"cannot draw {path.name}: no run has pseudo-labels in its rows")
    several, right = len(runs) > 1, _accuracies(runs, styles)
    kept = {name if several else "": (_curves(seeds, "pseudo_labels"), styles[name]) for name, seeds in runs.items()}
    with_truth = any(_shared(curves) for curves, _ in right.values())
    heights = [*([_height(TALL, right)] if with_truth else []), _height(LOW, kept), TALL]
    dots = all(len(_shared(curves)) < 2 for curves, _ in kept.values())
    note = about_seeds(map(len, runs.values()), "line" if dots else "band")
    figure = new_figure(8.0, sum(heights), f"{title}{note}" if several else f"{next(iter(runs))}, {title}{note}")
    panels = list(figure.subplots(len(heights), 1, height_ratios=heights))
    for panel in panels[: len(heights) - (not several)]:
        quiet(panel)
    panels[-1].spines[["top", "right"]].set_visible(False)
    last = max(int(rows[-1]["round"]) for seeds in runs.values() for rows in seeds)
    if with_truth:
        label = "pseudo-labels that are right (%)" if several else "accuracy (%)"
        _draw_lines(panels[0], right, label, last, height=heights[0], scale=100.0)
    _draw_lines(panels[-2], kept, "pseudo-labels kept", last, height=heights[-2], form=",.0f")
    if several:
        panels[-2].set_xlabel("round")
        _draw_last_round(panels[-1], runs, styles, classes)
    else:
        _draw_every_round(figure, panels[-1], next(iter(runs.values())), classes, last)
    figure.savefig(path)
    return path


def _height(least: float, lines: Lines) -> float:
    """Inches of a panel whose names find room beside it."""
    return max(least, LINE * (_name_lines(lines) * len(lines) + 1))


def _name_lines(lines: Lines) -> int:
    return max(wrapped(name, NAME_WIDTH).count("\n") + 1 for name in lines)


def _curves(seeds: Iterable[Rows], key: str) -> list[Curve]:
    """(rounds, values) of every seed, where it has them."""
    pairs = ([(int(row["round"]), float(row[key])) for row in rows if row.get(key) is not None] for rows in seeds)
    return [([at for at, _ in curve], [value for _, value in curve]) for curve in pairs]


def _accuracies(runs: Mapping[str, Sequence[Rows]], styles: Mapping[str, Style]) -> Lines:
    """Of the pseudo-labels of every method; one method alone has its accuracies on the test set beside it."""
    curves = {name: (_curves(seeds, "pseudo_label_accuracy"), styles[name]) for name, seeds in runs.items()}
    if len(runs) > 1:
        return curves
    ((name, seeds),) = runs.items()
    beside = {label: (_curves(seeds, key), (grey, "-")) for key, (label, grey) in BESIDE.items()}
    return {"pseudo-labels": curves[name], **beside}


def _shared(curves: Sequence[Curve]) -> set[int]:
    """The rounds that all seeds have: those that are drawn."""
    return set.intersection(*(set(rounds) for rounds, _ in curves))


def _draw_lines(
    axes: Axes, lines: Lines, label: str, last: int, *, height: float, scale: float = 1.0, form: str = ".1f"
) -> None:
    ends = []
    for name, (curves, (colour, dash)) in lines.items():
        if not _shared(curves):
            continue
        rounds, mean, spread = band(curves)
        mean, spread = scale * mean, scale * spread
        if len(rounds) == 1:
            axes.plot(rounds, mean, color=colour, marker="o")
            axes.errorbar(rounds, mean, yerr=spread, fmt="none", ecolor=colour, elinewidth=1.2)
        else:
            axes.plot(rounds, mean, color=colour, linestyle=dash, linewidth=1.8)
            axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.13, linewidth=0)
        ends.append((float(mean[-1]), wrapped(name, NAME_WIDTH), (colour, dash)))
    axes.set_ylabel(label)
    axes.set_xlim(0.5, last + 0.5)
    whole_rounds(axes)
    axes.set_ylim(0, max(1.08 * axes.dataLim.y1, 1.0))
    name_ends(axes, ends, gap=LINE * _name_lines(lines) / height, form=form)


def _counts(seeds: Iterable[Rows]) -> dict[int, np.ndarray]:
    """Round -> (K,) pseudo-labels of each class, the mean over the seeds that have them."""
    counts_by_round: dict[int, list[Sequence[float]]] = {}
    for rows in seeds:
        for row in rows:
            if row.get("pseudo_label_counts"):
                counts_by_round.setdefault(int(row["round"]), []).append(row["pseudo_label_counts"])
    return {at: np.mean(np.array(counts, float), axis=0) for at, counts in counts_by_round.items()}


def _names(classes: Sequence[str], count: int) -> list[str]:
    """A name for each class, or numbers where there are too many to read."""
    named = len(classes) == count and count <= MOST_NAMES
    return [drawn(shortened(str(name), 16)) for name in classes] if named else []


def _draw_last_round(
    axes: Axes, runs: Mapping[str, Sequence[Rows]], styles: Mapping[str, Style], classes: Sequence[str]
) -> None:
    """Pseudo-labels of each class in the last round, the methods side by side."""
    bars = [counts[max(counts)] for counts in map(_counts, runs.values())]
    count, width = max(len(heights) for heights in bars), 0.84 / len(bars)
    for place, (heights, (colour, dash)) in enumerate(zip(bars, styles.values(), strict=True)):
        at = np.arange(len(heights))
        if count * len(bars) <= MOST_BARS:
            axes.bar(at - 0.42 + (place + 0.5) * width, heights, width, color=colour)
        else:
            axes.plot(at, heights, color=colour, linestyle=dash, linewidth=1.2)
    axes.set_ylabel("pseudo-labels kept,\nlast round")
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_ylim(0, max(1.05 * axes.dataLim.y1, 1.0))
    names = _names(classes, count)
    if names:
        axes.set_xticks(range(count), labels=names, fontsize=8, rotation=30 if max(map(len, names)) > 4 else 0)
    else:
        axes.set_xticks(range(0, count, max(1, count // 10)))
    axes.set_xlabel("class")


def _draw_every_round(figure: Figure, axes: Axes, seeds: Sequence[Rows], classes: Sequence[str], last: int) -> None:
    """Shares of the classes among the pseudo-labels, one column a round."""
    columns = _counts(seeds)
    count = max(len(column) for column in columns.values())
    shares = np.full((count, last), np.nan)
    for at, column in columns.items():
        if column.sum() > 0:
            shares[:, at - 1] = 100 * column / column.sum()
    edges = np.arange(last + 1) + 0.5
    mesh = axes.pcolormesh(edges, np.arange(count + 1) - 0.5, shares, cmap="Blues", vmin=0)
    axes.set_ylim(count - 0.5, -0.5)
    names = _names(classes, count)
    if names:
        axes.set_yticks(range(count), labels=names, fontsize=8)
    axes.set_ylabel("class")
    axes.set_xlabel("round")
    whole_rounds(axes)
    bar = figure.colorbar(mesh, cax=axes.inset_axes((1.04, 0.0, 0.03, 1.0)))
    bar.set_label("share of the pseudo-labels (%)", fontsize=9)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
