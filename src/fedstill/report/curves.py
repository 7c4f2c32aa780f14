"""Learning curves: accuracy over rounds, the mean over seeds as a line and its spread as a band."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.report import COLOURS, Style, drawn, imported_matplotlib, new_figure, quiet, style, whole_rounds, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 4.6  # inches of a picture, unless its names need more
GAP = 0.052  # of two names right of their lines, in heights of the axes of such a picture
SWATCH = (1.03, 1.10)  # where a piece of the line stands before its name, in widths of the axes: two dashes at least
LINE_WIDTH = 1.8
BANDS = 4  # methods at most whose bands can be told apart
GREY = "0.45"  # of reference points
NAME_WIDTH = 34  # letters a line, beside a picture of eight inches

End = tuple[float, str, Style]  # of a line: where it ends, its name, how it is drawn
Curve = tuple[Sequence[int], Sequence[float]]  # rounds, accuracies
Band = tuple[np.ndarray, np.ndarray, np.ndarray]  # rounds, mean, standard deviation


def about_seeds(counts: Iterable[int], mark: str) -> str:
    """Return the words of a title on the seeds of its methods and on the marks around their means, if there are any.

    >>> about_seeds([3, 2], "band"), about_seeds([3, 3], ""), about_seeds([1, 1], "band")
    ('; 2 to 3 seeds, band: one standard deviation', '; mean of 3 seeds', '')
    """
    each = sorted(counts)
    count = f"{each[-1]}" if each[0] == each[-1] else f"{each[0]} to {each[-1]}"
    if each[-1] == 1:
        return ""
    return f"; {count} seeds, {mark}: one standard deviation" if mark else f"; mean of {count} seeds"


def band(curves: Sequence[Curve]) -> Band:
    """Return rounds, mean and sample standard deviation over the seeds, at the rounds that all of them evaluated."""
    shared = sorted(set.intersection(*(set(rounds) for rounds, _ in curves)))
    rows = np.array([[dict(zip(rounds, values, strict=True))[at] for at in shared] for rounds, values in curves])
    spread = rows.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(len(shared))
    return np.array(shared), rows.mean(axis=0), spread


def learning_curves(
    curves: Mapping[str, Sequence[Curve]],
    path: Path,
    *,
    title: str,
    target: float | None = None,
    references: Mapping[str, float] | None = None,
) -> Path:
    """Draw one line a method into a PNG; several seeds of few methods make bands of one standard deviation.

    Many bands would hide each other. Where every method has one round (one-shot), there is a bar a method, and the line
    beyond its end is that deviation.
    references: accuracies that belong to no round, by name; each is a grey line across the picture, or a grey bar.
    """
    references = references or {}
    bands = {wrapped(method, NAME_WIDTH): band(runs) for method, runs in curves.items()}
    gap = GAP * max(name.count("\n") + 1 for name in bands)
    taller = max(1.0, gap * (len(bands) + len(references)))  # so that all names find room
    bars = all(len(rounds) == 1 for rounds, _, _ in bands.values())
    mark = "line" if bars else "band" if len(bands) <= BANDS else ""
    note = about_seeds((len(runs) for runs in curves.values()), mark)
    figure = new_figure(8.0, HEIGHT * taller, title + note)
    axes = figure.add_subplot()
    if bars:
        _draw_bars(axes, bands, references, target)
    else:
        _draw_lines(axes, bands, references, target, gap / taller)
    figure.savefig(path)
    return path


def paper_curves(curves: Mapping[str, Sequence[Curve]], path: Path, *, width: float) -> Path:
    """Draw the curves `width` inches wide for a paper, with the names below; the ending of `path` names the form.

    There is no title, because a paper has a caption. Bands of one standard deviation are drawn for few methods only,
    because many bands hide each other. The same curves give the same file.
    """
    small: dict[Any, Any] = {
        "font.size": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
    }
    with imported_matplotlib().rc_context(
        {**small, "axes.linewidth": 0.6, "pdf.fonttype": 42, "svg.hashsalt": "fedstill"}
    ):
        letters = round(9 * width)  # of a name, in a legend of two columns
        names = [wrapped(method, letters) for method in curves]
        names = [drawn(f" {name}" if name.startswith("_") else name) for name in names]  # matplotlib would leave it out
        lines = sum(name.count("\n") + 1 for name in names)
        figure = new_figure(width, min(0.5 * width, 2.4) + 0.7 + 0.075 * lines)
        axes = figure.add_subplot()
        last = 1
        for place, (name, runs) in enumerate(zip(names, curves.values(), strict=True)):
            rounds, mean, spread = band(runs)
            colour, dash = style(place)
            marker = "o" if len(rounds) == 1 else None
            axes.plot(rounds, 100 * mean, color=colour, linestyle=dash, linewidth=1.1, marker=marker, label=name)
            if len(curves) <= BANDS:
                edges = 100 * (mean - spread), 100 * (mean + spread)
                axes.fill_between(rounds, *edges, color=colour, alpha=0.15, linewidth=0)
            last = max(last, int(rounds[-1]))
        axes.set_xlabel("round")
        axes.set_ylabel("test accuracy (%)")
        whole_rounds(axes)
        axes.set_xlim(0, last)
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
        quiet(axes)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=2.6, columnspacing=1.2)
        undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix.lower())
        figure.savefig(path, dpi=300, metadata=undated)
    return path


def _draw_lines(
    axes: Axes, bands: Mapping[str, Band], references: Mapping[str, float], target: float | None, gap: float
) -> None:
    ends: list[End] = []
    for place, (method, (rounds, mean, spread)) in enumerate(bands.items()):
        colour, dash = style(place)
        marker = "o" if len(rounds) == 1 else None
        axes.plot(rounds, 100 * mean, color=colour, linestyle=dash, linewidth=LINE_WIDTH, marker=marker)
        if len(bands) <= BANDS:
            edges = 100 * (mean - spread), 100 * (mean + spread)
            axes.fill_between(rounds, *edges, color=colour, alpha=0.13, linewidth=0)
        ends.append((100 * float(mean[-1]), method, (colour, dash)))
    for place, (name, accuracy) in enumerate(references.items()):
        grey: Style = GREY, style(len(COLOURS) * (place + 1))[1]
        axes.axhline(100 * accuracy, color=grey[0], linestyle=grey[1], linewidth=1.2)
        ends.append((100 * accuracy, name, grey))
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy (%)")
    whole_rounds(axes)
    axes.set_xlim(0, max(int(rounds[-1]) for rounds, _, _ in bands.values()))
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    quiet(axes)
    if target is not None:
        axes.axhline(100 * target, color="0.4", linewidth=1, linestyle=":")
        beside: dict[str, Any] = {"xytext": (4, 3), "textcoords": "offset points", "color": "0.4", "fontsize": 8}
        axes.annotate(f"target {100 * target:g} %", (0, 100 * target), **beside)
    name_ends(axes, ends, gap=gap)


def _draw_bars(axes: Axes, bands: Mapping[str, Band], references: Mapping[str, float], target: float | None) -> None:
    """Draw methods with their accuracies after their only evaluated round from top to bottom, then reference points."""
    rounds = {int(band[0][0]) for band in bands.values()}
    none = np.zeros(1)
    bands = {**bands, **{name: (none, np.array([accuracy]), none) for name, accuracy in references.items()}}
    names, places = list(bands), np.arange(len(bands))
    heights, spreads = (np.array([100 * bands[name][part][0] for name in names]) for part in (1, 2))
    colours = [GREY if name in references else style(place)[0] for place, name in enumerate(names)]
    axes.barh(places, heights, height=min(0.7, 0.18 * len(names)), color=colours)
    shown = spreads > 0
    if shown.any():
        axes.errorbar(heights[shown], places[shown], xerr=spreads[shown], fmt="none", ecolor="0.25", elinewidth=1.2)
    for place, height, spread in zip(places, heights, spreads, strict=True):
        ends = (height + spread, place)
        axes.annotate(f"{height:.1f}", ends, xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(places, labels=list(map(drawn, names)))
    axes.set_ylim(max(len(names) - 0.5, 0.9), min(-0.5, -0.9 * (len(names) == 1)))
    axes.set_xlim(0, max(1.1 * axes.dataLim.x1, 1.0, 105 * (target or 0)))
    quiet(axes, "x")
    axes.tick_params(axis="y", length=0)
    after = f" after round {rounds.pop()}" if len(rounds) == 1 else ""
    goal = "" if target is None else f"; dotted: target {100 * target:g}"
    axes.set_xlabel(f"test accuracy{after} (%){goal}")
    if target is not None:
        axes.axvline(100 * target, color="0.4", linewidth=1, linestyle=":")


def name_ends(axes: Axes, ends: Sequence[End], *, gap: float = GAP, form: str = ".1f") -> None:
    """Write names right of the lines' ends, each behind a piece of its line, moved apart where they would overlap.

    Where a name would stand farther than `gap` from its line's end, the names stand as a list, the highest end first,
    because a name at the height of another value misleads.
    gap: least distance of two names, in heights of the axes.
    """
    low, high = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end[:2])
    heights = [(value - low) / (high - low) for value, _, _ in ordered]
    places = within(spread_apart(heights, gap), gap)
    listed = any(abs(place - height) > gap for place, height in zip(places, heights, strict=True))
    if listed:
        lines = [name.count("\n") + 1 for _, name, _ in ordered]
        above = np.cumsum(lines[::-1])[::-1] - np.array(lines) / 2  # lines of text above the middle of each name
        places = list(1.0 - gap / max(lines) * above)
    beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for height, place, (value, name, (colour, dash)) in zip(heights, places, ordered, strict=True):
        if not listed:
            axes.plot([1.0, SWATCH[0]], [height, place], color=colour, linewidth=0.8, **beside)
        axes.plot(SWATCH, [place, place], color=colour, linestyle=dash, linewidth=LINE_WIDTH, **beside)
        words = f"{value:{form}}  {drawn(name)}"
        axes.text(SWATCH[1] + 0.01, place, words, color=colour, fontsize=9, va="center", **beside)


def spread_apart(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places so that neighbours are at least `gap` apart and every crowd keeps its middle.

    >>> [round(place, 2) for place in spread_apart([0.1, 0.5, 0.5], 0.2)]
    [0.1, 0.4, 0.6]
    """
    crowds: list[list[float]] = []

    def start(crowd: Sequence[float]) -> float:
        return sum(crowd) / len(crowd) - gap * (len(crowd) - 1) / 2

    for place in places:
        crowds.append([place])
        while len(crowds) > 1 and start(crowds[-1]) - (start(crowds[-2]) + gap * (len(crowds[-2]) - 1)) < gap:
            tail = crowds.pop()
            crowds[-1] = crowds[-1] + tail
    return [start(crowd) + i * gap for crowd in crowds for i in range(len(crowd))]


def within(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places that are `gap` apart into 0 to 1; those that find no room stand out above.

    >>> [round(place, 2) for place in within([0.5, 0.9, 1.1], 0.2)]
    [0.5, 0.8, 1.0]
    """
    moved, ceiling, floor = list(places), 1.0, 0.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - gap
    for i, place in enumerate(moved):
        moved[i] = max(place, floor)
        floor = moved[i] + gap
    return moved
