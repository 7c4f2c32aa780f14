"""The points of a sweep: texts such as local.lr=0.01,0.1 become axes, and a point of them becomes an experiment."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.core.errors import FedstillError, noting
from fedstill.experiment.config import Experiment
from fedstill.experiment.overrides import apply_settings
from fedstill.methods.options import NONE, tries
from fedstill.storage.toml import parse_value, split_outside, toml_value

MOST_POINTS = 1000  # a larger grid is a mistake, or a case for --search
_RANGE = re.compile(r"([^.].*?|\..+?)\.\.([^.].*|\.\d.*)")
_NOT_SWEPT = {  # keys that are no part of a point
    "seed": "every point runs with the same seeds: use --seeds N",
    "compare": "it says how a sweep runs: use --set compare...",
    "name": "it names the folder of all points: use --set name=...",
    "track": "it watches all points: use --set track=...",
}


@dataclass(frozen=True)
class Axis:
    """One key of a sweep, with the values to try, or with the range that a search draws from."""

    key: str
    values: tuple[str, ...]  # as --set takes them; of a range its two ends
    is_range: bool = False

    @property
    def text(self) -> str:
        """The axis as `--over` takes it, and as the section [compare] records it."""
        return f"{self.key}={('..' if self.is_range else ',').join(self.values)}"

    @property
    def numbers(self) -> tuple[float, float]:
        """The ends of a range."""
        low, high = map(parse_value, self.values)
        return low, high


def as_texts(over: Mapping[str, Any] | Iterable[str] | str) -> list[str]:
    """Return axes as texts, from a mapping such as {"local.lr": [0.01, 0.1]} or from texts.

    >>> as_texts({"local.lr": [0.01, 0.1], "method": ["fedavg", "fedprox(mu=0.1)"], "method.mu": "0.01..1"})
    ['local.lr=0.01,0.1', 'method=fedavg,fedprox(mu=0.1)', 'method.mu=0.01..1']
    """
    if isinstance(over, str):
        return [over]
    if not isinstance(over, Mapping):
        return list(over)
    texts = []
    for key, values in over.items():
        if values is None:
            texts.append(key)
        elif isinstance(values, str):
            texts.append(f"{key}={values}")
        else:
            texts.append(f"{key}={','.join(_as_text(value) for value in values)}")
    return texts


def _as_text(value: Any) -> str:
    """Return a value as --set takes it: a word without quotes, and none for None."""
    return value if isinstance(value, str) else NONE if value is None else toml_value(value)


def read_axes(over: Iterable[str], experiment: Experiment) -> tuple[Axis, ...]:
    """Return the axes that texts name: key=a,b,c, key=low..high, or a key of the method without values.

    `method` alone takes every option of the experiment's method that its page names values for, `method.mu` this one.
    """
    axes: list[Axis] = []
    mistakes: list[str] = []
    for text in over:
        key, equals, inside = (piece.strip() for piece in text.partition("="))
        with noting(mistakes):
            if (cure := _NOT_SWEPT.get(key.partition(".")[0])) is not None:
                raise FedstillError(f"--over {text}: '{key}' cannot be swept: {cure}")
            axes += [_read_axis(key, inside)] if equals else _worth_trying(key, experiment)
    keys = [axis.key for axis in axes]
    mistakes += [f"--over names {key} twice: put all values into one" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if mistakes:
        raise FedstillError(*mistakes)
    return tuple(axes)


def _read_axis(key: str, inside: str) -> Axis:
    values = [value.strip() for value in split_outside(inside, ",")]
    if not key or not all(values):
        raise FedstillError(f"--over {key}={inside}: write it as key=value,value, e.g. --over local.lr=0.01,0.1")
    if len(values) == 1 and (match := _RANGE.fullmatch(values[0])):
        ends = [parse_value(end) for end in match.groups()]
        numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
        if len(numbers) < 2 or not 0 < numbers[0] < numbers[1]:
            raise FedstillError(
                f"--over {key}={inside}: a range has two numbers above 0, the smaller first, because it is drawn on a "
                f"logarithmic scale: e.g. {key}=0.001..0.1"
            )
        return Axis(key, tuple(toml_value(end) for end in ends), is_range=True)
    plain = [_as_text(parse_value(value)) for value in values]  # 1e-2 and 0.01 are one value
    if twice := [value for value in dict.fromkeys(plain) if plain.count(value) > 1]:
        raise FedstillError(f"--over {key}={inside}: {twice[0]} is there twice: each point runs once")
    return Axis(key, tuple(plain))


def _worth_trying(key: str, experiment: Experiment) -> list[Axis]:
    """Return the axes of a key without values: those that the page of the experiment's method names."""
    section, _, path = key.partition(".")
    example = f"e.g. --over {key}=0.01,0.1"
    if section != "method":
        raise FedstillError(f"--over {key}: name its values, {example}; only options of a method know values to try")
    if not experiment.method.is_single:
        raise FedstillError(f"--over {key}: '{experiment.method.name}' is a mixture: sweep whole texts, --over method=...")
    name = experiment.method.name
    known = tries(name)
    if path and path not in known:
        options = ", ".join(known) or "no option"
        raise FedstillError(f"--over {key}: {name} names values worth trying of {options}: give values, {example}")
    if not known:
        raise FedstillError(f"--over {key}: {name} names no values worth trying: give keys and values, {example}")
    return [
        Axis(f"method.{option}", tuple(map(_as_text, values)))
        for option, values in known.items()
        if path in ("", option)
    ]


def grid(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Return every point of the axes as settings; the last axis changes first."""
    if ranges := [axis.text for axis in axes if axis.is_range]:
        raise FedstillError(
            f"--over {ranges[0]}: a range is searched: add --search N, or list values, e.g. "
            f"--over {ranges[0].partition('=')[0]}=0.01,0.1"
        )
    points = [
        tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
        for values in itertools.islice(itertools.product(*(axis.values for axis in axes)), MOST_POINTS + 1)
    ]
    if len(points) > MOST_POINTS:
        raise FedstillError(f"--over makes more than {MOST_POINTS} points: list fewer values, or add --search N")
    return points


def point_name(settings: Sequence[str]) -> str:
    """Return the name of a point in tables: local.lr=0.1, method.mu=1.0."""
    return ", ".join(settings)


def experiment_at(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """Return the experiment of a point."""
    return Experiment.model_validate(apply_settings(experiment.model_dump(), settings))


def experiments_of(experiment: Experiment) -> dict[str, Experiment]:
    """Return the experiment of every point of [compare] over by its name; all mistakes of all points come at once.

    Of a search they are the points that change one key only, because the others are not known yet.
    """
    axes = read_axes(experiment.compare.over, experiment)
    if experiment.compare.search:
        first = [f"{axis.key}={axis.values[0]}" for axis in axes]
        points = [
            (*first[:place], f"{axis.key}={value}", *first[place + 1 :])
            for place, axis in enumerate(axes)
            for value in axis.values
        ]
    else:
        points = grid(axes)
    mistakes: list[str] = []
    experiments: dict[str, Experiment] = {}
    for settings in points:
        with noting(mistakes):
            experiments[point_name(settings)] = experiment_at(experiment, settings)
    if mistakes:
        raise FedstillError(*dict.fromkeys(mistakes))
    return experiments


def united(old: Sequence[str], new: Sequence[str], experiment: Experiment, *, where: str) -> list[str]:
    """Return the axes of two sweeps over the same keys, with the values of both."""
    before, after = read_axes(old, experiment), read_axes(new, experiment)
    if {axis.key for axis in before} != {axis.key for axis in after}:
        keys = ", ".join(axis.key for axis in before) or "no key, but a comparison of methods"
        raise FedstillError(f"'{where}' holds a sweep over {keys}: sweep the same keys, or use a new folder")
    more = {axis.key: axis for axis in after}
    if any(axis.is_range or more[axis.key].is_range for axis in before) and set(before) != set(after):
        ranges = ", ".join(axis.text for axis in before)
        raise FedstillError(f"'{where}' holds a search over {ranges}: search the same ranges, or use a new folder")
    return [
        Axis(axis.key, tuple(dict.fromkeys((*axis.values, *more[axis.key].values))), axis.is_range).text
        for axis in before
    ]
