"""The papers' folders, and the methods of their released code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedstill.core.types import Method
from fedstill.methods.lookup import find_method

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def released(paper: str, method: str) -> Callable[..., Method]:
    """Return a function of benchmarks/<paper>/released.py."""
    return find_method(f"{BENCHMARKS / paper / 'released.py'}:{method}")
