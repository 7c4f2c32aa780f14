"""Options of a partition, a model or a method, checked against the signature of the function that takes them."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.limits import Example
from fedstill.storage.toml import toml_value

NONE = "none"  # the word for None, which TOML lacks
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
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}
_LIMITS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


def registry(kind: str) -> Mapping[str, Callable[..., Any]]:
    """Return name -> function of everything that can be chosen by name. Imported late, because torch takes a second."""
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


def find(kind: str, name: str) -> Callable[..., Any]:
    """Return the function that a name stands for, or the user's own function that FILE.py:function names."""
    known = registry(kind)
    if name in known:
        return known[name]
    if ":" in name and kind in ("method", "model"):
        from fedstill.methods.lookup import own_function

        return own_function(name, _NAME_KEY[kind])
    own = " (your own: FILE.py:function)" if kind in ("method", "model") else ""
    raise FedstillError(f"{_NAME_KEY[kind]} = '{name}' is unknown: {suggest(name, known)}{own}")


def parameters(kind: str, name: str) -> dict[str, inspect.Parameter]:
    """Return the options that a file may set, in the order of the signature."""
    return {
        key: parameter
        for key, parameter in inspect.signature(find(kind, name)).parameters.items()
        if key not in _FILLED_IN[kind] and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def defaults(kind: str, name: str) -> dict[str, Any]:
    """Return the options that have a default TOML can hold; a dataclass is a table, in which None is "none"."""
    every = {key: as_table(parameter.default) for key, parameter in parameters(kind, name).items()}
    return {key: value for key, value in every.items() if _plain(value)}


def resolved(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options with the defaults of all others, as tables that a file can hold."""
    tables = {
        key: as_table(value) for key, value in check(kind, name, given).items() if dataclasses.is_dataclass(value)
    }
    return {**defaults(kind, name), **given, **tables}


def as_table(value: Any) -> Any:
    """Return a dataclass as a table with all its fields and a tuple as a list, as a file gives them back."""
    if isinstance(value, tuple):
        return list(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: as_table(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {key: NONE if field is None else field for key, field in fields.items()}


def check(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the given options stand for; a mistake names the option and the nearest right one.

    A table is laid over the option's default, which is a dataclass. The word "none" is None where None is allowed.
    """
    function, options = find(kind, name), parameters(kind, name)
    hints = {key: _COLUMNS.get((name, key), hint) for key, hint in _hints(function).items()}
    for key, option in options.items():
        if option.default is option.empty and key not in given:
            wanted = f", {describe(hints[key])}" if key in hints else ": set it, or give it a default"
            raise FedstillError(f"{kind}.{key} is missing: {name} needs it{wanted}")
    values = {key: option.default for key, option in options.items()}
    signature = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature):
        values = {**dict.fromkeys(given), **values}
    return _checked_table(kind, name, given, values, hints)


def _checked_table(
    where: str, name: str, given: Mapping[str, Any], values: Mapping[str, Any], hints: Mapping[str, Any]
) -> dict[str, Any]:
    """Check every given key of one table; `values` are the defaults of all keys that it may have."""
    checked = {}
    for key, value in given.items():
        if key not in values:
            raise FedstillError(f"unknown key '{where}.{key}' for {name}: {_nearest(key, name, values)}")
        default = values[key]
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            checked[key] = _laid_over(f"{where}.{key}", name, value, default)
        else:
            checked[key] = _checked(f"{where}.{key}", hints.get(key), value, default)
    return checked


SEAT = {  # keys that say how models are averaged: options of no method
    "weighting": "write {name}+average(weighting='uniform'), or [server] aggregate",
    "buffers": "it stands in the section [server]",
}


def _nearest(key: str, name: str, values: Mapping[str, Any]) -> str:
    """Name the option that was meant; one of the same name inside a table comes first."""
    if key in SEAT:
        return SEAT[key].format(name=name)
    if not values:
        return f"{name} has no keys of its own"
    for option, default in values.items():
        table = as_table(default)
        if isinstance(table, dict) and key in table:
            return f"did you mean '{option}.{key}'?"
    return suggest(key, values)


def _laid_over(where: str, name: str, given: Any, default: Any) -> Any:
    """Return the default dataclass with the given fields changed. Epochs that are given replace the default's steps."""
    if isinstance(given, type(default)):
        return given
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    if not isinstance(given, Mapping):
        first = next(iter(values))
        raise FedstillError(f"{where} = {_quote(given)} must be a section with its keys: e.g. {where}.{first} = 1")
    kind: Any = type(default)
    changes = _checked_table(where, name, given, values, _hints(kind))
    if "epochs" in changes and "steps" in values and "steps" not in changes:
        changes["steps"] = None
    return dataclasses.replace(default, **changes)


@cache
def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:  # a name imported for type checkers only
        return {}


def _checked(key: str, annotation: Any, value: Any, default: Any) -> Any:
    if annotation is None or value is None:
        return value
    try:
        # Arrays and tables come as list and dict, so only for them tuples and dataclasses may be converted.
        return _validator(annotation).validate_python(value, strict=not isinstance(value, (list, tuple, dict)))
    except ValidationError:
        if value == NONE and NoneType in typing.get_args(_without_marks(annotation)):
            return None
        if choices := _choices(annotation):
            raise FedstillError(f"{key} = {_quote(value)} is unknown: {suggest(str(value), choices)}") from None
        marks = getattr(annotation, "__metadata__", ())
        shown = next((mark.value for mark in marks if isinstance(mark, Example)), default)
        example = f": e.g. {key} = {toml_value(shown)}" if _plain(shown) else ""
        raise FedstillError(f"{key} = {_quote(value)} must be {describe(annotation)}{example}") from None
    except (PydanticSchemaGenerationError, PydanticUserError):
        raise FedstillError(f"{key} cannot be written in a file: build the method in Python instead") from None


def _without_marks(annotation: Any) -> Any:
    """The type below an Annotated, such as the union of `Annotated[int | None, Example(20)]`."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


@cache
def _validator(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _choices(annotation: Any) -> list[str]:
    """Return the words of a Literal, or of a Literal or None; nothing for any other type."""
    annotation = _without_marks(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation, *more) = (part for part in typing.get_args(annotation) if part is not NoneType)
        if more:
            return []
    return [str(word) for word in typing.get_args(annotation)] if typing.get_origin(annotation) is Literal else []


def describe(annotation: Any) -> str:
    """Say a type in words, with its limits.

    >>> describe(tuple[int, ...])
    'a list of whole numbers'
    >>> describe(Annotated[float, Gt(0), Le(1)])
    'a number above 0 and at most 1'
    """
    if annotation in _KINDS:
        return _KINDS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind, limits = describe(arguments[0]), limits_of(annotation)
        return f"{kind}{'' if limits.startswith(('above', 'from', 'below')) else ','} {limits}" if limits else kind
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part) for part in arguments if part is not NoneType)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is not None:
        inner = describe(arguments[0]).split(" ", 1)[-1] + "s" if arguments else "values"
        return f"a list of {inner}"
    return f"a {getattr(annotation, '__name__', annotation)}"


def limits_of(annotation: Any) -> str:
    """Return the limits of a number or the choices of a word, as a table of options shows them; empty without any.

    >>> limits_of(Annotated[float, Ge(0), Lt(1)] | None)
    'at least 0 and below 1'
    """
    if choices := _choices(annotation):
        return ", ".join(choices)
    if typing.get_origin(_without_marks(annotation)) in (typing.Union, types.UnionType):
        annotation = _without_marks(annotation)
        return next(filter(None, map(limits_of, typing.get_args(annotation))), "")
    ends = {type(limit): limit for limit in getattr(annotation, "__metadata__", ()) if type(limit) in _LIMITS}
    if Ge in ends and Le in ends:
        return f"from {ends[Ge].ge:g} to {ends[Le].le:g}"
    return " and ".join(
        f"{words} {getattr(ends[kind], key):g}" for kind, (key, words) in _LIMITS.items() if kind in ends
    )


class Option(NamedTuple):
    """One option as documentation lists it; a field of a table is called `table.field`."""

    name: str
    default: Any
    limits: str
    owner: Callable[..., Any]  # the function or dataclass whose docstring explains it


def listed(owner: Callable[..., Any], prefix: str = "", default: Any = None) -> Iterator[Option]:
    """List the options of a function; a dataclass among them is followed by its fields.

    The defaults are those of the signature, or of the object `default` where one is given.
    """
    hints = _hints(owner)
    for key, parameter in inspect.signature(owner).parameters.items():
        value = parameter.default if default is None else getattr(default, key)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield Option(prefix + key, {}, "", owner)
            yield from listed(type(value), f"{prefix}{key}.", value)
        else:
            yield Option(prefix + key, value, limits_of(hints.get(key)), owner)


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_plain(item) for item in value.values())
    return isinstance(value, (bool, int, float, str))


def _quote(value: Any) -> str:
    return toml_value(value) if _plain(value) else repr(value)
