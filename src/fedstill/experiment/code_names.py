"""The names of code in an experiment's table: found before anything is built, and refused where a file holds them.

Every table from a file or a folder passes `check_code` before it becomes an Experiment, because an Experiment
looks at the functions that its method and its network name, and so runs their files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.methods.lookup import parse, split_methods
from fedstill.methods.own_code import refusals
from fedstill.storage.toml import parse_value, split_outside


def check_code(table: Mapping[str, Any], where: str | Path, *, spoken: Iterable[str] = ()) -> None:
    """Refuse a table from a file or a folder that names code which the user has not allowed.

    spoken: names that the user wrote on the command line, which may run.
    """
    allowed = set(spoken)
    for line in refusals(name for name in code_names(table) if name not in allowed):
        raise FedstillError(f"'{where}' names code, {line}")


def code_names(table: Mapping[str, Any]) -> list[str]:
    """Return every FILE.py:function and module:function in an experiment's table, as the loader would be asked for it.

    The address of a cluster counts as one, HOST:PORT.

    >>> code_names({"method": "fedavg+mine.py:f(mu=0.1)", "model": {"name": "net:Net"}, "evaluate": "global_test"})
    ['mine.py:f', 'net:Net']
    """
    return list(dict.fromkeys(name for name in _names(table) if ":" in name))


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    for key in ("method", "model", "engine"):
        for name in _texts(_word(table.get(key), "name")):
            yield from _in_method(name) if key == "method" else [name]
    for key in ("engine", "address"):  # a Ray cluster that answers at an address runs code in this process
        yield from _texts(_section(table, "cluster").get(key))
    model, compare = (_section(table, key) for key in ("model", "compare"))
    for text in (*_texts(model.get("prototypes")), *_texts(compare.get("methods"))):
        for piece in (text, *split_methods(text)):
            yield from _in_method(piece)
    yield from _texts(table.get("evaluate"))
    for axis in _texts(compare.get("over")):
        key, _, inside = axis.partition("=")
        for value in split_outside(inside, ","):
            inner: Any = parse_value(value.strip())
            for part in reversed(key.strip().split(".")):
                inner = {part: inner}
            yield from _names(inner)


def _word(section: Any, key: str) -> Any:
    """Return what a section says of its main key; a bare word stands for the section."""
    return section.get(key) if isinstance(section, Mapping) else section


def _section(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = table.get(key)
    return section if isinstance(section, Mapping) else {}


def _texts(value: Any) -> list[str]:
    """Return a text, or the texts of a list; values of another kind are refused later."""
    return [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]


def _in_method(text: str) -> Iterator[str]:
    """Yield the names in the text of a method; a text that cannot be read names nothing, and is refused later."""
    with suppress(FedstillError):
        for phase in parse(text):
            yield from (part.name for part in phase.parts)
