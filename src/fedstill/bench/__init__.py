"""Papers reproduced: `benchmarks/<paper>/recipe.py` says what to run, `fedstill bench` sets ours beside the paper's."""

from __future__ import annotations

from fedstill.bench.recipe import Cell, Expected, Recipe, Table

__all__ = ["Cell", "Expected", "Recipe", "Table"]
