"""Honest rounds over five partitions: nobody may be refused, and hardly anybody shortened.

    python benchmarks/storm/clean.py --rounds 1000

The clients of digits differ in labels (LDA 0.05, two shards), in the number of rows (log-normal), or hardly (IID, LDA
1). Ten methods play equally many rounds of each partition, and the guard has its defaults.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch

import fedstill

METHODS = (
    "fedavg", "scaffold", "fedadam", "fednova", "feddyn", "fedlmd+scaffold", "feddf(student.steps=10)",
    "mrtf(student.steps=10)", "fedaux(student.steps=10)", "d2cfl",
)  # fmt: skip
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"scheme": "iid"},
    "lda 0.05": {"scheme": "lda", "alpha": 0.05},
    "lda 1": {"scheme": "lda", "alpha": 1.0},
    "two shards": {"scheme": "shards", "shards_per_client": 2},
    "uneven sizes": {"scheme": "feddyn", "beta": 0.3, "sigma": 0.8},
}


def audits(
    rounds: int, seed: int = 0, cases: list[tuple[str, str]] | None = None
) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield (method, partition, the guard's records) for runs that have `rounds` rounds together."""
    pairs = cases or list(itertools.product(METHODS, PARTITIONS))
    for method, partition in pairs:
        experiment = fedstill.Experiment(
            rounds=max(1, rounds // len(pairs)), cohort=10, evaluate_every=1000, seed=seed,
            data={"source": "digits", "unlabeled": 200}, partition={"clients": 40, **PARTITIONS[partition]},
            model={"name": "mlp", "hidden": [32]}, local={"epochs": 2, "batch_size": 16, "lr": 0.1},
            method={"name": method}, engine={"device": "cpu", "threads": 1},
        )  # fmt: skip
        result = fedstill.run(experiment)
        yield method, partition, result.history.audit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    refused = changed = 0
    for method, partition, records in audits(options.rounds, options.seed):
        for record in records:
            print(f"{method}, {partition}, round {record['round']}: {record['reason']}", flush=True)
        notes = sum(bool(record.get("note")) for record in records)
        refused, changed = refused + len(records) - notes, changed + notes
    print(
        f"{options.rounds} clean rounds of {len(METHODS)} methods over {len(PARTITIONS)} partitions, seed "
        f"{options.seed}: {refused} uploads refused, {changed} shortened or lowered"
    )
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
