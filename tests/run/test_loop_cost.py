"""The loop's own cost, with an engine that does nothing but hand back tensors."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from run_helpers import CLASSES, FEATURES, LoopEngine, Trained, cross_entropy, fedavg, linear_model

from fedstill.core.types import Dataset, Federation, Objective, Output, Training, Uploads, Weights
from fedstill.rounds import federate

POPULATION, COHORT = 100_000, 1_000


class IdleEngine(LoopEngine):
    """Uploads are the start model for everybody; `spent` is the time in the engine, `ends` when a round was over."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.spent, self.ends = 0.0, []

    def train(self, objective, training, start, *, received, states, ids, round, seed):
        began = time.perf_counter()
        count = len(ids)
        weights = Weights(*({k: v.expand(count, *v.shape).clone() for k, v in part.items()} for part in start))
        one = torch.ones(count)
        uploads = Uploads(weights, one.double(), one, one, one, {}, None, torch.from_numpy(np.asarray(ids)))
        self.spent += time.perf_counter() - began
        return Trained(uploads, {k: v + 1 for k, v in states.items()})

    def outputs(self, weights, x, stacked=False):
        began = time.perf_counter()
        self.ends.append(began)
        output = Output(torch.zeros(len(x), CLASSES), x)
        self.spent += time.perf_counter() - began
        return output


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
    rounds = 30
    federate(
        algorithm=fedavg(objective=objective), model=model, federation=federation, training=Training(), engine=engine,
        rounds=rounds, cohort=COHORT,
    )  # fmt: skip
    lengths = np.diff(engine.ends)
    assert np.median(lengths) - engine.spent / rounds < 0.006  # about 1.5 ms on an idle core; the target is 3 ms
    assert np.median(lengths[-10:]) < 2 * np.median(lengths[:10]) + 0.001
