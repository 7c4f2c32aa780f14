"""Limits of settings, stated once: sections of a file, options of a method and dataclasses use the same types.

pydantic reads them where a file or a text is checked. A whole number is taken for a number, nothing else is converted.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, ConfigDict, Strict, TypeAdapter, ValidationError

from fedstill.core.errors import FedstillError

SECTION = ConfigDict(extra="forbid", allow_inf_nan=False)  # of a dataclass that is a section of a file
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Count = Annotated[int, Strict(), Ge(1)]
CountOrNone = Annotated[int, Strict(), Ge(0)]  # 0 switches the part off
Rows = Annotated[int, Strict(), Ge(1), Le(10_000_000)]  # of a batch, which takes memory for each, filled or not
Several = Annotated[int, Strict(), Ge(2)]  # a BatchNorm needs more than one row
Number = Annotated[float, Strict(), AllowInfNan(False)]
Positive = Annotated[float, Strict(), AllowInfNan(False), Gt(0)]
NotNegative = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
Share = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Le(1)]
PositiveShare = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Le(1)]
LargestShare = Annotated[float, Strict(), AllowInfNan(False), Ge(1)]  # in even shares, 1 / |S| each
OpenShare = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Lt(1)]
Decay = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Lt(1)]
Temperature = Annotated[float, Strict(), AllowInfNan(False), Ge(1e-3), Le(1e3)]  # beyond, its square leaves float32


class Example:
    """A value that a message about a mistake shows; without one it shows the default."""

    def __init__(self, value: object) -> None:
        self.value = value


@cache
def _validators(section: object) -> dict[str, TypeAdapter[Any]]:
    """A validator for each field of a dataclass, built once, because a recipe builds a thousand experiments."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(section, include_extras=True).items()}


def check_limits(section: str, given: Any) -> None:
    """Refuse a dataclass that Python code built with a value outside the limits that its fields state."""
    kind: object = type(given)
    for name, value in asdict(given).items():
        try:
            _validators(kind)[name].validate_python(value)
        except ValidationError as error:
            raise FedstillError(f"{section}.{name} = {value}: {error.errors()[0]['msg'].lower()}") from None
