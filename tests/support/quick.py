"""Which cases of a claim the quick run tries: the others carry the mark `matrix` and run under `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

EITHER_ENGINE = ("batched", pytest.param("looped", marks=pytest.mark.matrix))


def quick_if(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: those that are not quick are marked `matrix`; a tuple is several arguments."""
    return [case if is_quick(case) else _in_matrix(case) for case in cases]


def first_quick(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Cases for `parametrize`: the first `count` run in the quick run."""
    return [case if place < count else _in_matrix(case) for place, case in enumerate(cases)]


def _in_matrix(case: Any) -> Any:
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.matrix)
