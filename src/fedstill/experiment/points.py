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
from fedstill.methods.lookup import label
from fedstill.methods.options import NONE, tries
from fedstill.storage.toml import parse_value, split_outside, toml_value

MOST_POINTS = 200  # a larger grid is a mistake, or a case for --search
HELD_BACK = 0.2  # of each client's rows, where the experiment holds none back
_RANGE = re.compile(r"([^.].*?|\..+?)\.\.([^.].*|\.\d.*)")
_NOT_SWEPT = {  # sections and keys that all points share
    "seed": "every point runs with the same seeds: use --seeds N",
    "rounds": "the learning curves show every round: use --rounds N",
    "data": "points are compared on the same rows: run a sweep for each, --set data...",
    "evaluate": "points are compared on the rows that clients hold back",
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
        elif isinstance(values, Iterable) and not isinstance(values, str):
            texts.append(f"{key}={','.join(map(_as_text, values))}")
        else:
            texts.append(f"{key}={_as_text(values)}")
    return texts


def _as_text(value: Any) -> str:
    """Return a value as --set takes it: a word without quotes, and none for None."""
    return value if isinstance(value, str) else NONE if value is None else toml_value(value)


def points_of(experiment: Experiment) -> dict[str, Experiment]:
    """Return the experiment of every point of [compare] over by its name in tables; all mistakes come at once.

    Of a search they are points that change one key at a time, because the others are not known yet.
    """
    axes, mistakes = _read_axes(experiment)
    points: list[tuple[str, ...]] = []
    with noting(mistakes):
        points = _one_key_at_a_time(axes) if experiment.compare.search else _grid(axes)
    experiments: dict[str, Experiment] = {}
    for settings in points:
        with noting(mistakes):
            experiments[point_name(settings)] = experiment_at(experiment, settings)
    if mistakes:
        raise FedstillError(*dict.fromkeys(mistakes))
    return experiments


def read_axes(experiment: Experiment) -> tuple[Axis, ...]:
    """Return the axes of [compare] over: key=a,b,c, key=low..high, or a key of the method without values.

    `method` alone takes every option of the experiment's method that its page names values for, `method.mu` this one.
    """
    axes, mistakes = _read_axes(experiment)
    if mistakes:
        raise FedstillError(*mistakes)
    return axes


def _read_axes(experiment: Experiment) -> tuple[tuple[Axis, ...], list[str]]:
    """Return the axes that can be read, and a line about each of the others."""
    axes: dict[str, Axis] = {}
    mistakes: list[str] = []
    for text in experiment.compare.over:
        key, equals, inside = (piece.strip() for piece in text.partition("="))
        with noting(mistakes):
            if (cure := _NOT_SWEPT.get(key.partition(".")[0])) is not None:
                raise FedstillError(f"--over {text}: '{key}' cannot be swept: {cure}")
            for axis in [_read_axis(key, inside)] if equals else _worth_trying(key, experiment):
                if axis.key in axes:
                    raise FedstillError(f"--over names {axis.key} twice: put all its values into one --over")
                axes[axis.key] = axis
    return tuple(axes.values()), mistakes


def _read_axis(key: str, inside: str) -> Axis:
    values = [value.strip() for value in split_outside(inside, ",")]
    if not key or not all(values):
        raise FedstillError(f"--over {key}={inside}: a value is missing: write key=value,value, e.g. local.lr=0.01,0.1")
    if len(values) == 1 and (match := _RANGE.fullmatch(values[0])):
        ends = [parse_value(end) for end in match.groups()]
        numbers = [end for end in ends if _is_number(end)]
        if len(numbers) < 2 or not 0 < numbers[0] < numbers[1]:
            raise FedstillError(
                f"--over {key}={inside}: a range has two numbers above 0, the smaller first, because it is searched on "
                f"a logarithmic scale: e.g. {key}=0.001..0.1"
            )
        return Axis(key, tuple(map(toml_value, ends)), is_range=True)
    plain = [_as_text(parse_value(value)) for value in values]  # 1e-2 and 0.01 are one value
    if twice := [value for value in dict.fromkeys(plain) if plain.count(value) > 1]:
        raise FedstillError(f"--over {key}={inside}: {twice[0]} stands there twice: each point runs once")
    return Axis(key, tuple(plain))


def _worth_trying(key: str, experiment: Experiment) -> list[Axis]:
    """Return the axes of a key without values, as the method's page proposes them; numbers are a search's range."""
    section, _, path = key.partition(".")
    example = f"e.g. --over {key}=0.01,0.1"
    if section != "method":
        raise FedstillError(f"--over {key}: name its values, {example}; only options of a method know values to try")
    if not experiment.method.is_single:
        raise FedstillError(
            f"--over {key}: '{experiment.method.name}' is a mixture: sweep whole texts, --over method=..."
        )
    name = experiment.method.name
    known = tries(name)
    if not known or path not in ("", *known):
        names = ", ".join(known) or "no option"
        raise FedstillError(f"--over {key}: {name} proposes values of {names}: name the values, {example}")
    axes = []
    for option, values in known.items():
        if path in ("", option):
            is_range = (
                experiment.compare.search > 0 and len(values) > 1 and all(_is_number(v) and v > 0 for v in values)
            )
            ends = (min(values), max(values)) if is_range else values
            axes.append(Axis(f"method.{option}", tuple(map(_as_text, ends)), is_range))
    return axes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _grid(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Return every point of the axes as settings; the last axis changes first."""
    for axis in axes:
        if axis.is_range:
            raise FedstillError(
                f"--over {axis.text}: a range is searched: add --search N, or name values, {axis.key}=0.01,0.1"
            )
    every = itertools.product(*([f"{axis.key}={value}" for value in axis.values] for axis in axes))
    points = list(itertools.islice(every, MOST_POINTS + 1))
    if len(points) > MOST_POINTS:
        raise FedstillError(f"--over makes more than {MOST_POINTS} points: name fewer values, or add --search N")
    return points


def _one_key_at_a_time(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    first = [f"{axis.key}={axis.values[0]}" for axis in axes]
    return [
        (*first[:place], f"{axis.key}={value}", *first[place + 1 :])
        for place, axis in enumerate(axes)
        for value in axis.values
    ]


def point_name(settings: Sequence[str]) -> str:
    """Return the name of a point in tables: local.lr=0.1, method.mu=1.0."""
    return label(", ".join(settings))


def experiment_at(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """Return the experiment of a point, which is measured on the rows that clients hold back.

    The best point is chosen by these rows, because a choice by the test rows would flatter its figure on them.
    """
    share = experiment.data.client_test_share or HELD_BACK
    point = Experiment.model_validate(apply_settings(experiment.model_dump(), settings))
    return point.replace(data={**point.data.model_dump(), "client_test_share": share}, evaluate="client_rows")


def best_experiment(experiment: Experiment, best: Experiment) -> Experiment:
    """Return the experiment of a sweep's best point, measured as the sweep's own experiment says, on the test rows."""
    compare = {**experiment.compare.model_dump(), "over": [], "search": 0}
    return best.replace(data=experiment.data.model_dump(), evaluate=experiment.evaluate, compare=compare)


def united(old: Experiment, new: Experiment, *, where: str) -> dict[str, Any]:
    """Return [compare] of two sweeps over the same keys: the values, the seeds and the trials of both."""
    before, after = read_axes(old), read_axes(new)
    section = new.compare.model_dump()
    if {axis.key for axis in before} != {axis.key for axis in after}:
        keys = ", ".join(axis.key for axis in before)
        raise FedstillError(f"'{where}' holds {f'a sweep over {keys}' if keys else 'methods'}: use a new folder")
    if old.compare.search or new.compare.search:
        same = {axis.key: axis for axis in before} == {axis.key: axis for axis in after}
        if not same or old.compare.seeds != new.compare.seeds or not (old.compare.search and new.compare.search):
            about = "; ".join(axis.text for axis in before)
            raise FedstillError(
                f"'{where}' holds another {'search' if old.compare.search else 'sweep'} ({about}; "
                f"{old.compare.seeds} seeds): only --search may grow, because each point follows from the scores "
                "before it; use a new folder"
            )
        return {**section, "search": max(old.compare.search, new.compare.search)}
    more = {axis.key: axis.values for axis in after}
    over = [Axis(axis.key, tuple(dict.fromkeys((*axis.values, *more[axis.key])))).text for axis in before]
    return {**section, "over": over, "seeds": max(old.compare.seeds, new.compare.seeds)}
