"""Run the leaderboard: every method with its defaults and the chosen compositions, five seeds each.

    python benchmarks/leaderboard/run.py                               run everything that is not recorded yet
    python benchmarks/leaderboard/run.py --methods feddf,fedadam       only these methods
    python benchmarks/leaderboard/run.py --federations defaults        only the three federations of docs/methods
    python benchmarks/leaderboard/run.py --trials --methods 'fedadam(server_lr=0.1),scaffold+d2cfl'

Each finished run is written to docs/results/leaderboard.json at once, so the script can be stopped and started again. A
record holds a digest of the experiment file and of the method's defaults: a run whose settings have changed since is
run again, and its old record is dropped. `make pages` makes the tables of docs/choosing-a-method.md, of the README and
of docs/methods from the records.

With --trials the seeds are 100, 101 and 102, and the file is docs/results/leaderboard_trials.json. Choose defaults and
compositions by trials, because a choice by the seeds of the table would look better there than it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import fedstill
from fedstill import Experiment, FedstillError
from fedstill.bench.results import cell_key
from fedstill.experiment.build import build, build_federation, load_source
from fedstill.experiment.candidates import PROVEN
from fedstill.experiment.config import MethodSection
from fedstill.experiment.run import run_built
from fedstill.methods import METHODS
from fedstill.methods.lookup import split_methods
from fedstill.storage.files import write_whole

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "results" / "leaderboard.json"
FEDERATIONS = {
    "digits_strong": "digits, Dirichlet 0.1",
    "digits_medium": "digits, Dirichlet 0.5",
    "digits_mild": "digits, Dirichlet 5",
    "fashion_strong": "fashion-mini, Dirichlet 0.05",
    "fashion_medium": "fashion-mini, Dirichlet 0.5",
    "fashion_mild": "fashion-mini, Dirichlet 5",
    "cancer": "breast cancer, IID",
    "quickstart": "quick start: fashion-mini, Dirichlet 0.05, 50 clients",
}
BOARD = tuple(FEDERATIONS)[:6]  # the six by which methods are ranked
DEFAULTS = ("digits_strong", "fashion_medium", "cancer")  # the table of methods with their defaults (docs/methods)
GROUPS = {"all": tuple(FEDERATIONS), "board": BOARD, "defaults": DEFAULTS}
COMPOSITIONS = PROVEN  # the best ten of the trials by their mean rank on the six
SEEDS = (0, 1, 2, 3, 4)
TRIALS, TRIAL_SEEDS = RESULTS.with_name("leaderboard_trials.json"), (100, 101, 102)
LAST = 3  # rounds whose mean accuracy a table shows: with five of ten skewed clients, one round alone is chance
Record = dict[str, Any]


def experiment_of(federation: str, method: str, seed: int) -> Experiment:
    """Return the experiment file of a federation with a method and a seed."""
    package = Path(fedstill.__file__).parent
    file = package / "quickstart.toml" if federation == "quickstart" else HERE / f"{federation}.toml"
    section = MethodSection.model_validate({"name": method})
    return Experiment.from_toml(file).model_copy(update={"method": section, "seed": seed})


def key_of(experiment: Experiment) -> str:
    """Return ten letters that change with the experiment file and with each option of the method, its defaults too."""
    file = experiment.model_copy(update={"method": MethodSection()})
    text = json.dumps([cell_key(file), experiment.resolved()["method"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def read_records(path: Path) -> list[Record]:
    return list(json.loads(path.read_text(encoding="utf-8"))["runs"]) if path.exists() else []


def write_records(path: Path, records: list[Record]) -> None:
    """Write one line a run, by federation, method and seed."""
    order = {name: place for place, name in enumerate((*FEDERATIONS, *METHODS))}

    def place(record: Record) -> tuple[int, int, str, int]:
        method = record["method"]
        return order[record["federation"]], order.get(method, len(order)), method, record["seed"]

    lines = ",\n".join(json.dumps(record) for record in sorted(records, key=place))
    write_whole(path, f'{{"last_rounds": {LAST}, "runs": [\n{lines}\n]}}\n')


def missing(
    records: list[Record], methods: Iterable[str], seeds: Iterable[int], federations: Iterable[str] = FEDERATIONS
) -> Iterator[tuple[str, str, int]]:
    """Yield (federation, method, seed) of each run that no record with today's settings holds; a seed's runs first.

    Compositions are run on the six federations of the board and on the quick start.
    """
    methods, federations = list(methods), list(federations)
    known = {(record["federation"], record["method"], record["seed"]): record["key"] for record in records}
    for seed in seeds:
        for federation in federations:
            for method in methods:
                run = federation, method, seed
                if federation == "cancer" and "+" in method:
                    continue
                if known.get(run) != key_of(experiment_of(*run)):
                    yield run


def write_table(folder: Path) -> None:
    """Write scikit-learn's breast cancer table, 569 rows of 30 numbers, as the file that cancer.toml names."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer(as_frame=True)
    names = bunch.target.map(dict(enumerate(bunch.target_names)))
    bunch.data.assign(diagnosis=names).to_csv(folder / "breast_cancer.csv", index=False)


def measure(experiment: Experiment, folder: Path) -> Record:
    """Run an experiment and return its accuracies in percent, or the reason for which fedstill refuses it."""
    data = experiment.data
    if data.source.endswith(".csv"):
        data = data.model_copy(update={"source": str(folder / data.source)})
    repeated = dataclasses.replace(experiment.privacy, reproducible=True)  # a record is to be repeated
    placed = experiment.model_copy(update={"data": data, "privacy": repeated})
    federation = build_federation(placed, load_source(placed))
    try:
        result = run_built(placed, build(placed, federation), pictures=False)
    except FedstillError as refused:
        return {"refused": str(refused)}
    history = result.history
    return {
        "last": round(100 * history.mean_last(1), 3),
        "last_rounds": round(100 * history.mean_last(LAST), 3),
        "seconds": round(result.seconds, 2),
        "bytes": history.bytes_up + history.bytes_down,
        "accuracy": [round(100 * row["accuracy"], 2) for row in history.rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = ",".join((*METHODS, *COMPOSITIONS))
    parser.add_argument("--methods", default=everything, help="names, with options if wanted; default: all")
    parser.add_argument("--federations", default="all", help=f"names, or one of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--trials", action="store_true", help="run with the seeds by which choices are made")
    parser.add_argument("--seeds", type=int, help="only the first so many seeds")
    chosen = parser.parse_args()
    logging.getLogger("fedstill").setLevel(logging.ERROR)  # advice on rates is for a run that somebody watches
    path, seeds = (TRIALS, TRIAL_SEEDS) if chosen.trials else (RESULTS, SEEDS)
    federations = GROUPS.get(chosen.federations) or chosen.federations.split(",")
    wanted = list(missing(read_records(path), split_methods(chosen.methods), seeds[: chosen.seeds], federations))
    print(f"{len(wanted)} runs are missing", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder))
        for federation, method, seed in wanted:
            experiment = experiment_of(federation, method, seed)
            run = {"federation": federation, "method": method, "seed": seed}
            measured = measure(experiment, Path(folder))
            versions = {"fedstill": fedstill.__version__, "torch": torch.__version__}
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            record = {**run, "key": key_of(experiment), **measured, **versions, "date": date}
            others = [old for old in read_records(path) if any(old[name] != run[name] for name in run)]
            write_records(path, [*others, record])
            figures = [measured[name] for name in ("last_rounds", "seconds", "refused") if name in measured]
            print(federation, method, f"seed {seed}:", *figures, flush=True)


if __name__ == "__main__":
    main()
