"""The learning curves of one column: accuracy over rounds, a line a method, seeds as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.bench.form import Recipe
from fedstill.bench.load import find_table
from fedstill.bench.results import cell_key
from fedstill.bench.summary import curves_by_key
from fedstill.core.errors import FedstillError
from fedstill.report.curves import learning_curves


def curves_picture(
    recipe: Recipe, preset: str, table_name: str, column: str, runs: Sequence[Mapping[str, Any]], path: Path
) -> Path:
    """Draw every method of the column that was run into a PNG."""
    table, found = find_table(recipe, preset, table_name), curves_by_key(runs)
    cells = {cell.row: cell_key(cell.experiment) for cell in table.cells if cell.column == column}
    lines = {
        row: [(curve.at, [accuracy / 100 for accuracy in curve.accuracy]) for curve in found[key].values()]
        for row, key in cells.items()
        if key in found
    }
    if not lines:
        raise FedstillError(f"no run of {column} in table {table_name}: fedstill bench {recipe.paper} runs them")
    return learning_curves(lines, path, title=f"{recipe.paper}, {column}")
