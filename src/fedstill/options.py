"""Own keys of a partition, a model or a method, checked against the signature of the function that takes them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from fedstill.core.errors import FedstillError, suggest
from fedstill.toml_io import toml_value

_NAME_KEY = {"partition": "partition.scheme", "model": "model.name", "algorithm": "algorithm.name"}
_COLUMNS = {("natural", "keys"): str | list[str]}  # a file names the columns, the function takes their values
_FILLED_IN = {
    "partition": frozenset({"labels", "clients", "seed"}),
    "model": frozenset({"input_shape", "classes", "vocabulary"}),  # the data decide
    "algorithm": frozenset[str](),
}


def registry(kind: str) -> Mapping[str, Callable[..., Any]]:
    """Name -> function of everything that can be chosen by name. Imported late: torch takes a second."""
    if kind == "partition":
        from fedstill.partition import PARTITIONS

        return PARTITIONS
    if kind == "model":
        from fedstill.models import MODELS
        from fedstill.prototypes import MIXED, mixed

        return {**MODELS, MIXED: mixed}
    from fedstill.algorithms import METHODS

    return METHODS


def _find_method(name: str) -> Callable[..., Any]:
    from fedstill.methods import find_method

    return find_method(name)


def find(kind: str, name: str) -> Callable[..., Any]:
    known = registry(kind)
    if name not in known and kind == "algorithm":
        return _find_method(name)
    if kind == "model" and ":" in name:
        from fedstill.own_files import own_function

        return own_function(name, _NAME_KEY[kind])
    if name not in known:
        own = " (your own: FILE.py:function)" if kind == "model" else ""
        raise FedstillError(f"{_NAME_KEY[kind]} = '{name}' is unknown: {suggest(name, known)}{own}")
    return known[name]


def parameters(kind: str, name: str) -> dict[str, inspect.Parameter]:
    """The own keys that a file may set, in the order of the signature."""
    return {
        key: parameter
        for key, parameter in inspect.signature(find(kind, name)).parameters.items()
        if key not in _FILLED_IN[kind] and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def defaults(kind: str, name: str, *, preset: str | None = None) -> dict[str, Any]:
    """The own keys that have a default TOML can hold; a method's preset has its own."""
    found = {key: parameter.default for key, parameter in parameters(kind, name).items()}
    found |= getattr(find(kind, name), "presets", {}).get(preset, {})
    return {key: value for key, value in found.items() if _plain(value)}


def check(kind: str, name: str, given: Mapping[str, Any]) -> None:
    """Unknown, missing or mistyped own keys are told with the key and the nearest right one."""
    known = parameters(kind, name)
    open_ended = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(find(kind, name)).parameters.values()
    )
    for key, value in given.items():
        if key in known:
            annotation = _COLUMNS.get((name, key), _hints(find(kind, name)).get(key))
            _check_type(f"{kind}.{key}", annotation, value, known[key].default)
        elif not open_ended:
            hint = suggest(key, known) if known else f"{name} has no keys of its own"
            raise FedstillError(f"unknown key '{kind}.{key}' for {name}: {hint}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            annotation = _COLUMNS.get((name, key), _hints(find(kind, name)).get(key))
            wanted = f", {describe(annotation)}" if annotation is not None else ": set it, or give it a default"
            raise FedstillError(f"{kind}.{key} is missing: {name} needs it{wanted}")


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a name imported for type checkers only
        return {}


def _check_type(key: str, annotation: Any, value: Any, default: Any) -> None:
    if annotation is None or value is None:
        return
    try:
        # Arrays and tables come as list and dict: only for them tuples and dataclasses may be converted.
        TypeAdapter(annotation).validate_python(value, strict=not isinstance(value, (list, tuple, dict)))
    except ValidationError:
        if choices := _choices(annotation):
            raise FedstillError(f"{key} = {_quote(value)} is unknown: {suggest(str(value), choices)}") from None
        example = f": e.g. {key} = {toml_value(default)}" if _plain(default) else ""
        raise FedstillError(f"{key} = {_quote(value)} must be {describe(annotation)}{example}") from None
    except (PydanticSchemaGenerationError, PydanticUserError):
        raise FedstillError(f"{key} cannot be written in a file: build the method in Python instead") from None


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):  # a Literal or None
        (annotation, *more) = (part for part in typing.get_args(annotation) if part is not type(None))
        if more:
            return []
    literal = typing.get_origin(annotation) is typing.Literal
    return [str(choice) for choice in typing.get_args(annotation)] if literal else []


def describe(annotation: Any) -> str:
    """A type in words: float -> 'a number', tuple[int, ...] -> 'a list of whole numbers'."""
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}
    if annotation in words:
        return words[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part) for part in arguments if part is not type(None))
    if origin in (tuple, list) or origin is not None:
        inner = describe(arguments[0]).split(" ", 1)[-1] + "s" if arguments else "values"
        return f"a list of {inner}"
    return f"a {getattr(annotation, '__name__', annotation)}"


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(item) for item in value)
    return isinstance(value, (bool, int, float, str))


def _quote(value: Any) -> str:
    return toml_value(value) if _plain(value) else repr(value)
