"""Checks of a method's options: one line that names the key, what it got and what it takes."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Algorithm

Factory = Callable[..., Algorithm]


def presets(**forms: Mapping[str, Any]) -> Callable[[Factory], Factory]:
    """Give a method the option `preset`: other defaults, as a paper or its released code has them.

    An option that is set by name still counts before the preset's. `factory.presets` are the forms.
    """

    def with_presets(factory: Factory) -> Factory:
        @functools.wraps(factory)
        def build(*, preset: str = "correct", **options: Any) -> Algorithm:
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
    return FedstillError(f"algorithm.{key} = {value!r} is impossible: it must be {wanted}")


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
            raise FedstillError(f"algorithm.{key} = {value!r} is unknown: {suggest(str(value), get_args(hint))}")
        return
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        names = {float: "a number", int: "a whole number", str: "a word", bool: "true or false"}
        raise _refuse(key, value, names[hint])
