"""Methods that are one method at a certain setting: 3 clients, 2 rounds, a 2-layer MLP, float64, equal to 1e-12.

Every row also says at which setting it is another method, so that a row can fail.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from running import federate

from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Dataset, Federation, Phase, Training, Weights
from fedstill.methods import build_algorithm
from fedstill.models import build_model

CLASSES, FEATURES, ROUNDS = 4, 6, 2
EQUAL, DIFFERENT = 1e-12, 1e-6
SKEWED = ((8, 3, 1, 0), (0, 2, 1, 6), (5, 0, 5, 6))  # label counts of the clients; each lacks a class or has few of it
ONE_CLASS = ((9, 0, 0, 0), (0, 0, 14, 0), (0, 5, 0, 0))
ALL_ALIKE = ((3, 3, 3, 3), (2, 2, 2, 2), (4, 4, 4, 4))
EPOCHS = Training(batch_size=4, epochs=2, lr=0.1, momentum=0.5, weight_decay=1e-3)  # 6, 6 and 8 steps
SAME_STEPS = Training(batch_size=4, steps=5, lr=0.1, momentum=0.5, weight_decay=1e-3)

either = pytest.mark.parametrize("engine", ["batched", "looped"])


class Row(NamedTuple):
    """A method, the options at which it is FedAvg, and options at which it is not."""

    method: str
    is_fedavg: dict[str, Any]
    is_not: dict[str, Any]
    training: Training = EPOCHS


ROWS = (
    Row("fedprox", {"mu": 0.0}, {"mu": 0.1}),
    Row("fedmmd", {"lam": 0.0}, {"lam": 0.1}),
    Row("fedrs", {"alpha": 1.0}, {"alpha": 0.5}),
    Row("moon", {"mu": 0.0}, {"mu": 1.0}),
    Row("kd", {"beta": 0.0}, {"beta": 1.0}),
    Row("fedntd", {"beta": 0.0}, {"beta": 1.0}),
    Row("fedntd_tf", {"beta": 0.0}, {"beta": 1.0}),
    Row("fedlmd", {"beta": 0.0}, {"beta": 1.0}),
    Row("fedlmd_tf", {"beta": 0.0}, {"beta": 1.0}),
    Row("label_smoothing", {"epsilon": 0.0}, {"epsilon": 0.1}),
    Row("fednova", {}, {}, SAME_STEPS),  # with unequal steps it is not
    Row("fedavgm", {"beta": 0.0, "server_lr": 1.0}, {"beta": 0.5, "server_lr": 1.0}),
    Row("fedopt", {"optimizer": "sgd", "server_lr": 1.0, "momentum": 0.0}, {"optimizer": "adam"}),
    Row("fedcurv", {"lam": 0.0}, {"lam": 0.1}),
    Row("feddf", {"steps": 0, "weighting": "size"}, {"steps": 5, "weighting": "size", "batch_size": 8}),
)
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method)


def samples(labels: np.ndarray, use: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = numpy_generator(seed_for(0, "equivalence", use))
    x = generator.normal(size=(len(labels), FEATURES)) + 1.5 * np.eye(CLASSES, FEATURES)[labels]
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels)


def federation(counts: tuple[tuple[int, ...], ...]) -> Federation:
    """Client k holds counts[k][c] samples of class c."""
    labels = np.concatenate([np.repeat(np.arange(CLASSES), part) for part in counts])
    names = tuple("abcd")
    train = Dataset("toy", *samples(labels, "train"), names)
    test = Dataset("toy", *samples(np.arange(20) % CLASSES, "test"), names)
    offsets = torch.tensor([0, *np.cumsum([sum(part) for part in counts])])
    return Federation(train, test, torch.arange(len(labels)), offsets, samples(np.arange(13) % CLASSES, "unlabeled")[0])


def run(method, engine: str, *, counts=SKEWED, training: Training = EPOCHS, rounds: int = ROUNDS) -> Weights:
    weights = federate(
        method=method,
        model=build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(8,), init="torch"),
        federation=federation(counts),
        training=training,
        rounds=rounds,
        cohort=len(counts),
        seed=5,
        engine=engine,
        device="cpu",
        engine_options={"precision": "float64"},
    ).weights
    assert {leaf.dtype for leaf in weights.params.values()} == {torch.float64}
    return weights


@cache
def result(method: str, engine: str, options: tuple = (), **how: Any) -> Weights:
    return run(build_algorithm(method, dict(options)), engine, **how)


def distance(found: Weights, wanted: Weights) -> float:
    assert found.params.keys() == wanted.params.keys()
    return max(float((leaf - wanted.params[name]).abs().max()) for name, leaf in found.params.items())


@every_row
@either
def test_with_its_knob_off_a_method_is_fedavg(row, engine):
    found = result(row.method, engine, tuple(row.is_fedavg.items()), training=row.training)
    assert distance(found, result("fedavg", engine, training=row.training)) <= EQUAL


@every_row
@either
def test_with_its_knob_on_a_method_is_not_fedavg(row, engine):
    found = result(row.method, engine, tuple(row.is_not.items()))
    assert distance(found, result("fedavg", engine)) > DIFFERENT


@either
@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_of_scaffold_is_uniform_fedavg_and_the_second_is_not(engine, option):
    for rounds, equal in ((1, True), (2, False)):
        ours = result("scaffold", engine, (("option", option),), rounds=rounds)
        plain = result("fedavg", engine, (("weighting", "uniform"),), rounds=rounds)
        assert (distance(ours, plain) <= EQUAL) == equal
        assert (distance(ours, plain) <= DIFFERENT) == equal


@either
@pytest.mark.parametrize("counts", [ONE_CLASS, ALL_ALIKE], ids=["only y", "none"])
@pytest.mark.parametrize(("masked", "plain"), [("fedlmd", "fedntd"), ("fedlmd_tf", "fedntd_tf")])
def test_where_no_class_but_the_samples_own_is_in_the_majority_lmd_is_ntd(masked, plain, counts, engine):
    """A client of one class has the majority {y}; as many of each class are no majority (strict >)."""
    found, wanted = (result(method, engine, counts=counts) for method in (masked, plain))
    assert distance(found, wanted) <= EQUAL
    assert distance(found, result("fedavg", engine, counts=counts)) > DIFFERENT


@either
@pytest.mark.parametrize(("masked", "plain"), [("fedlmd", "fedntd"), ("fedlmd_tf", "fedntd_tf")])
def test_where_other_classes_are_in_the_majority_lmd_is_not_ntd(masked, plain, engine):
    assert distance(result(masked, engine), result(plain, engine)) > DIFFERENT


@either
def test_a_switch_before_the_first_round_or_after_the_last_is_no_switch(engine):
    def switched(after: int) -> Weights:
        light, full = build_algorithm("fedlmd_tf"), build_algorithm("fedlmd")
        return run((Phase(light, until=after), Phase(full)), engine)

    assert distance(switched(0), result("fedlmd", engine)) <= EQUAL
    assert distance(switched(ROUNDS), result("fedlmd_tf", engine)) <= EQUAL
    between = switched(1)
    assert distance(between, result("fedlmd", engine)) > DIFFERENT
    assert distance(between, result("fedlmd_tf", engine)) > DIFFERENT
