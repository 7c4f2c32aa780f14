import math

import pytest
import torch
from by_hand import blobs, linear, linear_model, local_view, number, scalar, scalar_model, travel_of

from fedstill.compose.combine import combine
from fedstill.core.types import Batch, Need, Output, Weights
from fedstill.local import control_variates, cross_entropy, dynamic_regularization, not_true_distillation, proximal

NOTHING = Batch(number([[0.0]]), torch.tensor([0]), number([1.0]))


def output_of(logits: torch.Tensor) -> Output:
    return Output(logits, logits)


def test_cross_entropy_is_minus_the_log_probability_of_the_label():
    logits, labels = number([[math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(8)]]), torch.tensor([0, 1])
    batch = Batch(logits, labels, number([1.0, 1.0]))
    expected = -(math.log(2 / 4) + math.log(1 / 10)) / 2
    assert cross_entropy().loss(output_of(logits), batch, local_view(scalar(0.0))).item() == pytest.approx(expected)


def test_padding_cannot_change_the_cross_entropy_or_its_gradient():
    term, real = cross_entropy(), number([[1.0, -2.0, 0.5]])
    padded = torch.cat([real, number([[300.0, -300.0, 7.0]])])
    view = local_view(scalar(0.0))
    alone = term.loss(output_of(real), Batch(real, torch.tensor([2]), number([1.0])), view)
    leaf = padded.clone().requires_grad_()
    together = term.loss(output_of(leaf), Batch(padded, torch.tensor([2, 1]), number([1.0, 0.0])), view)
    assert together.item() == alone.item()
    assert torch.autograd.grad(together, leaf)[0][1].abs().max() == 0


def test_soft_targets_that_are_one_hot_equal_class_indices():
    data = blobs(0, 6)
    logits = data.x @ torch.ones(4, 3, dtype=torch.float64)
    hard = cross_entropy().loss(output_of(logits), data, local_view(scalar(0.0)))
    soft_targets = (data.y.unsqueeze(-1) == torch.arange(3)).double()
    soft = cross_entropy().loss(output_of(logits), data._replace(y=soft_targets), local_view(scalar(0.0)))
    assert soft.item() == pytest.approx(hard.item(), abs=1e-14)


def test_the_softmax_of_half_precision_logits_is_computed_in_float32():
    logits = torch.tensor([[9.0, 1.0, 0.0]], dtype=torch.bfloat16)
    batch = Batch(logits, torch.tensor([0]), torch.ones(1))
    loss = cross_entropy().loss(output_of(logits), batch, local_view(scalar(0.0)))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log1p(math.exp(-8) + math.exp(-9)), rel=1e-4)


def descend(term, start: float, steps: int, lr: float) -> list[float]:
    """Gradient descent on w^2 / 2 + term."""
    w, path = number(start), []
    for _ in range(steps):
        w = w.detach().requires_grad_()
        view = local_view(scalar(start), params={"w": w})
        (gradient,) = torch.autograd.grad(0.5 * w**2 + term.loss(output_of(w), NOTHING, view), w)
        w = w - lr * gradient
        path.append(w.item())
    return path


@pytest.mark.parametrize(("mu", "path"), [(0.5, [0.9, 0.815]), (0.0, [0.9, 0.81])])
def test_fedprox_takes_the_steps_worked_by_hand(mu, path):
    assert descend(proximal(mu), 1.0, 2, 0.1) == pytest.approx(path, abs=1e-12)


def test_an_infinite_pull_pins_the_client_at_the_start():
    mu = 1e9
    assert descend(proximal(mu), 1.0, 50, 1 / mu)[-1] == pytest.approx(1.0, abs=1e-8)


def test_the_control_term_shifts_the_gradient_by_c_minus_c_k():
    w = {"w": number(5.0).requires_grad_()}
    view = local_view(
        scalar(1.0), params=w, received={"control": {"w": number(2.0)}}, state={"control": {"w": number(-0.5)}}
    )
    loss = control_variates().loss(output_of(w["w"]), NOTHING, view)
    assert torch.autograd.grad(loss, w["w"])[0].item() == 2.5


def test_a_first_visit_has_no_correction():
    assert control_variates().init(Weights({"w": number([1.0, 2.0])}, {}))["control"]["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_option_two_recovers_a_constant_gradient_under_any_momentum(momentum):
    travel = travel_of(5, 0.1, momentum)
    if momentum:
        assert travel == pytest.approx(0.1 * 13.1441)  # the card's a(5, 0.9)
    view = local_view(
        scalar(1.0),
        params={"w": number(1.0 - 2.0 * travel)},
        received={"control": {"w": number(0.0)}},
        state={"control": {"w": number(0.0)}},
        travel=number(travel),
    )
    state, extra = control_variates("II").finish(view, {})
    assert state["control"]["w"].item() == pytest.approx(2.0)
    assert extra["control_delta"]["w"].item() == pytest.approx(2.0)


def test_option_two_subtracts_the_server_control():
    view = local_view(
        scalar(1.0),
        params={"w": number(0.4)},
        received={"control": {"w": number(5.0)}},
        state={"control": {"w": number(3.0)}},
        travel=number(0.2),
    )
    state, extra = control_variates("II").finish(view, {})
    assert state["control"]["w"].item() == pytest.approx(3.0 - 5.0 + (1.0 - 0.4) / 0.2)
    assert extra["control_delta"]["w"].item() == pytest.approx(1.0 - 3.0)


def test_a_client_that_took_no_step_keeps_its_control():
    view = local_view(
        scalar(1.0), received={"control": {"w": number(5.0)}}, state={"control": {"w": number(3.0)}}, travel=number(0.0)
    )
    state, extra = control_variates("II").finish(view, {})
    assert state["control"]["w"].item() == 3.0
    assert extra["control_delta"]["w"].item() == 0.0


def test_option_one_measures_the_gradient_at_the_received_model():
    data, start = blobs(1, 8), linear(3, 4, seed=3)
    padded = data._replace(weight=number([1.0] * 5 + [0.0] * 3))
    elsewhere = {name: leaf + 1.0 for name, leaf in start.params.items()}
    measured = control_variates("I").measure(linear_model(), padded, local_view(start, params=elsewhere))
    x, y = data.x[:5], data.y[:5]
    error = torch.softmax(x @ start.params["weight"].T, -1) - (y.unsqueeze(-1) == torch.arange(3)).double()
    torch.testing.assert_close(measured["start_gradient"]["weight"], error.T @ x / 5)
    torch.testing.assert_close(measured["start_gradient"]["bias"], error.mean(0))


def test_option_one_measures_with_the_statistics_of_the_received_model():
    def apply(weights, x, *, training=False, weight=None, seed=None):
        assert not training
        logits = torch.stack([weights.params["w"] * weights.buffers["scale"], torch.zeros((), dtype=x.dtype)])
        return output_of(logits.unsqueeze(0)), {}

    start = Weights({"w": number(0.0)}, {"scale": number(3.0)})
    model = scalar_model()
    measured = control_variates("I").measure(type(model)("scaled", model.init, apply), NOTHING, local_view(start))
    assert measured["start_gradient"]["w"].item() == pytest.approx(3.0 * (0.5 - 1.0))


def test_only_option_two_needs_plain_sgd():
    assert control_variates("II").needs == {Need.CLIENT_STATE, Need.PLAIN_SGD}
    assert control_variates("I").needs == {Need.CLIENT_STATE}


def test_the_dynamic_term_has_gradient_alpha_times_distance_minus_g():
    w = {"w": number(5.0).requires_grad_()}
    view = local_view(scalar(1.0), params=w, state={"dyn_gradient": {"w": number(0.25)}})
    loss = dynamic_regularization(0.5).loss(output_of(w["w"]), NOTHING, view)
    assert torch.autograd.grad(loss, w["w"])[0].item() == 0.5 * 4.0 - 0.25
    state, extra = dynamic_regularization(0.5).finish(view, {})
    assert state["dyn_gradient"]["w"].item() == 0.25 - 0.5 * 4.0
    assert extra == {}


def test_two_terms_with_one_teacher_run_it_once():
    both = combine(cross_entropy(), not_true_distillation(), not_true_distillation(tau=2.0))
    assert list(both.frozen) == ["start"]
