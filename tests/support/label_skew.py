"""Clients that lack classes, on softmax regression in full batches; a model that knows all classes visits one."""

from __future__ import annotations

import torch
from by_hand import F64, federate_by_hand, linear, linear_model
from own_counts import counting
from toy import furthest

from fedstill.core.types import Batch
from fedstill.methods import fedavg

CLASSES, FEATURES = 4, 4
START = linear(CLASSES, FEATURES, seed=6)


def samples_of(*counts: int, seed: int = 0) -> Batch:
    """So many samples of each class, around centres that overlap a little."""
    y = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
    noise = torch.randn(len(y), FEATURES, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return Batch(2.0 * torch.eye(CLASSES, FEATURES, dtype=F64)[y] + noise, y, torch.ones(len(y), dtype=F64))


def trained(method, data, *, start=START, rounds=1, steps=5, lr=0.2):
    history = federate_by_hand(counting(method), linear_model(), data, start, rounds=rounds, steps=steps, lr=lr)
    return history.weights[-1]


SKEWED = [samples_of(9, 5, 1, 0, seed=1), samples_of(0, 1, 7, 8, seed=2)]
KNOWING = trained(fedavg(), [samples_of(40, 40, 40, 40, seed=7)], start=linear(CLASSES, FEATURES), steps=200)
HALF = samples_of(30, 30, 0, 0, seed=8)
MISSING = samples_of(0, 0, 40, 40, seed=9)


def gap_to_fedavg(method, *, steps: int) -> float:
    return furthest(trained(method, SKEWED, steps=steps), trained(fedavg(), SKEWED, steps=steps))


def accuracy_on(data, weights) -> float:
    return (linear_model().apply(weights, data.x)[0].logits.argmax(-1) == data.y).double().mean().item()


def after_a_long_visit(method):
    """A model that knows all classes, trained on a client that lacks two of them."""
    return trained(method, [HALF], start=KNOWING, steps=150, lr=0.5)


def assert_less_is_forgotten(method) -> None:
    """Of the classes that the client lacks, compared with FedAvg."""
    assert accuracy_on(MISSING, KNOWING) > 0.75
    forgotten = accuracy_on(MISSING, after_a_long_visit(fedavg()))
    assert forgotten < 0.35
    kept = after_a_long_visit(method)
    assert accuracy_on(MISSING, kept) > forgotten + 0.1
    assert accuracy_on(HALF, kept) > 0.85
