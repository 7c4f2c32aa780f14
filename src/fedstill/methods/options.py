"""Own keys of a partition, a model or a method, checked against the signature of the function that takes them."""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Method
from fedstill.storage.toml import toml_value

_NAME_KEY = {
    "partition": "partition.scheme",
    "model": "model.name",
    "method": "method.name",
    "aggregate": "server.aggregate",
}
_COLUMNS = {("natural", "keys"): str | list[str]}  # a file names the columns, the function takes their values
_FILLED_IN = {
    "partition": frozenset({"labels", "clients", "seed"}),
    "model": frozenset({"input_shape", "classes", "vocabulary"}),  # the data decide
    "method": frozenset[str](),
    "aggregate": frozenset[str](),
}


def registry(kind: str) -> Mapping[str, Callable[..., Any]]:
    """Name -> function of everything that can be chosen by name. Imported late: torch takes a second."""
    if kind == "partition":
        from fedstill.partition import PARTITIONS

        return PARTITIONS
    if kind == "model":
        from fedstill.models import MODELS
        from fedstill.models.mixed import MIXED, mixed

        return {**MODELS, MIXED: mixed}
    if kind == "aggregate":
        from fedstill.server.aggregate import AGGREGATES

        return AGGREGATES
    from fedstill.methods import METHODS

    return METHODS


def _find_method(name: str) -> Callable[..., Any]:
    from fedstill.methods.lookup import find_method

    return find_method(name)


def find(kind: str, name: str) -> Callable[..., Any]:
    known = registry(kind)
    if name not in known and kind == "method":
        return _find_method(name)
    if kind == "model" and ":" in name:
        from fedstill.methods.lookup import own_function

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


Factory = Callable[..., Method]


def presets(**forms: Mapping[str, Any]) -> Callable[[Factory], Factory]:
    """Give a method the option `preset`: other defaults, as a paper or its released code has them.

    An option that is set by name still counts before the preset's. `factory.presets` are the forms.
    """

    def with_presets(factory: Factory) -> Factory:
        @functools.wraps(factory)
        def build(*, preset: str = "correct", **options: Any) -> Method:
            check_type("preset", preset, kind)
            return factory(**{**forms.get(preset, {}), **options})

        kind = Literal[("correct", *forms)]  # type: ignore[valid-type]
        signature = inspect.signature(factory)
        extra = inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default="correct", annotation=kind)
        build.__signature__ = signature.replace(parameters=[extra, *signature.parameters.values()])  # type: ignore[attr-defined]
        build.__annotations__ = {"preset": kind, **factory.__annotations__}
        build.presets = forms  # type: ignore[attr-defined]
        return build

    return with_presets


def _refuse(key: str, value: object, wanted: str) -> FedstillError:
    return FedstillError(f"method.{key} = {value!r} is impossible: it must be {wanted}")


def positive(key: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise _refuse(key, value, "a number above 0")


def batch_of_a_generator(key: str, value: int) -> None:
    if value < 2:
        raise _refuse(key, value, "2 or more, for the generator's BatchNorm")


def not_negative(key: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise _refuse(key, value, "0 or a number above it")


def temperature_of(key: str, value: float) -> None:
    """Beyond these its square, or what it divides, leaves the range of float32."""
    if not 1e-3 <= value <= 1e3:
        raise _refuse(key, value, "from 0.001 to 1000")


def decay_rate(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise _refuse(key, value, "at least 0 and below 1")


def share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise _refuse(key, value, "from 0 to 1")


def positive_share(key: str, value: float) -> None:
    if not 0 < value <= 1:
        raise _refuse(key, value, "above 0 and at most 1")


def open_share(key: str, value: float) -> None:
    if not 0 < value < 1:
        raise _refuse(key, value, "above 0 and below 1")


def check_type(key: str, value: object, hint: Any) -> None:
    """Refuse a value that its type hint (float, int, str, bool, a Literal, or one of these or None) rules out."""
    if get_origin(hint) in (UnionType, Union):  # a Literal or None is typing's own kind of union
        if value is None and NoneType in get_args(hint):
            return
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise FedstillError(f"method.{key} = {value!r} is unknown: {suggest(str(value), get_args(hint))}")
        return
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        names = {float: "a number", int: "a whole number", str: "a word", bool: "true or false"}
        raise _refuse(key, value, names[hint])
