"""Reproduce papers: `benchmarks/<paper>/recipe.py` lists the runs, `fedstill bench` compares them with the paper."""

from __future__ import annotations

from fedstill.bench.recipe import Cell, Expected, Recipe, Table

__all__ = ["Cell", "Expected", "Recipe", "Table"]
