"""The keys of an experiment file, and pydantic's errors as lines, each of which names a key and a right value."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.limits import Example
from fedstill.methods.options import is_section, mistake, without_marks


class Key(NamedTuple):
    """One key of a section: its type with its limits, and its default."""

    annotation: Any
    default: Any
    words: str | None = None  # the right values in words, for a text that must match a pattern

    @property
    def section(self) -> type | None:
        """The class of the section that the key holds; None where it holds a value."""
        kind = without_marks(self.annotation)
        return kind if is_section(kind) else None


def keys_in(section: type) -> dict[str, Key]:
    """Return the keys of a section, which is a pydantic model or a dataclass."""
    if not issubclass(section, BaseModel):
        hints = typing.get_type_hints(section, include_extras=True)
        return {field.name: Key(hints[field.name], field.default) for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    keys = {}
    for name, field in section.model_fields.items():
        marks = (*field.metadata, *map(Example, field.examples or ()))
        annotation = Annotated[field.annotation, *marks] if marks else field.annotation
        keys[name] = Key(annotation, field.default, field.description)
    return keys


def keys_of(section: type, prefix: str = "") -> Iterator[str]:
    """List every dotted key of a section and of the sections inside it."""
    for name, key in keys_in(section).items():
        yield prefix + name
        if key.section:
            yield from keys_of(key.section, f"{prefix}{name}.")


_COLLECTED = "fedstill"  # the type of an error in which pydantic carries lines of ours


@contextmanager
def collected() -> Iterator[None]:
    """Let pydantic carry a FedstillError, so that it goes on to the other keys."""
    try:
        yield
    except FedstillError as error:
        raise PydanticCustomError(_COLLECTED, "{lines}", {"lines": error.lines}) from None


def mistakes_of(error: ValidationError, model: type[BaseModel]) -> dict[str, str]:
    """Return every mistake of an experiment by its dotted key; a line of ours stands under itself."""
    mistakes: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == _COLLECTED:
            mistakes |= {line: line for line in detail["ctx"]["lines"]}
            continue
        key = ".".join(_path(detail, model))
        line = " ".join(_mistake(key, detail, model).split())  # a key of the file may hold line breaks
        mistakes.setdefault(key, line)  # pydantic reports each branch of `int | float`
    return mistakes


def _path(error: ErrorDetails, model: type[BaseModel]) -> list[str]:
    """Return the names that lead to the wrong key, without the place inside a list and without a branch of a union."""
    names: list[str] = []
    section: type | None = model
    for name in error["loc"]:
        if section is None or isinstance(name, int):
            break
        names.append(name)
        key = keys_in(section).get(name)
        section = key.section if key is not None else None
    return names


def _mistake(key: str, error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key '{key}': {_nearest_key(key, model)}"
    *sections, name = _path(error, model)
    holder: Any = model
    for section in sections:
        holder = keys_in(holder)[section].section
    wrong = keys_in(holder)[name]
    inside_a_list = isinstance((*error["loc"], "")[len(sections) + 1], int)
    item = typing.get_args(without_marks(wrong.annotation))[0] if inside_a_list else None
    words = re.findall("'(.+?)'", error.get("ctx", {}).get("expected", "")) or wrong.words
    return mistake(key, wrong.annotation, error["input"], wrong.default, wanted=words or item)


def _nearest_key(key: str, model: type[BaseModel]) -> str:
    """Suggest the key of the same name in another section, else the most similar key beside it, else any other."""
    known = list(keys_of(model))
    *section, name = key.split(".")
    elsewhere = [other for other in known if other.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    prefix = ".".join([*section, ""])
    beside = [other for other in known if other.startswith(prefix) and "." not in other[len(prefix) :]]
    hints = [suggest(key, beside)] if section else [suggest(key, beside), suggest(key, known)]
    return next((hint for hint in hints if hint.startswith("did")), hints[0])
