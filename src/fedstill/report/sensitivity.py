"""How much each key of a sweep matters: means over all points with a value, in words, in letters and as a picture."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstill.core.errors import printable
from fedstill.report import COLOURS, drawn, new_figure, quiet, shortened
from fedstill.report.statistics import NO_DIFFERENCE, judge
from fedstill.report.table import align
from fedstill.storage.toml import parse_value, split_outside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_FILE = "sensitivity.png"
MOST_VALUES = 6  # of a key: more numbers are put into three groups of equal size
MOST_KEYS = 4  # whose curves are drawn
BAR = 24  # letters of the longest bar in a terminal
ON_HELD_BACK = (
    "Accuracies are on rows that clients hold back, because a choice by the test rows would flatter the best."
)
_SETTING = re.compile(r"([\w.]+)=(.*)", re.DOTALL)

Scores = Mapping[str, Sequence[float]]  # name of a point -> its accuracies, one for each seed


class Spread(NamedTuple):
    """The accuracies of all points with a value."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Effect:
    """How the accuracy changes with one key, whatever the other keys are."""

    key: str
    values: Mapping[str, Spread]  # by value, or by group of values, numbers in ascending order
    share: float  # of the variance between points that the means explain
    is_shown: bool | None  # whether the best and the worst value differ by more than chance; None: one seed

    @property
    def best(self) -> str:
        return max(self.values, key=lambda value: self.values[value].mean)

    @property
    def worst(self) -> str:
        return min(self.values, key=lambda value: self.values[value].mean)

    @property
    def range(self) -> float:
        return self.values[self.best].mean - self.values[self.worst].mean

    def as_json(self) -> dict[str, Any]:
        means = {value: spread.mean for value, spread in self.values.items()}
        return {"key": self.key, "means": means, "range": self.range, "share": self.share, "shown": self.is_shown}


@dataclass(frozen=True)
class Sensitivity:
    """The outcome of a sweep: its best point, the effect of each key, and a map of the two keys that matter most."""

    scores: Scores
    effects: tuple[Effect, ...]  # the largest first
    cells: Mapping[tuple[str, str], float]  # values of the first two keys -> the best mean over all other keys
    ended: Sequence[str] = ()  # points of a search that fell behind; they have no scores

    @property
    def best(self) -> str:
        """The point of the highest mean."""
        return max(self.scores, key=lambda name: statistics.fmean(self.scores[name]))

    @property
    def map_title(self) -> str:
        others = ", ".join(effect.key for effect in self.effects[2:])
        return f"accuracy (%) by {self.effects[0].key} and {self.effects[1].key}" + (
            f", the best over {others}" if others else ""
        )

    def as_json(self) -> dict[str, Any]:
        return {"best": self.best, "effects": [effect.as_json() for effect in self.effects]}


def point_of(name: str) -> dict[str, str]:
    """Return the settings in the name of a point.

    >>> point_of("local.lr=0.1, method=fedprox(mu=0.1, x=[1, 2])")
    {'local.lr': '0.1', 'method': 'fedprox(mu=0.1, x=[1, 2])'}
    """
    pairs = [_SETTING.fullmatch(piece.strip()) for piece in split_outside(name, ",")]
    return {match[1]: match[2] for match in pairs if match is not None}


def sensitivity(scores: Scores, ended: Sequence[str] = ()) -> Sensitivity | None:
    """Return the effect of every key that has more than one value; None where none has, or a name is no point.

    ended: names of points without scores, because a search ended them early.
    """
    known = {name: each for name, each in scores.items() if each and all(map(math.isfinite, each))}
    points = {name: point_of(name) for name in known}
    keys = list(dict.fromkeys(key for settings in points.values() for key in settings))
    if any(settings.keys() != set(keys) for settings in points.values()):
        return None
    groups = {key: _groups([each[key] for each in points.values()], alone=len(keys) == 1) for key in keys}
    effects = []
    for key in keys:
        members: dict[str, list[Sequence[float]]] = {group: [] for group in groups[key].values()}
        for name, settings in points.items():
            members[groups[key][settings[key]]].append(known[name])
        effects += [_effect(key, members)] if len(members) > 1 else []
    effects.sort(key=lambda effect: -effect.range)
    cells: dict[tuple[str, str], float] = {}
    if len(effects) > 1:
        first, second = effects[0].key, effects[1].key
        for name, settings in points.items():
            cell = groups[first][settings[first]], groups[second][settings[second]]
            cells[cell] = max(cells.get(cell, -math.inf), statistics.fmean(known[name]))
    return Sensitivity(known, tuple(effects), cells, ended) if effects else None


def _effect(key: str, members: Mapping[str, Sequence[Sequence[float]]]) -> Effect:
    """members: the accuracies of all points with a value, by value."""
    means = {value: [statistics.fmean(each) for each in points] for value, points in members.items()}
    values = {value: Spread(statistics.fmean(each), min(each), max(each)) for value, each in means.items()}
    every = [mean for each in means.values() for mean in each]
    middle = statistics.fmean(every)
    between = sum(len(means[value]) * (spread.mean - middle) ** 2 for value, spread in values.items())
    total = sum((mean - middle) ** 2 for mean in every)
    seeds = min(len(each) for points in members.values() for each in points)
    by_seed = {
        value: [statistics.fmean(each[seed] for each in points) for seed in range(seeds)]
        for value, points in members.items()
    }
    judgement = judge(by_seed) if seeds > 1 else None
    worst = min(values, key=lambda value: values[value].mean)
    is_shown = judgement.from_best[worst].is_shown if judgement and worst in judgement.from_best else None
    return Effect(key, values, between / total if total else 0.0, is_shown)


def as_number(text: str) -> float | None:
    value = parse_value(text)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _ascending(values: Iterable[str]) -> list[str]:
    """Return each value once: numbers in ascending order, then words as they come."""
    each = list(dict.fromkeys(values))
    numbers = {value: number for value in each if (number := as_number(value)) is not None}
    return [*sorted(numbers, key=lambda value: numbers[value]), *(value for value in each if value not in numbers)]


def _groups(values: Sequence[str], *, alone: bool) -> dict[str, str]:
    """Return the group of each value: the value itself, or one of three ranges where there are many numbers.

    A search over several keys draws numbers that no two points share: means of single points would say nothing.
    alone: whether no other key is swept.
    """
    each = _ascending(values)
    most = 3 if len(each) == len(values) and not alone else MOST_VALUES
    if len(each) <= most or any(as_number(value) is None for value in each):
        return {value: value for value in each}
    ends = [round(len(each) * part / 3) for part in range(4)]
    parts = [each[low:high] for low, high in itertools.pairwise(ends)]
    return {value: f"{part[0]} to {part[-1]}" for part in parts for value in part}


def in_sentences(sweep: Sensitivity) -> list[str]:
    """Say which point is best, how much each key matters, and where the best value is the last that was tried."""
    mean = statistics.fmean(sweep.scores[sweep.best])
    lines = [f"{sweep.best} is best, with {100 * mean:.1f} %."]
    for place, effect in enumerate(sweep.effects):
        matters = " matters most" if place == 0 and len(sweep.effects) > 1 else ""
        high, low = effect.values[effect.best].mean, effect.values[effect.worst].mean
        doubt = f"; {NO_DIFFERENCE}" if effect.is_shown is False else ""
        lines.append(
            f"{effect.key}{matters}: {100 * high:.1f} % on average at {effect.best}, {100 * low:.1f} % at "
            f"{effect.worst} ({100 * effect.share:.0f} % of the variance between points{doubt})."
        )
    return [*lines, *_at_an_end(sweep)]


def _at_an_end(sweep: Sensitivity) -> list[str]:
    """Warn of each key whose best value is the smallest or the largest number that was tried."""
    lines = []
    best = point_of(sweep.best)
    for effect in sweep.effects:
        numbers = [as_number(point_of(name).get(effect.key, "")) for name in (*sweep.scores, *sweep.ended)]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers) and as_number(best[effect.key]) in (min(known), max(known)):
            side = "largest" if as_number(best[effect.key]) == max(known) else "smallest"
            beyond = "larger" if side == "largest" else "smaller"
            lines.append(f"Its {effect.key} is the {side} that was tried: try {beyond} ones, too.")
    if sweep.ended:
        tried = len(sweep.scores) + len(sweep.ended)
        lines.append(
            f"{len(sweep.ended)} of {tried} points ended early, because they were below the median of the points "
            "before them; all other lines are about the others."
        )
    return lines


def in_letters(sweep: Sensitivity) -> str:
    """Draw the map of the two keys that matter most, and a bar for each value of each key, for a terminal."""
    blocks = []
    if sweep.cells:
        first, second = sweep.effects[:2]
        rows = [
            [
                row,
                *(
                    "" if (cell := sweep.cells.get((column, row))) is None else f"{100 * cell:.1f}"
                    for column in first.values
                ),
            ]
            for row in second.values
        ]
        blocks.append(f"{sweep.map_title}:\n" + align([[f"{second.key} \\ {first.key}", *first.values], *rows]))
    top = max(spread.mean for effect in sweep.effects for spread in effect.values.values())
    lines = [
        [
            effect.key if place == 0 else "",
            value,
            f"{100 * spread.mean:.1f}",
            "█" * round(BAR * spread.mean / (top or 1)),
        ]
        for effect in sweep.effects
        for place, (value, spread) in enumerate(effect.values.items())
    ]
    widths = [max(len(line[place]) for line in lines) for place in range(3)]
    bars = [f"{key:<{widths[0]}}  {value:>{widths[1]}}  {mean:>{widths[2]}}  {bar}" for key, value, mean, bar in lines]
    return "\n\n".join([*blocks, "mean accuracy (%) at each value:\n" + "\n".join(bars)])


def sensitivity_picture(sweep: Sensitivity, path: Path, *, title: str) -> Path:
    """Draw a heat map of the two keys that matter most, and the curve of each key."""
    shown = sweep.effects[:MOST_KEYS]
    columns = len(sweep.effects[0].values)
    wide = max(3.2, 1.2 + 0.8 * columns) if sweep.cells else 0.0
    sizes = [*([wide] if sweep.cells else []), *(2.6 for _ in shown)]
    width = max(5.0, sum(sizes))
    about = f"{title}; accuracy (%) on rows that clients hold back; bars: the lowest and the highest point"
    figure = new_figure(width, 3.6, about, letters=round(11 * width), size=10)
    places = list(figure.subplots(1, len(sizes), width_ratios=sizes, squeeze=False)[0])
    if sweep.cells:
        _draw_map(places.pop(0), sweep)
    low = min(spread.low for effect in shown for spread in effect.values.values())
    high = max(spread.high for effect in shown for spread in effect.values.values())
    margin = 5 * (high - low or 0.1)
    for place, (axes, effect) in enumerate(zip(places, shown, strict=True)):
        _draw_curve(axes, effect)
        axes.set_ylim(100 * low - margin, 100 * high + margin)
        axes.set_ylabel("mean accuracy (%)" if place == 0 else "")
    figure.savefig(path)
    return path


def _draw_map(axes: Axes, sweep: Sensitivity) -> None:
    first, second = sweep.effects[:2]
    table = [[100 * sweep.cells.get((column, row), math.nan) for column in first.values] for row in second.values]
    image = axes.imshow(table, cmap="cividis", aspect="auto")
    low, high = image.get_clim()
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "white" if value < (low + high) / 2 else "black"
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=9)
    _name(axes, first, "x")
    _name(axes, second, "y")
    others = ", ".join(effect.key for effect in sweep.effects[2:])
    axes.set_title(shortened(f"best over {others} (%)" if others else "accuracy (%)", 30), fontsize=9, parse_math=False)


def _draw_curve(axes: Axes, effect: Effect) -> None:
    numbers = [as_number(value) for value in effect.values]
    positive = [number for number in numbers if number is not None and number > 0]
    places = positive if len(positive) == len(numbers) else [float(place) for place in range(len(numbers))]
    means = [100 * spread.mean for spread in effect.values.values()]
    reach = [
        [100 * (s.mean - s.low) for s in effect.values.values()],
        [100 * (s.high - s.mean) for s in effect.values.values()],
    ]
    line = "" if None in numbers else "-"  # words have no order
    axes.errorbar(places, means, yerr=reach, color=COLOURS[0], ecolor="0.6", linestyle=line, marker="o", capsize=3)
    if places is positive:
        axes.set_xscale("log")
        axes.minorticks_off()
    _name(axes, effect, "x", places)
    quiet(axes)


def _name(axes: Axes, effect: Effect, side: str, places: Sequence[float] | None = None) -> None:
    """Write a key and its values beside the x or the y axis."""
    names = [printable(shortened(value, 18)) for value in effect.values]
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_ticks(list(range(len(names))) if places is None else list(places), names)
    axis.set_label_text(drawn(effect.key))
    slanted = side == "x" and sum(map(len, names)) > 22
    for text in axis.get_ticklabels():
        text.set(parse_math=False, fontsize=9, **({"rotation": 30, "ha": "right"} if slanted else {}))
