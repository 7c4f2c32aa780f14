from __future__ import annotations

import itertools

import pytest
import torch

from fedstill.core.types import Training, Weights
from fedstill.engine.stack import (
    Results,
    Stack,
    View,
    allocate,
    allocate_weights,
    clip,
    layout_of,
    moment_names,
    step,
    step_by_row,
)

CLIENTS, STEPS = 3, 4
SHAPES = {"weight": (4, 5), "bias": (5,)}
TRAININGS = {
    "sgd": Training(lr=0.1),
    "momentum": Training(lr=0.1, momentum=0.9),
    "nesterov": Training(lr=0.1, momentum=0.9, nesterov=True),
    "decay": Training(lr=0.1, momentum=0.5, weight_decay=0.1),
    "adam": Training(lr=0.01, optimizer="adam", weight_decay=0.1),
    "adamw": Training(lr=0.01, optimizer="adamw", weight_decay=0.1),
}


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: draws(CLIENTS, *shape, seed=seed) for name, shape in SHAPES.items()}


def gradients_at(number: int) -> list[torch.Tensor]:
    return [draws(CLIENTS, *shape, seed=10 + number) for shape in SHAPES.values()]


def torch_optimizer(training: Training, params: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            params, lr=lr, momentum=training.momentum, nesterov=training.nesterov, weight_decay=training.weight_decay
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer]
    return kind(params, lr=lr, weight_decay=training.weight_decay)


def one_by_one(training: Training, rates: list[float]) -> list[list[torch.Tensor]]:
    """Every client with an optimiser of torch.optim of its own."""
    finished = []
    for client in range(CLIENTS):
        params = [leaf[client].clone().requires_grad_() for leaf in stacked().values()]
        optimizer = torch_optimizer(training, params, rates[client])
        for number in range(STEPS):
            for param, gradient in zip(params, gradients_at(number), strict=True):
                param.grad = gradient[client].clone()
            optimizer.step()
        finished.append([param.detach() for param in params])
    return finished


def empty_moments(training: Training, params: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[torch.zeros_like(p) for p in params] for _ in moment_names(training)]


@pytest.mark.parametrize("name", TRAININGS)
def test_one_step_of_a_stack_is_a_step_of_every_clients_own_optimiser(name):
    training = TRAININGS[name]
    params, count = list(stacked().values()), torch.zeros(())
    moments = empty_moments(training, params)
    for number in range(STEPS):
        step(training, params, gradients_at(number), moments, count, training.lr)
    for client, wanted in enumerate(one_by_one(training, [training.lr] * CLIENTS)):
        for leaf, alone in zip(params, wanted, strict=True):
            torch.testing.assert_close(leaf[client], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TRAININGS)
def test_every_client_may_have_a_rate_of_its_own(name):
    training, rates = TRAININGS[name], [0.001, 0.05, 0.3]
    params, count = list(stacked().values()), torch.zeros(())
    moments = empty_moments(training, params)
    for number in range(STEPS):
        step_by_row(training, params, gradients_at(number), moments, count, torch.tensor(rates))
    for client, wanted in enumerate(one_by_one(training, rates)):
        for leaf, alone in zip(params, wanted, strict=True):
            torch.testing.assert_close(leaf[client], alone, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("bound", [0.5, 5.0, 1e3])
def test_clipping_is_torchs_client_by_client(bound):
    together = clip(gradients_at(0), bound, stacked=True)
    for client in range(CLIENTS):
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
        for param, gradient in zip(params, gradients_at(0), strict=True):
            param.grad = gradient[client].clone()
        torch.nn.utils.clip_grad_norm_(params, bound)
        alone = clip([gradient[client] for gradient in gradients_at(0)], bound, stacked=False)
        for param, one, row in zip(params, alone, together, strict=True):
            torch.testing.assert_close(one, param.grad, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(row[client], param.grad, rtol=1e-6, atol=1e-7)


def test_a_huge_client_does_not_clip_the_others():
    gradients = [torch.cat([1e6 * draws(1, 4), 0.01 * draws(1, 4)])]
    clipped = clip(gradients, 1.0, stacked=True)[0]
    assert float(clipped[0].norm()) == pytest.approx(1.0, rel=1e-5)
    assert torch.equal(clipped[1], gradients[0][1])


@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), None])
def test_memory_may_lie_in_any_order_of_dimensions(order):
    tensor = allocate(torch.zeros(2, 3, 4), 5, order)
    assert tensor.shape == (5, 2, 3, 4)
    assert layout_of(tensor) == (order or (0, 1, 2))
    for client in tensor:
        assert sorted(client.stride()) == [1, *sorted(client.stride())[1:]]
        assert client.permute(*layout_of(tensor)).is_contiguous()


@pytest.mark.parametrize("name", TRAININGS)
def test_the_layout_of_the_memory_changes_nothing_but_rounding(name):
    results = []
    for layout in ({}, {"weight": (1, 0)}):
        stack = Stack(allocate_weights(start(), CLIENTS, layout), CLIENTS, TRAININGS[name])
        stack.reset(start())
        view = View(stack, CLIENTS, stacked=True)
        for number in range(STEPS):
            view.update(gradients_at(number), 0.1)
        results.append(stack.params)
    for leaf in SHAPES:
        torch.testing.assert_close(results[0][leaf], results[1][leaf], rtol=1e-6, atol=1e-6)


def start() -> Weights:
    params = {name: draws(*shape, seed=5) for name, shape in SHAPES.items()}
    return Weights(params, {"count": torch.tensor(7), "mean": draws(2, seed=6)})


@pytest.mark.parametrize("name", TRAININGS)
def test_a_reset_stack_has_forgotten_everything(name):
    stack = Stack(allocate_weights(start(), CLIENTS, {}), CLIENTS, TRAININGS[name])
    outcomes = []
    for _ in range(2):
        stack.reset(start())
        view = View(stack, CLIENTS, stacked=True)
        view.loss.add_(1.0)
        for number in range(STEPS):
            view.update(gradients_at(number), 0.1)
        outcomes.append([tensor.clone() for tensor in stack.tensors()])
    for first, second in zip(*outcomes, strict=True):
        assert torch.equal(first, second)
    assert stack.buffers["count"].tolist() == [7] * CLIENTS


@pytest.mark.parametrize("name", TRAININGS)
def test_clients_that_have_finished_keep_their_weights_while_the_others_go_on(name):
    training = TRAININGS[name]
    stack = Stack(allocate_weights(start(), CLIENTS, {}), CLIENTS, training)
    stack.reset(start())
    wide = View(stack, CLIENTS, stacked=True)
    for number in range(2):
        wide.update(gradients_at(number), training.lr)
    finished = {leaf: tensor[2].clone() for leaf, tensor in stack.params.items()}
    narrow = View(stack, 2, stacked=True)
    for number in range(2, STEPS):
        narrow.update([gradient[:2] for gradient in gradients_at(number)], training.lr)
    whole = Stack(allocate_weights(start(), CLIENTS, {}), CLIENTS, training)
    whole.reset(start())
    for number in range(STEPS):
        View(whole, CLIENTS, stacked=True).update(gradients_at(number), training.lr)
    for leaf, tensor in stack.params.items():
        assert torch.equal(tensor[2], finished[leaf])
        torch.testing.assert_close(tensor[:2], whole.params[leaf][:2], rtol=1e-6, atol=1e-7)


def test_a_view_of_one_client_has_no_client_dimension_and_shares_its_storage():
    stack = Stack(allocate_weights(start(), 1, {}), 1, TRAININGS["momentum"])
    stack.reset(start())
    view = View(stack, 1, stacked=False)
    assert view.params["weight"].shape == SHAPES["weight"]
    view.update([torch.ones(shape) for shape in SHAPES.values()], 0.5)
    torch.testing.assert_close(stack.params["bias"][0], start().params["bias"] - 0.5)


def test_results_come_back_in_the_order_of_the_cohort():
    results = Results(start(), 4, torch.zeros(()))
    results.fill(start())
    assert torch.equal(results.stacked.params["bias"][3], start().params["bias"])
    for row in range(4):
        results.stacked.params["bias"][row] = float(row)
        results.loss[row] = 10.0 * row
    order = [2, 0, 3, 1]  # the longest client was the cohort's third
    weights, loss, _ = results.ordered(order)
    for column, place in enumerate(order):
        assert float(weights.params["bias"][place, 0]) == column
        assert float(loss[place]) == 10.0 * column


def test_a_finished_client_is_copied_to_its_row_with_its_loss():
    results = Results(start(), 3, torch.zeros(()))
    results.fill(start())
    stack = Stack(allocate_weights(start(), 2, {}), 2, TRAININGS["sgd"])
    stack.reset(start())
    stack.params["bias"][1] = 9.0
    stack.loss[1] = 2.5
    results.take(stack, slice(1, 2), slice(2, 3))
    assert results.stacked.params["bias"][:, 0].tolist() == pytest.approx(
        [float(start().params["bias"][0])] * 2 + [9.0]
    )
    assert results.loss.tolist() == [0.0, 0.0, 2.5]
