"""Limits of settings, stated once: sections of a file, options of a method and dataclasses use the same types.

pydantic reads them where a file or a text is checked. A whole number is taken for a number, nothing else is converted.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, Strict

Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Whole = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Ge(1)]
CountOrNone = Annotated[int, Strict(), Ge(0)]  # 0 switches the part off
Number = Annotated[float, Strict(), AllowInfNan(False)]
Positive = Annotated[float, Strict(), AllowInfNan(False), Gt(0)]
NotNegative = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
Share = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Le(1)]
PositiveShare = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Le(1)]
OpenShare = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Lt(1)]
Decay = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Lt(1)]
Temperature = Annotated[float, Strict(), AllowInfNan(False), Ge(1e-3), Le(1e3)]  # beyond, its square leaves float32


class Example:
    """A value that a message about a mistake shows; without one it shows the default."""

    def __init__(self, value: object) -> None:
        self.value = value
