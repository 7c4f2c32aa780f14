"""pydantic's errors as one line that names the key, says what is wrong with it and what would be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.limits import Example
from fedstill.storage.toml import toml_value

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "model_type": "a section with its keys",
    "dataclass_type": "a section with its keys",
}
_LIMITS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_PATTERNS = {
    "name": "letters, digits, '.', '_' and '-' (it names the run's folder)",
    "engine.device": "auto, cpu, cuda or cuda:<number>",
}


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """The first mistake, told for people; the number of further ones is added."""
    details: dict[str, list[ErrorDetails]] = {}  # by dotted key: the branches of a union (int | float) are one mistake
    for detail in error.errors(include_url=False):
        details.setdefault(_dotted(detail, model), []).append(detail)
    first, *rest = details.items()
    line = " ".join(_tell(*first, model).split())  # a key of the file may hold anything
    return f"{line} (and {len(rest)} more)" if rest else line


class Key(NamedTuple):
    """One key of a section: its type, its default, and a value to show with a mistake."""

    kind: Any
    default: Any
    example: Any


def keys_in(section: type) -> dict[str, Key]:
    """The keys of a section, which is a pydantic model or a dataclass with limits."""
    if issubclass(section, BaseModel):
        return {
            name: Key(field.annotation, field.default, field.examples[0] if field.examples else field.default)
            for name, field in section.model_fields.items()
        }
    hints = get_type_hints(section, include_extras=True)
    keys = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        shown = [mark.value for mark in getattr(hints[field.name], "__metadata__", ()) if isinstance(mark, Example)]
        keys[field.name] = Key(hints[field.name], field.default, shown[0] if shown else field.default)
    return keys


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def keys_of(model: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of an experiment file."""
    for name, key in keys_in(model).items():
        yield prefix + name
        if is_section(key.kind):
            yield from keys_of(key.kind, f"{prefix}{name}.")


def _dotted(error: ErrorDetails, model: type[BaseModel]) -> str:
    parts: list[str] = []
    section: type | None = model
    for part in error["loc"]:
        if section is None or isinstance(part, int):
            break
        parts.append(part)
        key = keys_in(section).get(part)
        section = key.kind if key is not None and is_section(key.kind) else None
    return ".".join(parts)


def _tell(key: str, errors: list[ErrorDetails], model: type[BaseModel]) -> str:
    error = errors[0]
    kind, value = error["type"], error["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key '{key}': {_nearest_key(key, model)}"
    return f"{key} = {_short(value)} must be {_wanted(key, errors)}{_example(key, error, model)}"


def _wanted(key: str, errors: list[ErrorDetails]) -> str:
    kinds = [error["type"] for error in errors]
    context = errors[0].get("ctx", {})
    if kinds[0] in _LIMITS:
        name, words = _LIMITS[kinds[0]]
        return f"{words} {context[name]:g}"
    if kinds[0] == "literal_error":
        return "one of " + str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if kinds[0] == "string_pattern_mismatch":
        return _PATTERNS.get(key, f"like {context['pattern']}")
    if kinds[0] == "string_too_short":
        return "a text that is not empty"
    wanted = list(dict.fromkeys(_WANTED[kind] for kind in kinds if kind in _WANTED))
    if "a number" in wanted and "a whole number" in wanted:
        wanted.remove("a whole number")
    return " or ".join(wanted) or errors[0]["msg"].lower()


def _example(key: str, error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] == "literal_error":
        expected = str(error.get("ctx", {})["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
        hint = suggest(str(error["input"]), expected)
        return f": {hint}" if hint.startswith("did") else ""
    section: Any = model
    *parents, name = key.split(".")
    for parent in parents:
        section = keys_in(section)[parent].kind
    known = keys_in(section).get(name)
    if known is None or is_section(known.kind):
        return ""
    return f": e.g. {key} = {toml_value(known.example)}"


def _nearest_key(key: str, model: type[BaseModel]) -> str:
    """The key of the same name in another section first, then the most similar one beside it, then any."""
    known = list(keys_of(model))
    *section, name = key.split(".")
    elsewhere = [other for other in known if other.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    prefix = ".".join([*section, ""])
    beside = [other for other in known if other.startswith(prefix) and "." not in other[len(prefix) :]]
    hints = [suggest(key, beside)] if section else [suggest(key, beside), suggest(key, known)]
    return next((hint for hint in hints if hint.startswith("did")), hints[0])


def _short(value: Any) -> str:
    try:
        text = toml_value(value)
    except FedstillError:
        text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
