"""The cards' numbers: start 1, average 0.6 (move -0.4), tau 1e-3, learning rate 0.1 unless said."""

import pytest
import torch
from by_hand import number, round_of, scalar, uploads_of

from fedstill.core.types import Weights
from fedstill.server import adam, adaptive, sgd


def step_through(step, start: float, candidates: list[float], state=None):
    """-> [(w, state)] of one round per candidate; each round starts where the last ended."""
    weights, path = scalar(start), []
    state = step.init(weights) if state is None else state
    for candidate in candidates:
        this = round_of(weights, uploads_of([scalar(candidate)], [1]))
        weights, state = step.apply(scalar(candidate), state, this)
        path.append((weights.params["w"].item(), state))
    return path


def test_momentum_gives_the_cards_values():
    (first, state1), (second, state2) = step_through(sgd(1.0, momentum=0.9), 1.0, [0.6, 0.3])
    assert (first, state1["velocity"]["w"].item()) == pytest.approx((0.6, 0.4))
    assert (second, state2["velocity"]["w"].item()) == pytest.approx((-0.06, 0.66))


def test_momentum_gives_the_other_cards_values():
    (first, state1), (second, state2) = step_through(sgd(1.0, momentum=0.7), 1.0, [0.5, 0.4])
    assert (first, state1["velocity"]["w"].item()) == pytest.approx((0.5, 0.5))
    assert (second, state2["velocity"]["w"].item()) == pytest.approx((0.05, 0.45))


@pytest.mark.parametrize(("lr", "momentum"), [(0.5, 0.0), (0.1, 0.9), (1.0, 0.5)])
def test_server_sgd_is_torch_sgd_on_the_pseudo_gradient(lr, momentum):
    w = torch.nn.Parameter(number(1.0))
    optimizer = torch.optim.SGD([w], lr=lr, momentum=momentum)
    candidates = [0.6, 0.3, 0.9, -0.2]
    for candidate, (ours, _) in zip(candidates, step_through(sgd(lr, momentum=momentum), 1.0, candidates), strict=True):
        w.grad = w.detach() - candidate
        optimizer.step()
        assert ours == pytest.approx(w.item(), abs=1e-12)


def test_rate_one_without_momentum_returns_the_candidate_bit_for_bit():
    generator = torch.Generator().manual_seed(1)
    start, candidate = (Weights({"w": torch.randn(100, generator=generator)}, {}) for _ in range(2))
    this = round_of(start, uploads_of([candidate], [1]))
    moved, state = sgd(1.0).apply(candidate, sgd(1.0).init(start), this)
    assert torch.equal(moved.params["w"], candidate.params["w"])
    assert state == {}


@pytest.mark.parametrize(
    ("rule", "beta1", "second", "w"),
    [
        ("adagrad", 0.0, 0.160001, 0.9002497),
        ("adagrad", 0.9, 0.160001, 0.9900250),
        ("yogi", 0.9, 0.001601, 0.9024688),
        ("adam", 0.9, 0.00160099, 0.9024685),
    ],
)
def test_adaptive_steps_give_the_cards_values(rule, beta1, second, w):
    ((moved, state),) = step_through(adaptive(rule, lr=0.1, beta1=beta1), 1.0, [0.6])
    assert moved == pytest.approx(w, abs=5e-8)
    assert state["second"]["w"].item() == pytest.approx(second, abs=1e-12)


@pytest.mark.parametrize(("rule", "second"), [("yogi", 0.9984), ("adam", 0.9916)])
def test_a_second_moment_of_one_falls_as_the_card_says(rule, second):
    state = {"momentum": {"w": number(0.0)}, "second": {"w": number(1.0)}}
    ((_, after),) = step_through(adaptive(rule, lr=0.1), 1.0, [0.6], state)
    assert after["second"]["w"].item() == pytest.approx(second, abs=1e-12)


def test_torch_adam_moves_one_coordinate_by_its_rate():
    ((moved, _),) = step_through(adam(0.1), 1.0, [0.6])
    assert moved == pytest.approx(0.9, abs=1e-7)


def test_server_adam_is_torch_adam_on_the_pseudo_gradient():
    w = torch.nn.Parameter(number(1.0))
    optimizer = torch.optim.Adam([w], lr=0.1, betas=(0.8, 0.95))
    candidates = [0.6, 0.3, 0.9, -0.2]
    path = step_through(adam(0.1, beta1=0.8, beta2=0.95), 1.0, candidates)
    for candidate, (ours, _) in zip(candidates, path, strict=True):
        w.grad = w.detach() - candidate
        optimizer.step()
        assert ours == pytest.approx(w.item(), abs=1e-12)


STEPS = [
    sgd(0.5, momentum=0.9),
    adaptive("adagrad", lr=0.1),
    adaptive("yogi", lr=0.1),
    adaptive("adam", lr=0.1),
    adam(0.1),
]


@pytest.mark.parametrize("step", STEPS)
def test_no_move_and_no_momentum_leave_the_model_alone(step):
    ((moved, _),) = step_through(step, 1.0, [1.0])
    assert moved == 1.0


@pytest.mark.parametrize("step", STEPS)
def test_buffers_are_those_of_the_average_and_never_enter_the_optimiser(step):
    start = Weights({"w": number(1.0)}, {"mean": number(5.0)})
    candidate = Weights({"w": number(0.6)}, {"mean": number(6.0)})
    state = step.init(start)
    moved, after = step.apply(candidate, state, round_of(start, uploads_of([candidate], [1])))
    assert moved.buffers["mean"].item() == 6.0
    assert all("mean" not in slot for slot in after.values() if isinstance(slot, dict))


@pytest.mark.parametrize("step", STEPS)
def test_the_state_keeps_its_shape_and_the_old_one_is_not_written(step):
    state = step.init(scalar(1.0))
    before = {slot: str(value) for slot, value in state.items()}
    ((_, after),) = step_through(step, 1.0, [0.6], state)
    assert {slot: str(value) for slot, value in state.items()} == before
    assert after.keys() == state.keys()
