"""Accuracy of each class over the rounds, below the classes that the clients of each round hold (FedLMD, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import Sampling, cohort_size, draw_cohort
from fedstill.report.charts import Chart, heat_map, plain_names, thin
from fedstill.report.panels import Panel
from fedstill.report.panels.holdings import counts_of
from fedstill.report.runs import Run, Runs, numbers

MOST_ROUNDS, MOST_CLASSES = 60, 50
BASELINE = "fedavg"


def panel(runs: Runs) -> Panel | None:
    able = {method: run for method, each in runs.by_method.items() for run in each[:1] if by_class(run)}
    if not able:
        return None
    chosen = [next(iter(able)), *[method for method in able if method == BASELINE][:1], *list(able)[1:2]]
    shown = list(dict.fromkeys(chosen))[:2]
    run = able[shown[0]]
    count = max(len(values) for values in by_class(run).values())
    labels = plain_names(run.classes if len(run.classes) == count else map(str, range(count)), 20)
    kinds = thin(range(count), MOST_CLASSES)
    charts = []
    sentences = [f"A cell is the test accuracy of one class after one round, in the run of seed {run.seed}."]
    held = cohort_shares(run)
    if len({tuple(shares) for shares in held.values()}) > 1:  # with everybody in every round all columns are alike
        charts.append(_map(held, kinds, labels, "share (%)", "Classes of the rows that each round's clients hold"))
        sentences.append(
            "The first heat map shows which classes the clients of each round hold. A class that is faint there and "
            "turns faint below is forgotten while no client of the round has it."
        )
    for method in shown:
        values = {at: [None if v is None else 100 * v for v in row] for at, row in by_class(able[method]).items()}
        charts.append(_map(values, kinds, labels, "accuracy (%)", f"Accuracy of each class with {method}"))
    if len(shown) < len(able):
        sentences.append(f"Shown are {len(shown)} of {len(able)} methods: the best one, and FedAvg or else the second.")
    if any(len(by_class(each)) > MOST_ROUNDS for each in able.values()) or count > MOST_CLASSES:
        sentences.append(f"At most {MOST_ROUNDS} rounds and {MOST_CLASSES} classes are drawn, evenly spaced.")
    return Panel("Class by class", sentences, charts)


def by_class(run: Run) -> dict[int, list[float | None]]:
    """Return round -> the accuracy of each class."""
    return {row["round"]: values for row in run.evaluated if (values := numbers(row.get("class_accuracy")))}


def cohort_shares(run: Run) -> dict[int, list[float | None]]:
    """Return round -> the share (%) of each class in the rows of the clients that the round drew.

    Cohorts depend on the seed and the round alone, so they are drawn again here. Empty where a file is missing.
    """
    counts = counts_of(run)
    cohort, sampling = run.config.get("cohort"), run.config.get("sampling")
    if counts is None or not isinstance(cohort, (int, float)) or sampling not in get_args(Sampling):
        return {}
    clients = np.flatnonzero(counts.sum(axis=1))
    if run.files["partition.json"].get("clients") != len(counts):
        return {}
    try:
        size = min(cohort_size(cohort, len(counts)), len(clients))
    except FedstillError:
        return {}
    shares: dict[int, list[float | None]] = {}
    for row in run.evaluated:
        ids = draw_cohort(clients, size, seed=run.seed, round=row["round"], sampling=cast(Sampling, sampling))
        if len(ids) != row.get("cohort"):
            return {}  # the run drew its clients in another way
        held = counts[ids].sum(axis=0)
        shares[row["round"]] = (100 * held / max(held.sum(), 1)).tolist()
    return shares


def _map(
    values: dict[int, list[float | None]], kinds: Sequence[int], labels: list[str], value: str, title: str
) -> Chart:
    rounds = thin(sorted(values), MOST_ROUNDS)
    cells = [
        (str(at), labels[c], values[at][c]) for at in rounds for c in kinds if c < len(values[at]) and c < len(labels)
    ]
    columns, rows = [str(at) for at in rounds], [labels[c] for c in kinds]
    return heat_map(cells, columns=columns, rows=rows, x="round", y="class", value=value, title=title)
