"""What the tests of the papers' recipes share."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

from typer.testing import CliRunner

from fedstill.bench import Cell, Recipe
from fedstill.bench.recipe import load_expected, load_recipe
from fedstill.bench.results import read_runs
from fedstill.cli import app
from fedstill.experiment.config import Experiment
from fedstill.models import build_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS.parent / "docs" / "results"


class PaperCase:
    """One folder of benchmarks/, its recipe and its numbers."""

    def __init__(self, name: str, preset: str = "correct") -> None:
        self.name, self.preset = name, preset
        self.folder = BENCHMARKS / name

    @property
    def recipe(self) -> Recipe:
        return _recipe(self.folder)

    @property
    def expected(self):
        return load_expected(self.folder, self.recipe)

    def cells(self, table: str, preset: str | None = None) -> tuple[Cell, ...]:
        return self.recipe.tables[preset or self.preset][table].cells

    def all_cells(self) -> list[Cell]:
        return [cell for tables in self.recipe.tables.values() for table in tables.values() for cell in table.cells]

    def experiment(self, table: str, row: str, column: str, preset: str | None = None) -> Experiment:
        cells = self.cells(table, preset)
        (found,) = [cell.experiment for cell in cells if (cell.row, cell.column) == (row, column)]
        return found

    def method(self, table: str, row: str, column: str, preset: str | None = None) -> str | dict:
        """The text of a mixture; of a single method its name and options."""
        section = self.experiment(table, row, column, preset).method
        return {"name": section.name, **section.options} if "+" not in section.name else section.name

    def columns_that_differ_in_more_than_the_method(self) -> list[str]:
        odd = []
        for preset, tables in self.recipe.tables.items():
            for table in tables.values():
                for column in table.columns:
                    own = {
                        c.experiment.replace(method="fedavg").model_dump_json()
                        for c in table.cells
                        if c.column == column
                    }
                    odd += [f"{preset} {table.name} {column}"] if len(own) > 1 else []
        return odd

    def documented_commands(self) -> list[tuple[str, dict[str, str]]]:
        """(table, the other words) of every `fedstill bench` line of the README; columns and methods exist."""
        found = []
        for line in (self.folder / "README.md").read_text(encoding="utf-8").splitlines():
            if line.startswith("fedstill bench "):
                words = shlex.split(line)
                assert words[:3] == ["fedstill", "bench", self.name]
                said = dict(zip(words[3::2], words[4::2], strict=True))
                table = self.recipe.tables[said.get("--preset", self.preset)][said["--table"]]
                assert set(said.get("--columns", "").split(",")) - {""} <= set(table.columns), line
                assert set(said.get("--methods", "").split(",")) - {""} <= set(table.rows), line
                found.append((table.name, said))
        return found

    def runs(self):
        """What the documentation holds; none as long as nothing was run."""
        return read_runs(RESULTS / f"{self.name}.json", self.name)

    def bench(self, *words: str) -> str:
        outcome = CliRunner().invoke(app, ["bench", str(self.folder), *words])
        assert outcome.exit_code == 0, outcome.output
        return outcome.stdout


@cache
def _recipe(folder: Path) -> Recipe:
    return load_recipe(folder)


def parameters(experiment: Experiment, shape: tuple[int, ...], classes: int) -> int:
    section = experiment.model
    model = build_model(section.name, input_shape=shape, classes=classes, **section.options)
    return sum(tensor.numel() for tensor in model.init(0).params.values())
