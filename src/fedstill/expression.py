"""Methods as text: `fedprox(mu=0.1)`, `fedlmd+fedprox(mu=0.01)+fedavgm`, `fedlmd_tf until 50 then fedlmd`.

methods  = method, method, ...
method   = mixture until ROUND then mixture ... then mixture
mixture  = part + part + ...
part     = name, or name(key=value, ...)
name     = a registered method, FILE.py:function or package.module:function
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill import toml_io
from fedstill.core.errors import FedstillError

_PART = re.compile(r"\s*([^\s()=,+]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_STRETCH = re.compile(r"(.*?)(?:\s+until\s+(\S+))?\s*", re.DOTALL)
_NAME = re.compile(r"[^\s()=,+]+")
_FILE = re.compile(r"([^\s()=,+]+\.py)(?=:)")
EXAMPLES = "write it as fedavg, fedprox(mu=0.1), fedlmd+fedprox or 'fedlmd_tf until 50 then fedlmd'"


@dataclass(frozen=True)
class Part:
    """One method and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stretch:
    """Methods that run together, until a round."""

    parts: tuple[Part, ...]
    until: int | None = None


def parse(text: str) -> tuple[Stretch, ...]:
    """What a text names, in order.

    >>> parse("fedprox(mu=0.1)")
    (Stretch(parts=(Part(name='fedprox', options={'mu': 0.1}),), until=None),)
    >>> [(len(stretch.parts), stretch.until) for stretch in parse("fedlmd_tf until 50 then fedlmd+fedavgm")]
    [(1, 50), (2, None)]
    """
    pieces = _split(text if '"' in text else " ".join(text.split()), " then ")
    stretches = tuple(_stretch(piece, text) for piece in pieces)
    for stretch in stretches[:-1]:
        if stretch.until is None:
            raise FedstillError(f"'{text}': say until which round, e.g. 'fedlmd_tf until 50 then fedlmd'")
    if stretches[-1].until is not None:
        raise FedstillError(f"'{text}': say what comes after, e.g. 'fedlmd_tf until 50 then fedlmd'")
    return stretches


def single(text: str) -> Part | None:
    """The one method that a text names; None for a mixture or several in turn."""
    stretches = parse(text)
    return stretches[0].parts[0] if len(stretches) == 1 and len(stretches[0].parts) == 1 else None


def split_methods(text: str) -> list[str]:
    """Split at commas outside parentheses: 'fedavg,fedprox(mu=0.1)' -> ['fedavg', 'fedprox(mu=0.1)'].

    >>> split_methods("fedavg, feddf(steps=5, lr=0.1)")
    ['fedavg', 'feddf(steps=5, lr=0.1)']
    """
    return [piece.strip() for piece in _split(text, ",") if piece.strip()]


def write(name: str, options: Mapping[str, Any]) -> str:
    """The text of one method.

    >>> write("fedprox", {"mu": 0.1})
    'fedprox(mu=0.1)'
    """
    inside = ", ".join(f"{key}={toml_io.toml_value(value)}" for key, value in options.items())
    return f"{name}({inside})" if inside else name


def label(text: str) -> str:
    """A method's text for people: files without the folders they are in.

    >>> label("some/where/mine.py:anchor+fedprox(mu=0.1)")
    'mine.py:anchor+fedprox(mu=0.1)'
    """
    return _FILE.sub(lambda match: Path(match[1]).name, text)


def anchored(text: str) -> str:
    """The same methods with files by their full path, so that they are found from anywhere.

    A path that this little language cannot hold (spaces, brackets, ...) stays as it is.
    """

    def full(match: re.Match[str]) -> str:
        path = str(Path(match[1]).resolve())
        return path if Path(match[1]).exists() and _NAME.fullmatch(path) else match[1]

    return _FILE.sub(full, text)


def _split(text: str, separator: str) -> list[str]:
    """Split where neither a bracket nor a quotation is open."""
    pieces, depth, quoted, start, place = [], 0, False, 0, 0
    while place < len(text):
        quoted ^= text[place] == '"'
        depth += 0 if quoted else (text[place] in "([") - (text[place] in ")]")
        if depth == 0 and not quoted and text.startswith(separator, place):
            pieces.append(text[start:place])
            place = start = place + len(separator)
            continue
        place += 1
    return [*pieces, text[start:]]


def _stretch(text: str, whole: str) -> Stretch:
    match = _STRETCH.fullmatch(text)
    assert match is not None  # the pattern takes any text
    mixture, until = match.groups()
    if until is not None and not until.isdecimal():
        raise FedstillError(f"'{whole}': until '{until}' is no round: use a whole number, e.g. until 50")
    parts = tuple(_part(piece, whole) for piece in _split(mixture, "+"))
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise FedstillError(f"'{whole}' names {name} twice: once is enough, with the options you want")
    return Stretch(parts, None if until is None else int(until))


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
        if key.strip() in options:
            raise FedstillError(f"'{whole}' sets {key.strip()} twice")
        options[key.strip()] = toml_io.parse_value(value.strip())
    return Part(name, options)
