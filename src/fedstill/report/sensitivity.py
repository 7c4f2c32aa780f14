"""How much each key of a sweep matters: means over all points with a value, in words and as a picture."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.report import COLOURS, new_figure, quiet, shortened
from fedstill.report.statistics import NO_DIFFERENCE, is_point, judge
from fedstill.report.table import MethodSummary
from fedstill.storage.toml import parse_value, split_outside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_FILE = "sensitivity.png"
VALIDATION, TEST = "validation_accuracy", "accuracy"
MOST_VALUES = 6  # of a key: more numbers, as a search draws them, are put into three groups of equal size
_SETTING = re.compile(r"([\w.]+)=(.*)", re.DOTALL)

Points = Mapping[str, Sequence[float]]  # name of a point -> its scores, one for each seed


@dataclass(frozen=True)
class Effect:
    """How the score changes with one key, whatever the other keys are."""

    key: str
    means: Mapping[str, float]  # by value, or by group of values, in ascending order: the mean over all its points
    share: float  # of the variance between points that these means explain
    is_shown: bool | None  # whether best and worst value differ by more than chance; None: one seed

    @property
    def best(self) -> str:
        return max(self.means, key=lambda value: self.means[value])

    @property
    def worst(self) -> str:
        return min(self.means, key=lambda value: self.means[value])

    @property
    def range(self) -> float:
        return self.means[self.best] - self.means[self.worst]

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "range": self.range, "share": self.share, "shown": self.is_shown, "means": self.means}


@dataclass(frozen=True)
class Sensitivity:
    """The outcome of a sweep: its best point, and the effect of each key, the largest first."""

    points: Points
    effects: tuple[Effect, ...]
    on_validation: bool  # the scores are accuracies on validation rows, else on test rows

    @property
    def best(self) -> str:
        """The point of the highest mean."""
        return max(self.points, key=lambda name: statistics.fmean(self.points[name]))

    @property
    def rows(self) -> str:
        return "validation" if self.on_validation else "test"

    def as_json(self) -> dict[str, Any]:
        return {"best": self.best, "rows": self.rows, "effects": [effect.as_json() for effect in self.effects]}


def score_of(row: Mapping[str, Any]) -> float | None:
    """Return the number of a round by which a point is chosen: on validation rows where there are any, else on test."""
    score: float | None = row.get(VALIDATION) if row.get(VALIDATION) is not None else row.get(TEST)
    return score


def point_of(name: str) -> dict[str, str]:
    """Return the settings in the name of a point.

    >>> point_of("local.lr=0.1, method=fedprox(mu=0.1, x=[1, 2])")
    {'local.lr': '0.1', 'method': 'fedprox(mu=0.1, x=[1, 2])'}
    """
    pairs = [_SETTING.fullmatch(piece.strip()) for piece in split_outside(name, ",")]
    return {match[1]: match[2] for match in pairs if match is not None}


def of_table(summaries: Iterable[MethodSummary]) -> Sensitivity | None:
    """Return the sensitivity in the table of a comparison; None where its rows are no points of a sweep."""
    rows = [row for row in summaries if not row.is_reference and math.isfinite(row.mean)]
    column = "validation %"
    if rows and all(column in row.metrics for row in rows):
        return sensitivity({row.method: [row.metrics[column] / 100] for row in rows}, on_validation=True)
    return sensitivity({row.method: row.last for row in rows})


def sensitivity(points: Points, *, on_validation: bool = False) -> Sensitivity | None:
    """Return the effect of every key that has more than one value; None where no name is a point, or nothing varies."""
    known = {name: point_of(name) for name in points if is_point(name)}
    if len(known) < 2 or len(known) < len(points):
        return None
    keys = list(dict.fromkeys(key for settings in known.values() for key in settings))
    groups = {key: _groups([settings.get(key, "") for settings in known.values()]) for key in keys}
    effects = []
    for key in keys:
        members: dict[str, list[Sequence[float]]] = {group: [] for group in groups[key].values()}
        for name, settings in known.items():
            members[groups[key][settings.get(key, "")]].append(points[name])
        if len(members) > 1:
            effects.append(_effect(key, members))
    if not effects:
        return None
    return Sensitivity(points, tuple(sorted(effects, key=lambda effect: -effect.range)), on_validation)


def _effect(key: str, members: Mapping[str, Sequence[Sequence[float]]]) -> Effect:
    """members: the scores of all points with a value, by value."""
    scores = {value: [statistics.fmean(each) for each in points] for value, points in members.items()}
    every = [score for each in scores.values() for score in each]
    middle = statistics.fmean(every)
    means = {value: statistics.fmean(each) for value, each in scores.items()}
    between = sum(len(scores[value]) * (mean - middle) ** 2 for value, mean in means.items())
    total = sum((score - middle) ** 2 for score in every)
    seeds = min(len(each) for points in members.values() for each in points)
    by_seed = {
        value: [statistics.fmean(each[seed] for each in points) for seed in range(seeds)]
        for value, points in members.items()
    }
    judgement = judge(by_seed) if seeds > 1 else None
    worst = min(means, key=lambda value: means[value])
    told = None if judgement is None else judgement.from_best.get(worst)
    return Effect(key, means, between / total if total else 0.0, None if told is None else told.is_shown)


def as_number(text: str) -> float | None:
    value = parse_value(text)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _ascending(values: Iterable[str]) -> list[str]:
    """Return values once each: numbers in ascending order, words as they come, after the numbers."""
    each = list(dict.fromkeys(values))
    numbers = {value: number for value in each if (number := as_number(value)) is not None}
    return [*sorted(numbers, key=lambda value: numbers[value]), *(value for value in each if value not in numbers)]


def _groups(values: Sequence[str]) -> dict[str, str]:
    """Return the group of each value: the value itself, or one of three ranges where there are many numbers."""
    each = _ascending(values)
    if len(each) <= MOST_VALUES or any(as_number(value) is None for value in each):
        return {value: value for value in each}
    ends = [round(len(each) * part / 3) for part in range(4)]
    parts = [each[low:high] for low, high in zip(ends, ends[1:], strict=False)]
    return {value: f"{part[0]} to {part[-1]}" for part in parts for value in part}


def in_sentences(found: Sensitivity) -> list[str]:
    """Say which key matters most and how much each one does, where the best value is at an end, and what to trust."""
    first, *others = found.effects
    lines = [f"{first.key} matters most: {_about(first)}."] if others else [f"{first.key}: {_about(first)}."]
    lines += [f"{effect.key}: {_about(effect)}." for effect in others]
    lines += _ends(found)
    mean = f"{100 * statistics.fmean(found.points[found.best]):.1f} %"
    if found.on_validation:
        lines.append(
            f"{found.best} is best on validation rows ({mean}), which chose it; its test accuracy in the table is fair."
        )
    else:
        lines.append(
            f"{found.best} is the best of {len(found.points)} points on the test rows that chose it, so {mean} is "
            "optimistic: set data.validation, e.g. 500, to choose on other rows."
        )
    return lines


def _about(effect: Effect) -> str:
    high, low = effect.means[effect.best], effect.means[effect.worst]
    doubt = f"; {NO_DIFFERENCE}" if effect.is_shown is False else ""
    return (
        f"{100 * high:.1f} % on average at {effect.best}, {100 * low:.1f} % at {effect.worst} "
        f"({100 * effect.range:.1f} points, {100 * effect.share:.0f} % of the variance between points{doubt})"
    )


def _ends(found: Sensitivity) -> list[str]:
    """Warn of each key whose best value is the smallest or the largest number that was tried."""
    lines = []
    best = point_of(found.best)
    for effect in found.effects:
        values = _ascending(point_of(name).get(effect.key, "") for name in found.points)
        numbers = [number for value in values if (number := as_number(value)) is not None]
        at = as_number(best.get(effect.key, ""))
        if len(numbers) > 1 and len(numbers) == len(values) and at in (numbers[0], numbers[-1]):
            side = "largest" if at == numbers[-1] else "smallest"
            lines.append(
                f"The best {effect.key}, {best[effect.key]}, is the {side} that was tried: try beyond it."
            )
    return lines


def cells(found: Sensitivity) -> tuple[Effect, Effect, dict[tuple[str, str], float]]:
    """Return the two keys that matter most, and the best mean score for each pair of their values, over other keys."""
    first, second = found.effects[:2]
    groups = {
        effect.key: _groups([point_of(name).get(effect.key, "") for name in found.points]) for effect in (first, second)
    }
    best: dict[tuple[str, str], float] = {}
    for name, scores in found.points.items():
        settings = point_of(name)
        pair = groups[first.key][settings.get(first.key, "")], groups[second.key][settings.get(second.key, "")]
        best[pair] = max(best.get(pair, -math.inf), statistics.fmean(scores))
    return first, second, best


def heading(found: Sensitivity) -> str:
    """Return the title of the picture of a sweep."""
    if len(found.effects) == 1:
        return f"{found.rows} accuracy by {found.effects[0].key}"
    others = [effect.key for effect in found.effects[2:]]
    over = f", the best over {', '.join(others)}" if others else ""
    return f"{found.rows} accuracy (%) by {found.effects[0].key} and {found.effects[1].key}{over}"


def sensitivity_picture(found: Sensitivity, path: Path, *, title: str) -> Path:
    """Draw a line for one key, and a heat map of the two keys that matter most for several."""
    whole = f"{title}; {heading(found)}"
    if len(found.effects) > 1:
        first, second, best = cells(found)
        columns, rows = list(first.means), list(second.means)
        figure = new_figure(max(5.0, 1.6 + 0.95 * len(columns)), max(2.6, 1.5 + 0.5 * len(rows)), whole, letters=56, size=10)
        _draw_cells(figure.add_subplot(), first, second, best)
    else:
        figure = new_figure(6.4, 4.0, whole, letters=70, size=10)
        _draw_line(figure.add_subplot(), found)
    figure.savefig(path)
    return path


def _draw_cells(axes: Axes, first: Effect, second: Effect, best: Mapping[tuple[str, str], float]) -> None:
    columns, rows = list(first.means), list(second.means)
    table = [[100 * best.get((column, row), math.nan) for column in columns] for row in rows]
    image = axes.imshow(table, cmap="cividis", aspect="auto")
    low, high = image.get_clim()
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            dark = value < (low + high) / 2
            words = "" if math.isnan(value) else f"{value:.1f}"
            axes.text(x, y, words, ha="center", va="center", color="white" if dark else "black", fontsize=10)
    for ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        for text in ticks(range(len(names)), [shortened(name, 22) for name in names]) or ():
            del text
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    if sum(map(len, columns)) > 60:
        axes.tick_params(axis="x", rotation=30)
    axes.set_xlabel(first.key)
    axes.set_ylabel(second.key)


def _draw_line(axes: Axes, found: Sensitivity) -> None:
    (effect,) = found.effects
    points = {point_of(name).get(effect.key, ""): scores for name, scores in found.points.items()}
    values = _ascending(points)
    means = [100 * statistics.fmean(points[value]) for value in values]
    spreads = [100 * statistics.stdev(points[value]) if len(points[value]) > 1 else 0.0 for value in values]
    numbers = [as_number(value) for value in values]
    places = [number for number in numbers if number is not None and number > 0]
    if len(places) == len(values):  # a position on a logarithmic scale for each
        axes.set_xscale("log")
    else:
        places = [float(place) for place in range(len(values))]
    axes.errorbar(places, means, yerr=spreads, color=COLOURS[0], marker="o", capsize=3)
    if len(values) <= MOST_VALUES * 2:
        axes.set_xticks(places, [shortened(value, 22) for value in values])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(effect.key)
    axes.set_ylabel(f"{found.rows} accuracy (%)")
    quiet(axes)
