"""The form of a paper's benchmark: tables of cells, each cell an experiment that is run once a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedstill.config import Experiment

Number = float | str  # a word where the paper prints one instead of a number: "failed"
# table -> column -> row -> {"best": percent, "last": percent, "speedup": times, "gain": points, "rounds": to the
# target of the column's experiments}: see expected.toml
Expected = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Number]]]]


@dataclass(frozen=True)
class Cell:
    """One method in one setting."""

    row: str  # what --methods selects and the table shows: "fedlmd"
    column: str  # what --columns selects: "cifar10-lda-0.05"
    experiment: Experiment  # without a seed of its own: the bench sets seed 0, 1, ...


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper."""

    name: str  # what --table selects: "3", "figure-8"
    title: str
    cells: tuple[Cell, ...]
    note: str = ""  # what a reader must know

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Recipe:
    """All that is reproduced of one paper; benchmarks/<paper>/recipe.py calls its own RECIPE."""

    paper: str
    title: str
    presets: Mapping[str, str]  # name -> what it means; the first is the default
    tables: Mapping[str, Mapping[str, Table]]  # preset -> name -> table
