"""Runs as data: who is the same run, one line a run in a JSON file, nothing lost and nothing twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from fedstill import expression
from fedstill.bench.metrics import Curve
from fedstill.config import Experiment
from fedstill.core.errors import FedstillError
from fedstill.experiment import write_whole

# What changes neither the data, nor the method, nor (but for rounding) the numbers.
NOT_THE_CELL = {"seed", "name", "engine", "checkpoint_every", "track", "target", "compare"}


class Run(TypedDict):
    """One finished run; accuracies in percent make every figure computable again."""

    key: str  # of its cell: see cell_key
    row: str
    column: str
    preset: str
    method: str
    seed: int
    rounds: int
    evaluated: int  # every so many rounds
    accuracy: list[float]
    seconds: float
    at_once: int  # runs that shared the device
    device: str
    torch: str
    fedstill: str
    date: str


def cell_key(experiment: Experiment) -> str:
    """Ten letters for all that decides a cell's numbers; the same cell in two tables is the same run.

    Values equal to a section's default are left out, so that new keys do not change old names, and so is where the
    data lie.
    """
    text = portable(experiment.model_dump(mode="json", exclude_defaults=True, exclude=NOT_THE_CELL))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def portable(table: dict[str, Any]) -> str:
    """Sections of an experiment as text; of the places of data only the last part, which is their name."""
    data = table.get("data", {})
    for place in ("source", "unlabeled"):
        if isinstance(data.get(place), str):
            data[place] = Path(data[place]).name
    return json.dumps(table, sort_keys=True)


def method_text(experiment: Experiment) -> str:
    """The algorithm as one writes it: fedprox(mu=0.1)."""
    return expression.write(experiment.algorithm.name, experiment.algorithm.options)


def curve_of(run: Mapping[str, Any]) -> Curve:
    return Curve(run["rounds"], run["evaluated"], run["accuracy"])


def read_runs(path: Path) -> list[Run]:
    """The runs of a results file; none when there is no file yet."""
    if not path.exists():
        return []
    try:
        runs: list[Run] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        missing = {key for run in runs for key in Run.__annotations__.keys() - run.keys()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise FedstillError(f"--results: '{path}' is no file of results: move it away, or name another") from None
    if missing:
        raise FedstillError(f"--results: '{path}': a run without {', '.join(sorted(missing))}: move the file away")
    return runs


def merge(*groups: Iterable[Run]) -> list[Run]:
    """One run a key and seed, the later one wins, in an order that does not depend on who finished first."""
    found = {(run["key"], run["seed"]): run for runs in groups for run in runs}
    return sorted(found.values(), key=lambda run: (run["preset"], run["column"], run["row"], run["key"], run["seed"]))


def write_runs(path: Path, paper: str, runs: Sequence[Run]) -> None:
    """A line a run, written whole: a reader or a crash never sees half of it."""
    lines = ",\n".join(json.dumps(run, ensure_ascii=False, allow_nan=False) for run in merge(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f'{{"paper": {json.dumps(paper)}, "runs": [\n{lines}\n]}}\n')


def add_run(path: Path, paper: str, run: Run) -> None:
    """Put one run into the file, beside what others have put there since."""
    write_runs(path, paper, merge(read_runs(path), [run]))
