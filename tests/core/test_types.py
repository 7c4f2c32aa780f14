from __future__ import annotations

import dataclasses

import pytest
import torch

from fedstill.compose.combine import on_the_way
from fedstill.core.types import (
    Dataset,
    Federation,
    Local,
    Method,
    Model,
    Objective,
    Round,
    ServerStep,
    Training,
    Uploads,
    Weights,
)


def silent_objective() -> Objective:
    return Objective(lambda output, batch, local: output.logits.sum())


@pytest.mark.parametrize("kind", [Model, Objective, Training, Round, ServerStep, Method, Dataset, Federation])
def test_nothing_of_a_method_or_a_run_can_be_changed_in_place(kind):
    assert dataclasses.fields(kind)
    assert kind.__dataclass_params__.frozen


def test_an_objective_that_says_only_its_loss_keeps_and_sends_nothing():
    objective = silent_objective()
    local = Local(*[None] * len(Local._fields))
    assert objective.init({"w": torch.ones(2)}) == {}
    assert objective.finish(local, {}) == ({}, {})
    assert objective.measure is None
    assert objective.frozen == {}
    assert objective.frozen is not silent_objective().frozen


def test_a_server_step_that_says_nothing_passes_the_candidate_and_its_state_through():
    candidate, state = Weights({"w": torch.ones(1)}, {}), {"kept": torch.ones(1)}
    step = ServerStep("nothing")
    assert step.apply(candidate, state, None) == (candidate, state)
    assert step.init(candidate) == {}
    assert step.broadcast(state) == {}


def test_without_a_transmission_uploads_arrive_as_they_were_sent():
    uploads = Uploads(*[None] * len(Uploads._fields))
    assert on_the_way(Method(silent_objective(), ServerStep("nothing")), uploads, None, 0) is uploads


def test_a_federation_counts_its_clients_also_those_without_data():
    data = Dataset("none", torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), ("a",))
    assert Federation(data, data, torch.arange(3), torch.tensor([0, 2, 2, 3])).population == 3
