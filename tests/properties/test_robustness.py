"""Against 20 % of clients that send their moves backwards, robust aggregates keep what the average loses."""

from __future__ import annotations

import statistics

import pytest
from hostile import SignFlippers
from running import federate

import fedstill
from fedstill.core.types import Training
from fedstill.engine import build_engines
from fedstill.methods.lookup import build_method
from fedstill.partition import PARTITIONS

CLIENTS, HOSTILE, SCALE, SEEDS = 20, 4, 10.0, 5


def accuracy(text: str, seed: int, *, hostile: int) -> float:
    """The mean test accuracy of the last five of 30 rounds on the embedded digits, everybody taking part."""
    source = fedstill.load("digits")
    parts = PARTITIONS["lda"](source.train.y.numpy(), CLIENTS, seed=seed, alpha=1.0)
    federation = fedstill.make_federation(source, parts)
    model = fedstill.build_model("mlp", input_shape=(1, 8, 8), classes=10, hidden=(64,), init="torch")
    engines = build_engines("batched", "cpu", model=model, federation=federation)
    cohort = SignFlippers(engines.cohort, range(hostile), SCALE)
    result = federate(
        method=build_method(text),
        model=model,
        federation=federation,
        training=Training(epochs=2, batch_size=20, lr=0.1),
        rounds=30,
        cohort=CLIENTS,
        seed=seed,
        engine=cohort,
    )
    return result.history.mean_last(5)


def middle(text: str, *, hostile: int = HOSTILE) -> float:
    return statistics.median(accuracy(text, seed, hostile=hostile) for seed in range(SEEDS))


@pytest.mark.slow
def test_the_median_keeps_nine_tenths_of_the_clean_accuracy_where_fedavg_falls_apart():
    clean = middle("fedavg", hostile=0)
    assert middle("fedavg+median") >= 0.9 * clean
    assert middle("fedavg") < 0.5 * clean
