"""Accuracy of DP-FedAvg at equal epsilon: independent noise, noise in bands, and Poisson cohorts.

    python benchmarks/bands.py [--epsilon 2 8 32] [--seeds 5] [--json FILE]
    python benchmarks/bands.py --errors    # a calculation: how much noise adds up, for three kinds of cohorts

Digits on 200 clients, 20 of them a round, 100 rounds. Clients take turns, so that each comes ten times, ten rounds
apart; with Poisson cohorts a coin decides. Each way gets the noise that its own accountant allows, and the clip that is
best for it on a seed of its own. The table has other seeds: accuracy after the last round, mean and standard error.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedstill
from fedstill.core.seeds import draw_cohort
from fedstill.privacy.accountant import Event, analytic_gaussian_multiplier, epsilon_after
from fedstill.privacy.correlated import banded_root, highest_price

CLIENTS, COHORT, ROUNDS, DELTA = 200, 20, 100, 1e-5
CLIPS = (0.1, 0.3, 1.0)
TRIAL = 100  # the seed that chooses the clip
WAYS: Mapping[str, Mapping[str, Any]] = {
    "independent, in turn": {"sampling": "cyclic", "bands": 1},
    "4 bands, in turn": {"sampling": "cyclic", "bands": 4},
    "10 bands, in turn": {"sampling": "cyclic", "bands": 10},
    "independent, Poisson": {"sampling": "poisson", "bands": 1},
}


def noise_for(epsilon: float, sampling: str) -> float:
    """Return the noise multiplier at which all rounds cost this epsilon, rounded up to three digits."""
    if sampling == "cyclic":
        multiplier = 2 * math.sqrt(ROUNDS * COHORT / CLIENTS) * analytic_gaussian_multiplier(epsilon, DELTA)
    else:
        low, high = 0.1, 2 * math.sqrt(ROUNDS) * analytic_gaussian_multiplier(epsilon, DELTA)
        while high > 1.002 * low:
            middle = math.sqrt(low * high)
            enough = epsilon_after([Event(middle / 2, ROUNDS, COHORT / CLIENTS)], DELTA) <= epsilon
            low, high = (low, middle) if enough else (middle, high)
        multiplier = high
    return math.ceil(multiplier * 1000) / 1000


def played(way: Mapping[str, Any], noise: float, clip: float, seed: int) -> tuple[float, float]:
    """Return the accuracy in percent after the last round, and the epsilon that the run states."""
    result = fedstill.run(
        fedstill.Experiment.model_validate(
            {
                "rounds": ROUNDS, "cohort": COHORT, "sampling": way["sampling"], "seed": seed, "evaluate_every": ROUNDS,
                "data": {"source": "digits"},
                "partition": {"scheme": "iid", "clients": CLIENTS},
                "model": {"name": "mlp", "hidden": [16]},
                "local": {"epochs": 2, "lr": 0.1, "batch_size": 8},
                "method": {
                    "name": "dp_fedavg", "clip": clip, "noise_multiplier": noise, "bands": way["bands"],
                },
                "privacy": {"reproducible": True, "delta": DELTA},
                "engine": {"device": "cpu"},
            }
        )
    )  # fmt: skip
    assert result.privacy is not None
    return 100 * result.history.rows[-1]["accuracy"], result.privacy.with_a_secret[0].epsilon


def measured(way: Mapping[str, Any], epsilon: float, seeds: int) -> dict[str, Any]:
    noise = noise_for(epsilon, way["sampling"])
    trials = {clip: played(way, noise, clip, TRIAL)[0] for clip in CLIPS}
    clip = max(trials, key=lambda clip: trials[clip])
    runs = [played(way, noise, clip, seed) for seed in range(seeds)]
    accuracies = [accuracy for accuracy, _ in runs]
    error = statistics.stdev(accuracies) / math.sqrt(seeds)
    spent = max(claimed for _, claimed in runs)
    return {
        "epsilon": epsilon, "spent": round(spent, 3), "noise_multiplier": noise, "clip": clip,
        "trials": {str(clip): round(value, 1) for clip, value in trials.items()},
        "accuracy": round(statistics.fmean(accuracies), 1), "error": round(error, 1),
        "seeds": [round(accuracy, 2) for accuracy in accuracies],
    }  # fmt: skip


def errors() -> dict[str, dict[int, float]]:
    """Return the error of noise summed over rounds, root mean square over all rounds, at equal epsilon.

    In units of that of independent noise with the same cohorts, by the kind of cohorts and the number of bands.
    """
    clients, rounds = np.arange(CLIENTS), range(1, ROUNDS + 1)
    kinds = {
        "in turn": [draw_cohort(clients, COHORT, seed=0, round=number, sampling="cyclic") for number in rounds],
        "random": [draw_cohort(clients, COHORT, seed=0, round=number) for number in rounds],
        "everybody": [clients] * ROUNDS,
    }
    ratios: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    for bands in (2, 4, 10):
        factor = banded_root(bands)
        whole = sum((number * np.eye(ROUNDS, k=-lag) for lag, number in enumerate(factor)), np.zeros((ROUNDS, ROUNDS)))
        added = np.tril(np.ones((ROUNDS, ROUNDS))) @ np.linalg.inv(whole) * math.hypot(*factor)
        for kind, cohorts in kinds.items():
            pays = highest_price(cohorts, CLIENTS, factor) / highest_price(cohorts, CLIENTS, (1,))
            ratios[kind][bands] = round(math.sqrt(pays * (added**2).sum() / (ROUNDS * (ROUNDS + 1) / 2)), 3)
    return ratios


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0, 32.0])
    reader.add_argument("--seeds", type=int, default=5)
    reader.add_argument("--json", default="", help="where the figures go; lines of an earlier run stay")
    reader.add_argument("--errors", action="store_true", help="play no run")
    options = reader.parse_args()
    if options.errors:
        print(json.dumps(errors(), indent=1))
        return
    logging.disable(logging.WARNING)
    path = Path(options.json) if options.json else None
    figures = json.loads(path.read_text()) if path is not None and path.exists() else {}
    for epsilon in options.epsilon:
        for name, way in WAYS.items():
            figures[f"{name}, epsilon {epsilon:g}"] = figure = measured(way, epsilon, options.seeds)
            print(f"{name}: {json.dumps(figure)}", flush=True)
            if path is not None:
                path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
