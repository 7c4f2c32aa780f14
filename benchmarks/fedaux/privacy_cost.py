"""What true privacy of FedAUX's certainty scores costs in accuracy, on data that come with the package.

    python benchmarks/fedaux/privacy_cost.py [--seeds 3] [--rounds 5] [--score probability] [--measure last]
                                             [--out privacy_cost.png] [--json FILE]
    python benchmarks/fedaux/privacy_cost.py --results docs/results/fedaux.json --auxiliary tiny

The first runs the study of the recipe's table `privacy` in small: ten clients with about one class of Fashion-MNIST
each, an MLP, unlabeled data of the same kind, no pre-training; about a minute a seed on one core. The second draws the
table `privacy` from runs of `fedstill bench fedaux --table privacy`. In both, FedAUX solves the sum of losses without a
claim, their mean without noise, and the mean with noise for an epsilon that holds (delta 1e-5, one sample of a client,
against the server), at four lambdas each. The best lambda is picked by test accuracy, which no user could do without
spending privacy on it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privacy_picture import Costs, best_lambda, epsilons_of, privacy_cost_picture

from fedstill import Experiment, run
from fedstill.experiment.build import build_federation
from fedstill.methods.lookup import write
from fedstill.report.table import align

LAMBDAS = (1e-1, 1e-2, 1e-3, 1e-4)
EPSILONS = (0.1, 1.0, 8.0)
ROWS = {"sum": "sum, no claim", "mean": "mean, no noise"} | {
    f"mean-epsilon-{epsilon:g}": f"mean, epsilon {epsilon:g}" for epsilon in reversed(EPSILONS)
}
STUDENT = {"student": {"steps": 100, "lr": 1e-3}}
SETTING = Experiment(
    name="privacy-cost",
    cohort=10,
    data={"source": "fashion-mini", "unlabeled": 2000},
    partition={"scheme": "fedaux", "clients": 10, "alpha": 0.01},
    model={"name": "mlp", "hidden": [64], "init": "paper"},
    local={"optimizer": "adam", "lr": 1e-3, "batch_size": 32},
    engine={"device": "cpu", "threads": 1},
)

Runs = dict[tuple[str, float], list[float]]  # (row, lambda) -> accuracies of the seeds
BASELINE = ("feddf", math.nan)  # has no lambda


def method(row: str, lam: float, score: str) -> str:
    """`mean-epsilon-8` as `fedaux(student.steps=100, ..., lam=0.01, form="mean", epsilon=8.0)`."""
    form, _, epsilon = row.partition("-epsilon-")
    claim = {"epsilon": float(epsilon)} if epsilon else {}
    return write("fedaux", {**STUDENT, "score": score, "lam": lam, "form": form, **claim})


def baseline() -> str:
    """FedDF that differs from FedAUX in the scores alone: its own average would be even."""
    return write("feddf", {**STUDENT, "distill_share": 0.8}) + "+average"


def study(options: argparse.Namespace) -> Runs:
    runs: Runs = {}
    for seed in range(options.seeds):
        setting = SETTING.replace(seed=seed, rounds=options.rounds, privacy={"reproducible": True})
        federation = build_federation(setting)
        cells = {(row, lam): method(row, lam, options.score) for row in ROWS for lam in LAMBDAS}
        for cell, text in {BASELINE: baseline(), **cells}.items():
            history = run(setting.replace(method=text), federation=federation).history
            accuracy = [row["accuracy"] for row in history.rows]
            runs.setdefault(cell, []).append(accuracy[-1] if options.measure == "last" else max(accuracy))
        print(f"seed {seed} done", file=sys.stderr, flush=True)
    return runs


def benched(options: argparse.Namespace) -> Runs:
    """What a results file of the bench holds of the table."""
    runs: Runs = {}
    columns = {f"{options.auxiliary}-lambda-{lam:g}": lam for lam in LAMBDAS}
    for record in json.loads(Path(options.results).read_text(encoding="utf-8"))["runs"]:
        if record["row"] in ROWS and record["column"] in columns:
            last = record["accuracy"][-1] if options.measure == "last" else max(record["accuracy"])
            runs.setdefault((record["row"], columns[record["column"]]), []).append(last / 100)
    if not runs:
        raise SystemExit(f"{options.results} has no run of table privacy with {options.auxiliary}")
    return runs


def costs_of(runs: Runs) -> Costs:
    """The lines of the picture: the mean with and without noise."""
    rows = {"mean": math.inf} | {f"mean-epsilon-{epsilon:g}": epsilon for epsilon in EPSILONS}
    return {lam: {epsilon: runs.get((row, lam), []) for row, epsilon in rows.items()} for lam in LAMBDAS}


def mean_text(seeds: Sequence[float]) -> str:
    if not seeds:
        return "-"
    spread = f" ± {100 * statistics.stdev(seeds):.1f}" if len(seeds) > 1 else ""
    return f"{100 * statistics.fmean(seeds):.1f}{spread}"


def table(runs: Runs) -> list[tuple[str, ...]]:
    lines = [("FedAUX", *(f"lambda {lam:g}" for lam in LAMBDAS), "best")]
    for row, name in ROWS.items():
        seeds = {lam: runs.get((row, lam), []) for lam in LAMBDAS}
        known = {lam: {0.0: values} for lam, values in seeds.items() if values}
        best = mean_text(seeds[best_lambda(known, 0.0)]) if known else "-"
        lines.append((name, *(mean_text(values) for values in seeds.values()), best))
    return lines


def levels_of(runs: Runs) -> dict[str, list[float]]:
    """What has no epsilon: the sum at its best lambda, and FedDF."""
    sums = {lam: {math.inf: runs.get(("sum", lam), [])} for lam in LAMBDAS}
    levels = {}
    if epsilons_of(sums):
        lam = best_lambda(sums, math.inf)
        levels["sum, no claim"] = list(sums[lam][math.inf])
    if BASELINE in runs:
        levels["FedDF, no scores"] = runs[BASELINE]
    return levels


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--score", default="probability", choices=("probability", "odds"))
    parser.add_argument("--measure", default="last", choices=("last", "best"), help="accuracy of which round")
    parser.add_argument("--results", default="", help="a results file of the bench, instead of running anything")
    parser.add_argument("--auxiliary", default="tiny", help="of the bench: the columns' first word")
    parser.add_argument("--out", default="privacy_cost.png", help="the picture; empty: none")
    parser.add_argument("--json", default="")
    return parser.parse_args(arguments)


def as_json(runs: Runs) -> list[dict[str, Any]]:
    return [
        {"row": row, "lambda": None if math.isnan(lam) else lam, "accuracy": seeds}
        for (row, lam), seeds in runs.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    runs = benched(options) if options.results else study(options)
    print(align(table(runs)))
    if BASELINE in runs:
        print(f"FedDF: {mean_text(runs[BASELINE])}")
    if options.out:
        where = f"{options.auxiliary}, table privacy" if options.results else "Fashion-MNIST, ten clients of one class"
        title = f"{where}; {max(len(seeds) for seeds in runs.values())} seeds"
        print(f"wrote {privacy_cost_picture(costs_of(runs), Path(options.out), title=title, levels=levels_of(runs))}")
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(runs), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
