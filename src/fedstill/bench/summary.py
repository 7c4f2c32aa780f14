"""Summarise finished runs as a table of the paper: our mean and spread over seeds, the paper's figures, differences."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fedstill.bench.recipe import Cell, Expected, Number, Table
from fedstill.bench.results import Curve, Records, Run, curve_of, method_text

LAST = 10  # evaluated rounds


class Spread(NamedTuple):
    """Mean over seeds and sample standard deviation (n - 1); no deviation for one seed."""

    mean: float
    std: float | None
    seeds: int

    def as_json(self) -> dict[str, Any]:
        return {"mean": round(self.mean, 4), "std": _rounded(self.std), "seeds": self.seeds}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean and deviation over the seeds that have a value; None where none has.

    >>> spread([1.0, None, 3.0])
    Spread(mean=2.0, std=1.4142135623730951, seeds=2)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def best(curve: Curve) -> float:
    """Return the highest accuracy over rounds."""
    return max(curve.accuracy)


def last_ten(curve: Curve) -> float:
    """Return the mean accuracy of the last ten evaluated rounds."""
    return statistics.fmean(curve.accuracy[-LAST:])


def last_round(curve: Curve) -> float:
    """Return the accuracy after the last round."""
    return curve.accuracy[-1]


def last_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the last ten values without missing ones; None where all are missing.

    >>> last_known([None, 80.0, 90.0])
    85.0
    """
    known = [value for value in values[-LAST:] if value is not None]
    return statistics.fmean(known) if known else None


def first_round(curve: Curve, target: float) -> int | None:
    """Return the first evaluated round with at least the target accuracy; None when it is never reached."""
    pairs = zip(curve.at, curve.accuracy, strict=True)
    return next((number for number, accuracy in pairs if accuracy >= target), None)


def speed_up(curve: Curve, fedavg: Curve) -> float:
    """Return T / r: all rounds over the first round r that reaches FedAvg's best accuracy; 1 if none does.

    FedLMD prints these speed-ups. FedAvg is the measure, so its speed-up is 1 by definition.
    """
    if curve is fedavg:
        return 1.0
    reached = first_round(curve, best(fedavg))
    return 1.0 if reached is None else curve.rounds / reached


def rounds_ratio(curve: Curve, fedavg: Curve) -> float | None:
    """Return the round of FedAvg's best accuracy over the round in which this curve reaches it; None if never."""
    needed, reached = first_round(fedavg, best(fedavg)), first_round(curve, best(fedavg))
    return None if needed is None or reached is None else needed / reached


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
    gain: float | None = None  # mean of the last ten less that of the best other row of the column
    beside: Mapping[str, Spread] = field(default_factory=dict)  # other numbers, means of the last ten rounds
    reached: Spread | None = None  # first round with the column's target accuracy, over the seeds that reach it
    engines: Mapping[str, int] = field(default_factory=dict)  # in words -> seeds that were run so; "": the default

    @property
    def figure(self) -> float | None:
        """Return the accuracy that the paper prints."""
        value = self.paper.get("best", self.paper.get("last"))
        return None if isinstance(value, str) else value

    def above(self, ours: Spread | None) -> float | None:
        """Return our accuracy less the paper's; None where they are not of the same rounds."""
        return None if ours is None or self.figure is None or not self.comparable else ours.mean - self.figure

    def as_json(self) -> dict[str, Any]:
        numbers = {"best": self.best, "last_ten": self.last, "last_round": self.final}
        times = {"speedup": self.speedup, "rounds_ratio": self.ratio, "rounds_to_target": self.reached}
        ours = {name: None if value is None else value.as_json() for name, value in {**numbers, **times}.items()}
        difference = {name: _rounded(self.above(value)) for name, value in numbers.items()}
        beside = {name: value.as_json() for name, value in self.beside.items()}
        paper = {"gain": _rounded(self.gain), "beside": beside, "paper": dict(self.paper), "difference": difference}
        return {"row": self.row, "seeds": self.seeds, **ours, **paper, "engines": list(self.engines)}


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


def summarize_table(
    table: Table,
    runs: Sequence[Run],
    expected: Expected,
    *,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    printed: Table | None = None,
) -> list[ColumnSummary]:
    """Return our numbers and the paper's for columns and rows of a table (default: all), in the table's order.

    printed: the table as the recipe has it, where the command line has changed its settings.
    """
    known = Records(runs)
    rounds = {(cell.column, cell.row): cell.experiment.rounds for cell in (printed or table).cells}
    summaries = []
    for column in (column for column in table.columns if not columns or column in columns):
        cells = [cell for cell in table.cells if cell.column == column]
        shown = [cell for cell in cells if not rows or cell.row in rows]
        target = next((100 * cell.experiment.target for cell in shown if cell.experiment.target is not None), None)
        measure = reference(cells)
        fedavg = {} if measure is None else known.of(measure.experiment)
        figures = expected.get(table.name, {}).get(column, {})
        methods = [
            replace(
                _row(cell.row, known.of(cell.experiment), fedavg, figures.get(cell.row, {}), target),
                comparable=rounds.get((column, cell.row)) == cell.experiment.rounds,
            )
            for cell in cells
        ]
        kept = [replace(row, gain=_gain(row, methods)) for row in methods if not rows or row.row in rows]
        lengths = sorted({cell.experiment.rounds for cell in shown})
        summaries.append(ColumnSummary(column, tuple(lengths), tuple(kept), target))
    return summaries


def reference(cells: Sequence[Cell]) -> Cell | None:
    """Return the column's FedAvg: the row of that name, else the first plain FedAvg."""
    named = [cell for cell in cells if cell.row == REFERENCE]
    plain = [cell for cell in cells if method_text(cell.experiment) == REFERENCE]
    return next(iter([*named, *plain]), None)


def _row(
    row: str, runs: Mapping[int, Run], fedavg: Mapping[int, Run], paper: Mapping[str, Number], target: float | None
) -> RowSummary:
    """Summarise one row; a speed-up compares a seed with the same seed's FedAvg, and the mean is over seeds."""
    by_seed = {seed: curve_of(run) for seed, run in runs.items()}
    measures = {seed: by_seed[seed] if run is runs.get(seed) else curve_of(run) for seed, run in fedavg.items()}
    pairs = [(curve, measures[seed]) for seed, curve in by_seed.items() if seed in measures]
    curves = by_seed.values()
    logged = dict.fromkeys(name for run in runs.values() for name in run.get("beside", {}))
    beside = {name: spread(last_known(run.get("beside", {}).get(name, ())) for run in runs.values()) for name in logged}
    return RowSummary(
        row,
        len(runs),
        best=spread(map(best, curves)),
        last=spread(map(last_ten, curves)),
        speedup=spread(speed_up(curve, measure) for curve, measure in pairs),
        ratio=spread(rounds_ratio(curve, measure) for curve, measure in pairs),
        paper=paper,
        final=spread(map(last_round, curves)),
        beside={name: over for name, over in beside.items() if over is not None},
        reached=None if target is None else spread(first_round(curve, target) for curve in curves),
        engines=dict(sorted(Counter(map(_engine_in_words, runs.values())).items())),
    )


def _engine_in_words(run: Run) -> str:
    """Return a run's engine in words, such as: precision = bf16, compile = true; an empty text for the default."""
    engine = run.get("engine", {}).items()
    return ", ".join(f"{name} = {value if isinstance(value, str) else json.dumps(value)}" for name, value in engine)


def _gain(row: RowSummary, rows: Sequence[RowSummary]) -> float | None:
    others = [other.last.mean for other in rows if other is not row and other.last is not None]
    return None if row.last is None or not others else row.last.mean - max(others)
