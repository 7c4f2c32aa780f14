"""A table of the paper from finished runs: ours as mean and spread over seeds, the paper's figures, the differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fedstill.bench.form import Cell, Expected, Number, Table
from fedstill.bench.metrics import (
    Curve,
    Spread,
    best,
    first_round,
    last_known,
    last_round,
    last_ten,
    rounds_ratio,
    speed_up,
    spread,
)
from fedstill.bench.results import cell_key, curve_of, method_text

REFERENCE = "fedavg"  # whose best accuracy speed-ups are measured against


@dataclass(frozen=True)
class RowSummary:
    """One method in one column; None where nothing was run or the paper prints nothing."""

    row: str
    seeds: int
    best: Spread | None
    last: Spread | None
    speedup: Spread | None  # T / r
    ratio: Spread | None  # rounds of FedAvg / r, over the seeds that reach FedAvg's best
    paper: Mapping[str, Number]
    comparable: bool = True  # False where the command line has changed the rounds
    final: Spread | None = None  # after the last round
    gain: float | None = None  # last ten less those of the best other row of the column
    beside: Mapping[str, Spread] = field(default_factory=dict)  # other numbers, means of the last ten rounds
    reached: Spread | None = None  # first round with the column's target accuracy, over the seeds that reach it
    engines: tuple[str, ...] = ()  # with which its seeds were run; "": the default

    @property
    def figure(self) -> float | None:
        """The accuracy that the paper prints."""
        value = self.paper.get("best", self.paper.get("last"))
        return None if isinstance(value, str) else value

    def above(self, ours: Spread | None) -> float | None:
        """Ours less the paper's; None where they are not of the same rounds."""
        return None if ours is None or self.figure is None or not self.comparable else ours.mean - self.figure

    def as_json(self) -> dict[str, Any]:
        numbers = {"best": self.best, "last_ten": self.last, "last_round": self.final}
        times = {"speedup": self.speedup, "rounds_ratio": self.ratio, "rounds_to_target": self.reached}
        ours = {name: None if value is None else value.as_json() for name, value in {**numbers, **times}.items()}
        difference = {name: _rounded(self.above(value)) for name, value in numbers.items()}
        beside = {name: value.as_json() for name, value in self.beside.items()}
        rest = {"gain": _rounded(self.gain), "beside": beside, "paper": dict(self.paper), "difference": difference}
        return {"row": self.row, "seeds": self.seeds, **ours, **rest, "engines": list(self.engines)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True)
class ColumnSummary:
    """All methods in one setting."""

    column: str
    rounds: tuple[int, ...]  # T; several where methods run for different lengths
    rows: tuple[RowSummary, ...]
    target: float | None = None  # in percent: `target` of its experiments

    def as_json(self) -> dict[str, Any]:
        head = {"column": self.column, "rounds": list(self.rounds), "target": self.target}
        return {**head, "rows": [row.as_json() for row in self.rows]}


Curves = dict[int, Curve]  # by seed


class Known(NamedTuple):
    """What the runs say, by the key of their cell."""

    curves: Mapping[str, Curves]
    beside: Mapping[str, Mapping[str, Spread]]
    engines: Mapping[str, tuple[str, ...]]


def summarize_table(
    table: Table,
    runs: Sequence[Mapping[str, Any]],
    expected: Expected,
    *,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    printed: Table | None = None,
) -> list[ColumnSummary]:
    """What the runs say about a table's columns and rows (default: all), in the table's order.

    printed: the table as the recipe has it, where the command line has changed its settings.
    """
    known = Known(curves_by_key(runs), beside_by_key(runs), engines_by_key(runs))
    chosen = [column for column in table.columns if not columns or column in columns]
    found = [_column(table, column, known, expected, rows) for column in chosen]
    return found if printed is None else [_compared(column, _changed(table, printed)) for column in found]


def _changed(table: Table, printed: Table) -> set[tuple[str, str]]:
    """(column, row) of cells that run for another number of rounds."""
    rounds = {(cell.column, cell.row): cell.experiment.rounds for cell in printed.cells}
    places = {(cell.column, cell.row): cell.experiment.rounds for cell in table.cells}
    return {place for place, length in places.items() if length != rounds.get(place)}


def _compared(column: ColumnSummary, changed: set[tuple[str, str]]) -> ColumnSummary:
    rows = [replace(row, comparable=(column.column, row.row) not in changed) for row in column.rows]
    return replace(column, rows=tuple(rows))


def curves_by_key(runs: Sequence[Mapping[str, Any]]) -> dict[str, Curves]:
    found: dict[str, Curves] = {}
    for run in sorted(runs, key=lambda one: int(one["seed"])):
        found.setdefault(run["key"], {})[run["seed"]] = curve_of(run)
    return found


def beside_by_key(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Spread]]:
    """Key of a cell -> other numbers of its runs, over the seeds that have them."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, series in run.get("beside", {}).items():
            if (known := last_known(series)) is not None:
                values.setdefault(run["key"], {}).setdefault(name, []).append(known)
    return {
        key: {name: over for name, found in names.items() if (over := spread(found)) is not None}
        for key, names in values.items()
    }


def engines_by_key(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Key of a cell -> the engines of its runs in words, each once: "precision = bf16, compile = true"."""
    found: dict[str, set[str]] = {}
    for run in runs:
        words = ", ".join(f"{name} = {_toml(value)}" for name, value in run.get("engine", {}).items())
        found.setdefault(run["key"], set()).add(words)
    return {key: tuple(sorted(engines)) for key, engines in found.items()}


def _toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _column(table: Table, column: str, known: Known, expected: Expected, rows: Sequence[str]) -> ColumnSummary:
    cells = [cell for cell in table.cells if cell.column == column]
    measure = reference(cells)
    curves = known.curves
    fedavg = {} if measure is None else curves.get(cell_key(measure.experiment), {})
    printed = expected.get(table.name, {}).get(column, {})
    shown = [cell for cell in cells if not rows or cell.row in rows]
    keys = [cell_key(cell.experiment) for cell in shown]
    target = next((100 * cell.experiment.target for cell in shown if cell.experiment.target is not None), None)
    summaries = [
        replace(
            _row(cell.row, curves.get(key, {}), fedavg, printed.get(cell.row, {})),
            beside=known.beside.get(key, {}),
            engines=known.engines.get(key, ()),
            reached=_reached(curves.get(key, {}), target),
        )
        for cell, key in zip(shown, keys, strict=True)
    ]
    summaries = [replace(row, gain=_gain(row, summaries)) for row in summaries]
    lengths = sorted({cell.experiment.rounds for cell in shown})
    return ColumnSummary(column, tuple(lengths), tuple(summaries), target)


def _reached(curves: Curves, target: float | None) -> Spread | None:
    if target is None:
        return None
    return spread(number for curve in curves.values() if (number := first_round(curve, target)) is not None)


def _gain(row: RowSummary, rows: Sequence[RowSummary]) -> float | None:
    others = [other.last.mean for other in rows if other is not row and other.last is not None]
    return None if row.last is None or not others else row.last.mean - max(others)


def reference(cells: Sequence[Cell]) -> Cell | None:
    """The column's FedAvg: the row of that name, else the first plain FedAvg."""
    named = [cell for cell in cells if cell.row == REFERENCE]
    plain = [cell for cell in cells if method_text(cell.experiment) == REFERENCE]
    return next(iter([*named, *plain]), None)


def _row(row: str, curves: Curves, fedavg: Curves, paper: Mapping[str, Number]) -> RowSummary:
    """Speed-ups are those of each seed against the same seed's FedAvg, then averaged."""
    pairs = [(curve, fedavg[seed]) for seed, curve in curves.items() if seed in fedavg]
    ratios = [ratio for curve, measure in pairs if (ratio := rounds_ratio(curve, measure)) is not None]
    return RowSummary(
        row,
        len(curves),
        spread(best(curve) for curve in curves.values()),
        spread(last_ten(curve) for curve in curves.values()),
        spread(speed_up(curve, measure) for curve, measure in pairs),
        spread(ratios),
        paper,
        final=spread(last_round(curve) for curve in curves.values()),
    )
