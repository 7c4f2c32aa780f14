"""Options of a partition, a model or a method, checked against the signature of the function that takes them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from fedstill.attack import ATTACKS
from fedstill.core.data import GIVEN
from fedstill.core.errors import FedstillError, noting, suggest
from fedstill.core.limits import Example
from fedstill.methods import METHODS
from fedstill.methods.own_code import own_function
from fedstill.models import MODELS
from fedstill.models.mixed import MIXED, given, mixed
from fedstill.partition import PARTITIONS
from fedstill.server.aggregate import AGGREGATES
from fedstill.storage.toml import parse_value, toml_value

NONE = "none"  # the word for None, which TOML lacks
_NAME_KEY = {
    "partition": "partition.scheme",
    "model": "model.name",
    "method": "method.name",
    "aggregate": "server.aggregate",
    "attack": "attack.name",
}
_COLUMNS = {("natural", "keys"): str | list[str]}  # a file names the columns whose values the function takes
_FILLED_IN = {  # parameters that are no options, because the run gives them
    "partition": ("labels", "clients", "seed"),
    "model": ("input_shape", "classes", "vocabulary"),
}
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a section"}
_SECTIONS = ("Helps", "Args", "Tries", "Reveals", "Differs from the paper", "Reference")
_LIMITS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


def registry(kind: str) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that can be chosen by name: partitions, models, methods, aggregates or attacks."""
    models: dict[str, Callable[..., Any]] = {**MODELS, MIXED: mixed}
    kinds: dict[str, Mapping[str, Callable[..., Any]]] = {"partition": PARTITIONS, "model": models}
    return (kinds | {"method": METHODS, "aggregate": AGGREGATES, "attack": ATTACKS})[kind]


def find(kind: str, name: str) -> Callable[..., Any]:
    """Return the function that a name stands for, or the user's own function that FILE.py:function names."""
    known = registry(kind)
    if name in known:
        return known[name]
    if kind == "model" and name == GIVEN:
        return given
    if ":" in name and kind in ("method", "model"):
        return own_function(name, _NAME_KEY[kind])
    hint = " (your own: FILE.py:function)" if kind in ("method", "model") else ""
    if kind in ("method", "model") and name.endswith(".py"):
        raise FedstillError(f"{_NAME_KEY[kind]} = '{name}' names a file and no function: write {name}:FUNCTION")
    if kind == "method":  # an aggregate may stand beside a method: fedavg+median
        known = {**known, **registry("aggregate")}
    for other in ("method", "model", "attack", "partition"):
        if other != kind and name not in known and name in registry(other):
            raise FedstillError(
                f"{_NAME_KEY[kind]} = '{name}' is no {kind}: {_NAME_KEY[other]} takes this name; "
                f"`fedstill list {kind}s` names the {kind}s"
            )
    raise FedstillError(f"{_NAME_KEY[kind]} = '{name}' is unknown: {suggest(name, known)}{hint}")


def parameters(kind: str, name: str) -> dict[str, inspect.Parameter]:
    """Return the options that a file may set, in the order of the signature."""
    return {
        key: parameter
        for key, parameter in inspect.signature(find(kind, name)).parameters.items()
        if key not in _FILLED_IN.get(kind, ())
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def defaults(kind: str, name: str) -> dict[str, Any]:
    """Return the options that have a default TOML can hold; a dataclass is a table, in which None is "none"."""
    every = {key: as_table(parameter.default) for key, parameter in parameters(kind, name).items()}
    return {key: value for key, value in every.items() if _plain(value)}


def resolved(kind: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the defaults of all others, as tables that a file can hold."""
    arguments = check(kind, name, options).items()
    tables = {key: as_table(value) for key, value in arguments if dataclasses.is_dataclass(value)}
    return {**defaults(kind, name), **options, **tables}


def as_table(value: Any) -> Any:
    """Return a dataclass as a table with all its fields, and a tuple as a list, because a file holds them so."""
    if isinstance(value, tuple):
        return list(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: as_table(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {key: NONE if field is None else field for key, field in fields.items()}


def check(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the options of a file into arguments; a mistake is refused with the option and the nearest right value.

    A table is laid over the option's default, which is a dataclass. The word "none" is None where None is allowed.
    """
    function, options = find(kind, name), parameters(kind, name)
    hints = {key: _COLUMNS.get((name, key), hint) for key, hint in _hints(function).items()}
    mistakes: list[str] = []
    for key, option in options.items():
        if option.default is option.empty and key not in given:
            wanted = f", {describe(hints[key])}" if key in hints else ": set it, or give it a default"
            mistakes.append(f"{kind}.{key} is missing: {name} needs it{wanted}")
    values = {key: option.default for key, option in options.items()}
    signature = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature):
        values = {**dict.fromkeys(given), **values}
    with noting(mistakes):
        checked = _checked_table(kind, name, given, values, hints)
    if mistakes:
        raise FedstillError(*mistakes)
    return checked


def _checked_table(
    where: str, name: str, given: Mapping[str, Any], values: Mapping[str, Any], hints: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the checked values of one table; `values` are the defaults of all keys that it may have."""
    checked, mistakes = {}, list[str]()
    for key, value in given.items():
        default = values.get(key)
        if key not in values:
            mistakes.append(f"unknown key '{where}.{key}' for {name}: {_nearest(key, name, values)}")
            continue
        with noting(mistakes):
            if dataclasses.is_dataclass(default) and not isinstance(default, type):
                checked[key] = _laid_over(f"{where}.{key}", name, value, default)
            else:
                checked[key] = _checked(f"{where}.{key}", hints.get(key), value, default)
    if mistakes:
        raise FedstillError(*mistakes)
    return checked


_OF_THE_SERVER = {  # keys that say how models are averaged, which are options of no method
    "weighting": "write {name}+average(weighting='uniform'), or [server] aggregate",
    "buffers": "it stands in the section [server]",
}


def _nearest(key: str, name: str, values: Mapping[str, Any]) -> str:
    """Suggest the option that was meant; an option of the same name inside a table comes first."""
    if key in _OF_THE_SERVER:
        return _OF_THE_SERVER[key].format(name=name)
    if not values:
        return f"{name} has no options"
    for option, default in values.items():
        table = as_table(default)
        if isinstance(table, dict) and key in table:
            return f"did you mean '{option}.{key}'?"
    return suggest(key, values)


def _laid_over(where: str, name: str, given: Any, default: Any) -> Any:
    """Return the default dataclass with the given fields changed; given epochs switch the default's steps off."""
    if isinstance(given, type(default)):
        return given
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    if not isinstance(given, Mapping):
        first = next(iter(values))
        raise FedstillError(f"{mistake(where, type(default), given, default)}: e.g. {where}.{first} = 1")
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
        # A file has lists and dicts only, so these may be converted to tuples and dataclasses.
        return _validator(annotation).validate_python(value, strict=not isinstance(value, (list, tuple, dict)))
    except ValidationError:
        if value == NONE and NoneType in typing.get_args(without_marks(annotation)):
            return None
        raise FedstillError(mistake(key, annotation, value, default)) from None
    except (PydanticSchemaGenerationError, PydanticUserError):
        raise FedstillError(f"{key} cannot be written in a file: build the method in Python instead") from None


def mistake(key: str, annotation: Any, value: Any, default: Any, *, wanted: Any = None) -> str:
    """Return the line about a value that does not fit the type of its key; it names a right value.

    wanted: the right values, where the type of the key does not say them: a text, a list of words, or another type.

    >>> mistake("local.lr", Annotated[float, Gt(0)], -1.0, 0.01)
    'local.lr = -1.0 must be a number above 0: e.g. local.lr = 0.01'

    Somebody who writes several values is shown the command that tries them.

    >>> print(mistake("cohort", int, [2, 4], 8))
    cohort = [2, 4] must be a whole number: e.g. cohort = 8; to try several values: fedstill sweep --over cohort=2,4
    """
    wanted = annotation if wanted is None else wanted
    if choices := wanted if isinstance(wanted, list) else _choices(wanted):
        return f"{key} = {_quote(value)} is unknown: {suggest(str(value), choices)}"
    marks = getattr(annotation, "__metadata__", ())
    shown = next((mark.value for mark in marks if isinstance(mark, Example)), default)
    example = f": e.g. {key} = {toml_value(shown)}" if _plain(shown) else ""
    words = wanted if isinstance(wanted, str) else describe(wanted)
    if isinstance(value, float) and not math.isfinite(value):
        words = words.replace("a number", "a finite number")
    several = value if isinstance(value, list) else str(value).split(",")
    if len(several) > 1 and all(map(_plain, several)):  # a key of lists reports an item that is wrong, not the list
        example += (
            f"; to try several values: fedstill sweep --over {key}={','.join(str(item).strip() for item in several)}"
        )
    return f"{key} = {_quote(value)} must be {words}{example}"


def is_section(kind: Any) -> bool:
    """Return whether a type is written as a table: a dataclass, or a section of an experiment."""
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def without_marks(annotation: Any) -> Any:
    """Return the type below an Annotated, such as the union of `Annotated[int | None, Example(20)]`."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


@cache
def _validator(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _choices(annotation: Any) -> list[str]:
    """Return the words of a Literal, or of a Literal or None; no words for any other type."""
    annotation = without_marks(annotation)
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
        kind, limits = describe(arguments[0]), _marked_limits(annotation)
        return (
            f"{kind}{'' if limits.startswith(('above', 'from', 'below', 'that')) else ','} {limits}" if limits else kind
        )
    if origin in (typing.Union, types.UnionType):
        kinds = [without_marks(part) for part in arguments]
        hidden = (NoneType, int) if float in kinds else (NoneType,)  # a whole number is a number
        return " or ".join(describe(part) for part, kind in zip(arguments, kinds, strict=True) if kind not in hidden)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is not None:
        words = ", ".join(_choices(arguments[0]))
        return f"a list of {words or describe(arguments[0]).split(' ', 1)[-1] + 's'}"
    if is_section(annotation):
        return "a section with its keys"
    return f"a {getattr(annotation, '__name__', annotation)}"


def limits_of(annotation: Any) -> str:
    """Return the limits of a number or the choices of a word, as a table of options shows them; empty without any.

    >>> limits_of(Annotated[float, Ge(0), Lt(1)] | None)
    'at least 0 and below 1'
    """
    if choices := _choices(annotation):
        return ", ".join(choices)
    parts = typing.get_args(without_marks(annotation))  # of a union
    return _marked_limits(annotation) or next(filter(None, map(limits_of, parts)), "")


def _marked_limits(annotation: Any) -> str:
    """Return the limits in the marks of an Annotated itself, without limits of the types inside it."""
    ends = {type(limit): limit for limit in getattr(annotation, "__metadata__", ()) if type(limit) in _LIMITS}
    if any(isinstance(mark, MinLen) for mark in getattr(annotation, "__metadata__", ())):
        return "that is not empty"
    if Ge in ends and Le in ends:
        least, most = (f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (ends[Ge].ge, ends[Le].le))
        return f"from {least} to {most}"
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

    default: an object whose values stand in place of the signature's defaults.
    """
    hints = _hints(owner)
    for key, parameter in inspect.signature(owner).parameters.items():
        value = parameter.default if default is None else getattr(default, key)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield Option(prefix + key, {}, "", owner)
            yield from listed(type(value), f"{prefix}{key}.", value)
        else:
            yield Option(prefix + key, value, limits_of(hints.get(key)), owner)


def read_docstring(function: Callable[..., Any]) -> dict[str, str]:
    """Return the summary, the body (the equation) and each section of a docstring; a missing section is empty."""
    text = inspect.getdoc(function) or ""
    heading = re.compile(rf"^({'|'.join(_SECTIONS)}):[ ]?", re.MULTILINE)
    head, *rest = heading.split(text)
    summary, _, body = head.partition("\n")
    words = {"summary": summary.strip(), "body": textwrap.dedent(body.strip("\n")).rstrip()}
    for section, content in zip(rest[::2], rest[1::2], strict=True):
        words[section] = content.rstrip() if section == "Args" else " ".join(content.split())
    return {section: words.get(section, "") for section in ("summary", "body", *_SECTIONS)}


def tries(name: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of a method's options that are worth trying, as `Tries:` in its docstring lists them.

    Every value is checked against the method's signature and has the type of its option; "none" stands for None.

    >>> tries("fedprox")
    {'mu': (0.001, 0.01, 0.1, 1.0)}
    """
    from fedstill.methods.lookup import split_methods

    hints = _hints(find("method", name))
    values = {key: parameter.default for key, parameter in parameters("method", name).items()}
    ranges: dict[str, tuple[Any, ...]] = {}
    mistakes: list[str] = []
    for entry in filter(None, read_docstring(find("method", name))["Tries"].removesuffix(".").split(";")):
        path, equals, texts = (piece.strip() for piece in entry.partition("="))
        if not equals:
            mistakes.append(f"'Tries: {entry.strip()}' of {name} cannot be read: write option = value, value; ...")
            continue
        with noting(mistakes):
            ranges[path] = tuple(
                _checked_at(path.split("."), parse_value(text), name, values, hints) for text in split_methods(texts)
            )
    if mistakes:
        raise FedstillError(*mistakes)
    return ranges


def _checked_at(path: list[str], value: Any, name: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> Any:
    """Return one value of an option at a path such as student.lr, checked and as a file holds it."""
    for key in reversed(path):
        value = {key: value}
    checked: Any = _checked_table("method", name, value, values, hints)
    for key in path:
        checked = as_table(checked[key])
    return NONE if checked is None else checked


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_plain(item) for item in value.values())
    return isinstance(value, (bool, int, float, str))


def _quote(value: Any) -> str:
    text = toml_value(value) if _plain(value) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
