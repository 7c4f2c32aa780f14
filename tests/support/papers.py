"""The papers' folders, and the methods of their released code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstill.core.types import Method
from fedstill.methods.options import find

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module_of(paper: str) -> Any:
    """Return the module benchmarks/<paper>/released.py."""
    spec = importlib.util.spec_from_file_location(f"released_{paper}", BENCHMARKS / paper / "released.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def released(paper: str, method: str) -> Callable[..., Method]:
    """Return a function of benchmarks/<paper>/released.py."""
    return find("method", f"{BENCHMARKS / paper / 'released.py'}:{method}")
