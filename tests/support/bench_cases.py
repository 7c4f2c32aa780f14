"""A paper so small that its table is run in a second, and hand-made runs of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from typer.testing import CliRunner

from fedstill.bench import Cell, Recipe, Table, workers
from fedstill.bench.results import cell_key
from fedstill.bench.summary import summarize_table
from fedstill.cli import app
from fedstill.experiment.config import Experiment

RECIPE = """
from fedstill.bench import Cell, Recipe, Table
from fedstill.experiment.config import Experiment

OPTIONS = {"fedavg": {}, "fedprox": {"mu": 1.0}}


def cell(row, column, **changes):
    return Cell(row, column, Experiment.model_validate({
        "name": "tiny", "rounds": 3, "cohort": 3, "checkpoint_every": 1,
        "partition": {"scheme": "lda", "clients": 6, "alpha": 0.5}, "model": {"name": "mlp", "hidden": [8]},
        "local": {"batch_size": 20, "lr": 0.1}, "method": {"name": row, **OPTIONS.get(row, {})}, **changes,
    }))


DIGITS = tuple(cell(row, "digits") for row in OPTIONS)
MISSING = tuple(cell(row, "missing", data={"source": "owner/no-such-set"}) for row in OPTIONS)
TABLES = {
    "1": Table("1", "Accuracy", DIGITS, note="On digits."),
    "2": Table("2", "More columns", DIGITS + MISSING),
}
RECIPE = Recipe(
    "tiny",
    "A tiny paper",
    presets={"paper": "as printed", "released": "as in its code"},
    tables={"paper": TABLES, "released": {"2": TABLES["2"]}},
)
"""

EXPECTED = """
["1"."digits"]
fedavg = { best = 33.02, speedup = 1.00 }
fedprox = { best = 41.5, speedup = "failed" }
"""


def write_paper(root: Path, *, recipe: str = RECIPE, name: str = "tiny") -> Path:
    folder = root / "benchmarks" / name
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(recipe)
    (folder / "expected.toml").write_text(EXPECTED)
    return folder


def invoke(*words: str):
    return CliRunner().invoke(app, ["bench", *words])


def bench(*words: str, code: int = 0):
    outcome = invoke(*words)
    assert outcome.exit_code == code, outcome.output
    return outcome


def small(**changes) -> Experiment:
    return Experiment.model_validate({"rounds": 4, "partition": {"scheme": "iid"}, **changes})


def run_of(experiment: Experiment, accuracy, *, seed=0, **changes):
    """A run as the results file holds it."""
    record = {
        "key": cell_key(experiment), "row": experiment.method.name, "column": "digits", "preset": "paper",
        "method": experiment.method.name, "seed": seed, "rounds": experiment.rounds,
        "evaluated": experiment.evaluate_every, "accuracy": list(accuracy), "seconds": 10.0, "at_once": 1,
        "device": "cpu x86_64", "torch": "2.6.0", "fedstill": "0.1.0", "date": "2026-01-01",
    }  # fmt: skip
    return {**record, **changes}


def recipe_of(*cells: Cell) -> Recipe:
    return Recipe("tiny", "A tiny paper", {"paper": ""}, {"paper": {"1": Table("1", "Accuracy", cells)}})


def fake_runs(monkeypatch):
    """Runs that train nothing but leave the files of a run; returns the list of (method, seed) that were started."""
    seen = []

    def run(experiment, *, run_dir, **_):
        seen.append((experiment.method.name, experiment.seed))
        numbers = range(1, experiment.rounds + 1)
        rows = [
            {"round": number, "accuracy": 0.1 * number + 0.01 * experiment.seed, "seconds": 2.0} for number in numbers
        ]
        (run_dir / "config.toml").write_text(experiment.to_toml())
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (run_dir / "model").write_text("trained")
        return SimpleNamespace(history=SimpleNamespace(rows=rows), seconds=2.0 * experiment.rounds)

    monkeypatch.setattr(workers, "run", run)
    return seen


def forbid_runs(monkeypatch):
    def run(*_, **__):
        raise AssertionError("a run was started")

    monkeypatch.setattr(workers, "run", run)


# Two methods in one column, two seeds each, and the paper's figures.
FEDAVG = Cell("fedavg", "digits", small())
LMD = Cell("fedntd", "digits", small(method="fedntd"))
FIGURES = {"1": {"digits": {"fedavg": {"best": 33.02, "speedup": 1.0}, "fedntd": {"best": 50.0, "speedup": 2.47}}}}
RUNS = [
    run_of(FEDAVG.experiment, [10.0, 20.0, 30.0, 50.0], seed=0),
    run_of(FEDAVG.experiment, [10.0, 60.0, 30.0, 40.0], seed=1),
    run_of(LMD.experiment, [10.0, 50.0, 60.0, 40.0], seed=0),  # FedAvg's 50 in round 2: 4 / 2
    run_of(LMD.experiment, [10.0, 20.0, 50.0, 40.0], seed=1),  # never FedAvg's 60: 1
]


def summary_rows(runs=RUNS, expected=FIGURES, cells=(FEDAVG, LMD)):
    (column,) = summarize_table(recipe_of(*cells).tables["paper"]["1"], runs, expected)
    return {row.row: row for row in column.rows}
