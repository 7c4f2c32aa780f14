"""The correction of FedNTD's and FedLMD's FedNova: the gradient minus the client's own last mean gradient."""

import pytest
import torch
from by_hand import local_view, number, scalar
from papers import released

from fedstill.core.types import Batch, Need, Output

against_own_past = released("fedlmd", "against_own_past")
NOTHING = Batch(number([[0.0]]), torch.tensor([0]), number([1.0]))


def state_of(value):
    return {"own_direction": {"w": number(value)}}


def test_the_term_takes_the_last_direction_from_the_gradient():
    w = number(5.0).requires_grad_()
    view = local_view(scalar(1.0), params={"w": w}, state=state_of(0.25))
    loss = against_own_past().loss(Output(w, w), NOTHING, view)
    assert torch.autograd.grad(loss, w)[0].item() == -0.25


def test_the_direction_is_the_move_per_unit_of_travel_and_forgets_the_one_before():
    view = local_view(scalar(1.0), params={"w": number(0.4)}, state=state_of(9.0), travel=number(0.2))
    state, extra = against_own_past().finish(view, {})
    assert state["own_direction"]["w"].item() == pytest.approx((1.0 - 0.4) / 0.2)
    assert extra == {}


def test_before_the_first_visit_and_without_a_step_nothing_changes():
    assert against_own_past().init(scalar(3.0))["own_direction"]["w"].item() == 0.0
    view = local_view(scalar(1.0), state=state_of(9.0), travel=number(0.0))
    assert against_own_past().finish(view, {})[0]["own_direction"]["w"].item() == 9.0


def test_it_needs_memory_and_plain_sgd():
    assert against_own_past().needs == {Need.CLIENT_STATE, Need.PLAIN_SGD}
