"""The loop's own cost, with an engine that does nothing but hand back tensors."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from run_helpers import CLASSES, FEATURES, LoopEngine, cross_entropy, fedavg, linear_model
from running import federate

from fedstill.core.trainer import Trained
from fedstill.core.types import Dataset, Federation, Objective, Output, Training, Uploads, Weights

POPULATION, COHORT = 100_000, 1_000


class IdleEngine(LoopEngine):
    """Uploads are the start model for everybody; `ends` is when each round came to its evaluation."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.ends = []

    def train(self, work, ids, states):
        count = len(ids)
        weights = Weights(*({k: v.expand(count, *v.shape).clone() for k, v in part.items()} for part in work.start))
        one = torch.ones(count)
        uploads = Uploads(weights, one.double(), one, one, one, {}, None, torch.from_numpy(np.asarray(ids)))
        return Trained(uploads, {k: v + 1 for k, v in states.items()})

    def outputs(self, weights, x, stacked=False):
        self.ends.append(time.perf_counter())
        return Output(torch.zeros(len(x), CLASSES), x)


def wide_federation() -> Federation:
    names = tuple("abc")
    train = Dataset("w", torch.zeros(POPULATION, FEATURES), torch.arange(POPULATION) % CLASSES, names)
    test = Dataset("w", torch.zeros(10, FEATURES), torch.arange(10) % CLASSES, names)
    return Federation(train, test, torch.arange(POPULATION), torch.arange(POPULATION + 1))


def remembering(width: int) -> Objective:
    return Objective(cross_entropy, init=lambda _: {"memory": torch.zeros(width)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [Objective(cross_entropy), remembering(64)], ids=["no state", "64 floats a client"]
)
def test_a_round_of_a_thousand_tiny_clients_costs_the_loop_a_few_milliseconds(objective):
    federation, model = wide_federation(), linear_model()
    engine = IdleEngine(model, federation)
    federate(
        method=fedavg(objective=objective), model=model, federation=federation, training=Training(), engine=engine,
        rounds=30, cohort=COHORT,
    )  # fmt: skip
    lengths = np.diff(engine.ends)  # the shortest ones: other processes can only make a round longer
    assert lengths.min() < 0.003
    assert lengths[-10:].min() < 1.5 * lengths[:10].min() + 0.0005
