"""The methods that a tournament tries: each part alone, parts together, and other values of their options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from fedstill.core.errors import FedstillError, in_one_line
from fedstill.core.needs import needs_of
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Federation, Need
from fedstill.experiment.build import build
from fedstill.experiment.config import Experiment, MethodSection
from fedstill.loop.federate import check_built
from fedstill.methods import METHODS, options
from fedstill.methods.lookup import Part, parse, write
from fedstill.server.aggregate import AGGREGATES

PROVEN = (  # compositions of our leaderboard (docs/choosing-a-method.md), the best mean rank over six federations first
    "fedntd_tf+feddyn+label_smoothing+d2cfl",
    "scaffold+fedavgm+label_smoothing+d2cfl",
    "fedlmd_tf+feddyn+d2cfl",
    "feddyn+d2cfl",
    "fedntd_tf+feddyn+d2cfl",
    "fedntd_tf+feddyn+fedbe",
    "scaffold+fedavgm+d2cfl",
    "fedntd_tf+scaffold+fedavgm+d2cfl",
    "scaffold+fedadagrad+d2cfl",
    "fedntd_tf+feddyn+scaffold+d2cfl",
)
PRIVATE = "dp_fedavg"  # begins every candidate of a run with a privacy budget that names no private method itself


@dataclass
class Candidates:
    """The methods that this experiment allows.

    named: methods that the user asked for, as texts; without any, all methods and aggregates of fedstill take part.
    banned: needs that no candidate may have.
    refused: the reason of each text that was not allowed.
    """

    experiment: Experiment
    federation: Federation
    named: Sequence[str] = ()
    banned: Collection[Need] = ()

    def __post_init__(self) -> None:
        self.refused: dict[str, str] = {}
        section, private = self.experiment.method, self.experiment.privacy.epsilon is not None
        self._configured = write(section.name, section.options)
        releases = self._try(self._configured, [self._configured])[1] if private else False
        self.base = (self._configured if releases else PRIVATE) if private else "fedavg"
        self.refused.clear()

    def alone(self) -> list[str]:
        """Return the base, the methods of the experiment file, and every other part beside the base."""
        section, wanted = self.experiment.method, [self._configured, *self.experiment.compare.methods]
        wanted = [self._configured if text == section.name else text for text in wanted]
        library = [name for name in (*METHODS, *AGGREGATES) if name != section.name]
        texts = list(self.named) or [*wanted, *library]
        asked = set(self.named or wanted)
        beside = [self._beside_base(text) for text in texts]
        named = {made for text, made in zip(texts, beside, strict=True) if text in asked}
        return [text for text in dict.fromkeys([self.base, *beside]) if self._try(text, named)[0]]

    def proven(self) -> list[str]:
        """Return the compositions that lead our leaderboard, if no methods are named; a short level 1 cannot see them.

        Control variates and distillation pay off late. In the first quarter of the rounds they are in the middle.
        """
        return [] if self.named else self._allowed(map(self._beside_base, PROVEN))

    def pairs(self, ranked: Sequence[str]) -> list[str]:
        """Return the mixtures of two of these texts, those of better parts first."""
        order = sorted(combinations(range(len(ranked)), 2), key=lambda pair: (sum(pair), pair))
        return self._allowed(_mixed(ranked[first], ranked[second]) for first, second in order)

    def neighbours(self, ranked: Sequence[str], parts: Sequence[str]) -> list[str]:
        """Return texts that differ from one of `ranked` in one option, or have one of `parts` more, in random order."""
        changed = [text for old in ranked for text in _other_options(old)]
        larger = [_mixed(old, part) for old in ranked for part in parts if len(_parts(old)) > 1]
        allowed = self._allowed([*changed, *larger])
        draw = numpy_generator(seed_for(self.experiment.seed, "neighbours"))
        return [allowed[place] for place in draw.permutation(len(allowed))]

    def _beside_base(self, text: str) -> str:
        """Return the text with the base beside it, where it is an aggregate, or has no privacy of its own."""
        names = {part.name for part in _parts(text)}
        needs_base = names <= AGGREGATES.keys() or (self.base != "fedavg" and not names & {*_names(self.base)})
        return (_mixed(self.base, text) or text) if needs_base and len(parse(text)) == 1 else text

    def _allowed(self, texts: Any) -> list[str]:
        return [text for text in dict.fromkeys(texts) if text and self._try(text, ())[0]]

    def _try(self, text: str, named: Collection[str]) -> tuple[bool, bool]:
        """Return whether the experiment can run the text, and whether its uploads are noisy; note why it cannot."""
        try:
            section = MethodSection.model_validate({"name": text})
            built = build(self.experiment.model_copy(update={"method": section}), self.federation)
            methods = [phase.method for phase in built.method] if isinstance(built.method, Sequence) else [built.method]
            noisy = any(method.releases or method.way for method in methods)
            if noisy and self.experiment.privacy.epsilon is None and text not in named:
                raise FedstillError("it adds noise to uploads, and the experiment sets no privacy.epsilon")
            for need in {need for method in methods for need in needs_of(method)} & {*self.banned}:
                raise FedstillError(f"it needs {need.value}")
            check_built(built)
        except FedstillError as error:
            self.refused[text] = in_one_line(error)
            return False, False
        return True, noisy


def one_of_each_kind(ranked: Sequence[str]) -> list[str]:
    """Return the first text of each set of methods, because others differ from it in options only.

    >>> one_of_each_kind(["mrtf(sharpness=2.0)+scaffold", "scaffold+mrtf", "feddyn"])
    ['mrtf(sharpness=2.0)+scaffold', 'feddyn']
    """
    first: dict[frozenset[str], str] = {}
    for text in ranked:
        first.setdefault(frozenset(_names(text)), text)
    return list(first.values())


def _parts(text: str) -> tuple[Part, ...]:
    return tuple(part for phase in parse(text) for part in phase.parts)


def _names(text: str) -> list[str]:
    return [part.name for part in _parts(text)]


def _mixed(first: str, second: str) -> str:
    """Return two methods as one text, FedAvg left out where it adds nothing; empty where they share a part."""
    if len(parse(first)) > 1 or len(parse(second)) > 1:
        return ""
    parts = [*_parts(first), *_parts(second)]
    names = [part.name for part in parts]
    if len(set(names)) < len(names) - (names.count("fedavg") > 1):
        return ""
    more = [part for part in parts if part.name != "fedavg"]
    needs_fedavg = all(part.name in AGGREGATES for part in more)
    kept = [*([Part("fedavg")] if needs_fedavg else []), *more]
    return "+".join(write(part.name, part.options) for part in kept)


def _other_options(text: str) -> Iterator[str]:
    """Yield the text with another value of one option, from the values that its methods' pages propose."""
    if len(parse(text)) > 1:
        return
    parts = _parts(text)
    for place, part in enumerate(parts):
        if part.name not in METHODS:
            continue
        now = options.resolved("method", part.name, part.options)
        for key, values in options.tries(part.name).items():
            for value in values:
                if _value_at(now, key) != value:
                    new = replace(part, options=_with(part.options, key.split("."), value))
                    mixture = [*parts[:place], new, *parts[place + 1 :]]
                    yield "+".join(write(each.name, each.options) for each in mixture)


def _value_at(table: Mapping[str, Any], key: str) -> Any:
    value: Any = table
    for name in key.split("."):
        value = value[name]
    return value


def _with(table: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    name, *below = path
    return {**table, name: _with(table.get(name, {}), below, value) if below else value}
