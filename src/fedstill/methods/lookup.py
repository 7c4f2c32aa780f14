"""The text of a method becomes Methods: parsed, looked up by name or in a user's file, joined, put in turn."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedstill.attack import ATTACKS, Attack, together
from fedstill.compose.join import join
from fedstill.core.author_mistakes import name_of
from fedstill.core.errors import FedstillError, noting, suggest
from fedstill.core.types import Method, Phase, ServerStep
from fedstill.methods.options import NONE, check, find
from fedstill.server.aggregate import AGGREGATES, BufferPolicy, with_buffers
from fedstill.storage import toml as toml_io
from fedstill.storage.toml import split_outside


def build_method(text: str, options: Mapping[str, Any] | None = None) -> tuple[Phase, ...]:
    """Build the methods that a text names, ready for `federate`; `options` belong to a single method.

    >>> [phase.until for phase in build_method("fedavg until 5 then fedprox(mu=0.1)+fedavgm")]
    [5, None]
    """
    return build_phases(check_phase_texts(parse(text), options or {}))


def build_phases(
    texts: Sequence[PhaseText], *, aggregate: Part | None = None, buffers: BufferPolicy = "average"
) -> tuple[Phase, ...]:
    """Build the methods of texts that `check_phase_texts` has passed. Each phase carries the text of all phases.

    aggregate, buffers: how every phase makes one model from the cohort's models, as the section [server] sets them.
    """
    try:
        mixtures = ["+".join(write(part.name, part.options) for part in text.parts) for text in texts]
        ends = ["" if text.until is None else f" until {text.until}" for text in texts]
        whole = " then ".join(map(str.__add__, mixtures, ends))
    except FedstillError:  # an option, given in Python, that no text can hold
        whole = ""
    return tuple(Phase(_build(text.parts, aggregate, buffers), text.until, whole) for text in texts)


def check_phase_texts(texts: Sequence[PhaseText], options: Mapping[str, Any]) -> tuple[PhaseText, ...]:
    """Check every option against the signature of its method, and return the texts; no method is built.

    options: options of a single method that are written beside its name.
    """
    parts = [part for text in texts for part in text.parts]
    if options:
        if len(parts) > 1:
            names = "+".join(part.name for part in parts)
            raise FedstillError(f"method: options of '{names}' stand inside it, e.g. fedlmd(beta=1.0)+fedprox(mu=0.01)")
        texts = (PhaseText((Part(parts[0].name, {**parts[0].options, **options}),), texts[0].until),)
    mistakes: list[str] = []
    for part in (part for text in texts for part in text.parts):
        with noting(mistakes):
            check("aggregate" if part.name in AGGREGATES else "method", part.name, part.options)
    if mistakes:
        raise FedstillError(*mistakes)
    return tuple(texts)


def aggregate_part(text: str) -> Part | None:
    """Return the aggregate that [server] aggregate names, with its options checked; None for an empty text."""
    if not text:
        return None
    part = single(text)
    if part is None or part.name not in AGGREGATES:
        name = text if part is None else part.name
        raise FedstillError(f"server.aggregate = '{text}' is unknown: {suggest(name, AGGREGATES)}")
    check("aggregate", part.name, part.options)
    return part


def attack_parts(text: str) -> tuple[Part, ...]:
    """Return the kinds of attack that [attack] name joins with +, with their options checked; none for an empty text.

    >>> attack_parts("sign(factor=20)+sure")
    (Part(name='sign', options={'factor': 20}), Part(name='sure', options={}))
    """
    if not text:
        return ()
    phases = parse(text)
    for part in (part for phase in phases for part in phase.parts):
        check("attack", part.name, part.options)
    if len(phases) > 1:
        raise FedstillError(f"attack.name = '{text}': an attack lasts the whole run: name kinds joined with +")
    return phases[0].parts


def build_attack(text: str, share: float) -> Attack | None:
    """Return the attack that [attack] describes; None for an empty text."""
    parts = attack_parts(text)
    kinds = [ATTACKS[part.name](**check("attack", part.name, part.options)) for part in parts]
    return Attack(together(kinds), share) if kinds else None


def _build(parts: Sequence[Part], aggregate: Part | None, buffers: BufferPolicy) -> Method:
    named = [part for part in parts if part.name in AGGREGATES]
    parts = [part for part in parts if part.name not in AGGREGATES]
    if len(named) > 1 or (named and aggregate is not None):
        first, second = [*named, *([] if aggregate is None else [aggregate])][:2]
        where = f"{second.name} of [server] aggregate" if aggregate is not None else second.name
        raise FedstillError(f"{first.name} and {where} both make one model from the cohort's models: take one away")
    if not parts:
        alone = named[0].name
        raise FedstillError(f"{alone} makes one model from the cohort's: write a method beside it, e.g. fedavg+{alone}")
    chosen = named[0] if named else aggregate
    step = None if chosen is None else AGGREGATES[chosen.name](**chosen.options)
    if step is not None and not isinstance(step, ServerStep):
        raise FedstillError(f"{name_of(AGGREGATES[chosen.name])} returned a {type(step).__name__}: return an Aggregate")
    method = join({part.name: _method(part) for part in parts}, step)
    return replace(method, aggregate=with_buffers(method.aggregate, buffers))


def _method(part: Part) -> Method:
    method = find("method", part.name)(**check("method", part.name, part.options))
    if not isinstance(method, Method):
        wrong = f"{part.name} returned a {type(method).__name__}"
        raise FedstillError(f"{wrong}: a method is a function that returns a Method")
    return method


_PART = re.compile(r"\s*([^\s()=,+]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_PHASE = re.compile(r"(.*?)(?:\s+until\s+(\S+))?\s*", re.DOTALL)
_NAME = re.compile(r"[^\s()=,+]+")
_FILE = re.compile(r"([^\s()=,+]+\.py)(?=:)")
EXAMPLES = "write it as fedavg, fedprox(mu=0.1), fedlmd+fedprox or 'fedlmd_tf until 50 then fedlmd'"


@dataclass(frozen=True)
class Part:
    """The name of one method, and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseText:
    """Methods that run together, and the round until which they run."""

    parts: tuple[Part, ...]
    until: int | None = None


@lru_cache(maxsize=1024)  # the search for names of code in a file and the Experiment both read the method's text
def parse(text: str) -> tuple[PhaseText, ...]:
    """Return the phases that a text names, in order.

    >>> parse("fedprox(mu=0.1)")
    (PhaseText(parts=(Part(name='fedprox', options={'mu': 0.1}),), until=None),)
    >>> [(len(phase.parts), phase.until) for phase in parse("fedlmd_tf until 50 then fedlmd+fedavgm")]
    [(1, 50), (2, None)]
    """
    if "\0" in text:
        raise FedstillError("a method's text holds a zero byte: write it again")
    pieces = split_outside(text if '"' in text else " ".join(text.split()), " then ")
    phases = tuple(_phase(piece, text) for piece in pieces)
    for phase in phases[:-1]:
        if phase.until is None:
            raise FedstillError(f"'{text}': say until which round, e.g. 'fedlmd_tf until 50 then fedlmd'")
    if phases[-1].until is not None:
        raise FedstillError(f"'{text}': say what comes after, e.g. 'fedlmd_tf until 50 then fedlmd'")
    return phases


def single(text: str) -> Part | None:
    """Return the one method that a text names; None for a mixture or several in turn."""
    phases = parse(text)
    return phases[0].parts[0] if len(phases) == 1 and len(phases[0].parts) == 1 else None


def split_methods(text: str) -> list[str]:
    """Split a text at its commas outside of parentheses.

    >>> split_methods("fedavg, fedopt(server_lr=1.0, momentum=0.5)")
    ['fedavg', 'fedopt(server_lr=1.0, momentum=0.5)']
    """
    return [piece.strip() for piece in split_outside(text, ",") if piece.strip()]


def write(name: str, options: Mapping[str, Any]) -> str:
    """Return the text of one method; options inside a table have dotted names.

    >>> write("feddf", {"pool": "logits", "student": {"steps": 20, "clip": None}})
    'feddf(pool="logits", student.steps=20, student.clip=none)'
    """
    inside = ", ".join(f"{key}={value}" for key, value in _settings(options))
    return f"{name}({inside})" if inside else name


def _settings(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, NONE if value in (None, NONE) else toml_io.toml_value(value)


def label(text: str) -> str:
    """Return a method's text for people: files without their folders.

    >>> label("some/where/mine.py:anchor+fedprox(mu=0.1)")
    'mine.py:anchor+fedprox(mu=0.1)'
    """
    return _FILE.sub(lambda match: Path(match[1]).name, text)


def anchored(text: str) -> str:
    """Return a method's text with full paths of its files, so that any working folder finds them.

    A path that a text cannot hold (with spaces, brackets, ...) stays as it is.
    """

    def full(match: re.Match[str]) -> str:
        path = str(Path(match[1]).resolve())
        return path if os.path.exists(match[1]) and _NAME.fullmatch(path) else match[1]

    return _FILE.sub(full, text)


def _phase(text: str, whole: str) -> PhaseText:
    match = _PHASE.fullmatch(text)
    assert match is not None  # the pattern takes any text
    mixture, until = match.groups()
    if until is not None and not (until.isdecimal() and len(until) <= 9):
        raise FedstillError(f"'{whole}': until '{until}' is no round: use a whole number, e.g. until 50")
    parts = tuple(_part(piece, whole) for piece in split_outside(mixture, "+"))
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise FedstillError(f"'{whole}' names {name} twice: once is enough, with the options you want")
    return PhaseText(parts, None if until is None else int(until))


def _part(text: str, whole: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None:
        raise FedstillError(f"cannot read the method '{whole}': {EXAMPLES}")
    name, inside = match.groups()
    options: dict[str, Any] = {}
    for setting in split_methods(inside or ""):
        key, equals, value = setting.partition("=")
        if not equals:
            raise FedstillError(f"'{setting}' in '{whole}' is no option: write {name}(key=value)")
        *tables, last = key.strip().split(".")
        inner = options
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise FedstillError(f"'{whole}' sets {table} twice")
        if last in inner:
            raise FedstillError(f"'{whole}' sets {key.strip()} twice")
        inner[last] = toml_io.parse_value(value.strip())
    return Part(name, options)
