"""Quadratics of equal curvature with centres 0 and 4 and p = (0.75, 0.25): the joint optimum is 1."""

import dataclasses

import pytest
from by_hand import (
    federate_by_hand,
    number,
    quadratic_data,
    scalar,
    scalar_model,
    train_client,
    travel_of,
    with_quadratic,
)
from papers import released

from fedstill.compose.combine import combine
from fedstill.core.types import Batch, Objective
from fedstill.methods import fedavg, fednova

CLIENTS = [
    quadratic_data(1.0, 0.0)._replace(weight=number([3.0])),
    quadratic_data(1.0, 4.0)._replace(weight=number([1.0])),
]
UNEQUAL = [2, 12]


def limit(method, *, lr, momentum=0.0, steps=UNEQUAL):
    history = federate_by_hand(
        with_quadratic(method),
        scalar_model(),
        CLIENTS,
        scalar(1.5),
        rounds=round(4 / lr),
        steps=steps,
        lr=lr,
        momentum=momentum,
    )
    return history.weights[-1].params["w"].item()


@pytest.mark.parametrize(
    ("steps", "momentum", "expected"),
    [(3, 0.5, 4.25), (1, 0.7, 1.0), (5, 0.9, 13.1441), (50, 0.9, 410.4638), (9, 0.0, 9.0)],
)
def test_travel_by_steps_agrees_with_the_cards_closed_form(steps, momentum, expected):
    closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert travel_of(steps, 1.0, momentum) == pytest.approx(expected, abs=1e-4)
    assert travel_of(steps, 1.0, momentum) == pytest.approx(closed)


@pytest.mark.parametrize(("momentum", "lr"), [(0.0, 0.02), (0.5, 0.02)])
def test_unequal_steps_keep_the_optimum_of_equal_steps_where_fedavg_leans_to_the_busy_client(momentum, lr):
    assert limit(fedavg(), lr=lr, momentum=momentum, steps=[5, 5]) == pytest.approx(1.0, abs=1e-6)
    assert limit(fednova(), lr=lr, momentum=momentum) == pytest.approx(1.0, abs=0.15)
    assert limit(fedavg(), lr=lr, momentum=momentum) > 1.8


@pytest.mark.matrix
def test_what_is_left_of_the_bias_vanishes_with_the_learning_rate():
    coarse, fine = (abs(limit(fednova(), lr=lr) - 1.0) for lr in (0.04, 0.01))
    assert fine < 0.3 * coarse


def slope() -> Objective:
    """A loss with the constant gradient y."""
    return Objective(lambda output, batch, local: batch.y.sum() * local.params["w"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_under_constant_gradients_the_step_is_the_mean_gradient_times_the_mean_travel(momentum):
    clients = [Batch(number([0.0]), number([g]), number([n])) for g, n in ((2.0, 3.0), (-4.0, 1.0))]
    method = dataclasses.replace(fednova(), objective=slope())
    history = federate_by_hand(
        method, scalar_model(), clients, scalar(1.0), rounds=1, steps=[2, 7], lr=0.1, momentum=momentum
    )
    mean_travel = 0.75 * travel_of(2, 0.1, momentum) + 0.25 * travel_of(7, 0.1, momentum)
    expected = 1.0 - mean_travel * (0.75 * 2.0 + 0.25 * -4.0)
    assert history.weights[0].params["w"].item() == pytest.approx(expected, abs=1e-12)


def test_a_move_divided_by_its_travel_is_the_gradient():
    batch = Batch(number([0.0]), number([5.0]), number([1.0]))
    weights, _, _, travel = train_client(
        slope(), scalar_model(), scalar(1.0), batch, received={}, state={}, steps=6, lr=0.05, momentum=0.8
    )
    assert (1.0 - weights.params["w"].item()) / travel == pytest.approx(5.0)


def corrected(clients, *, objective=None, **how):
    recipe = released("fedlmd", "fednova")()
    method = (
        with_quadratic(recipe, released("fedlmd", "against_own_past")())
        if objective is None
        else dataclasses.replace(recipe, objective=combine(objective, released("fedlmd", "against_own_past")()))
    )
    history = federate_by_hand(method, scalar_model(), clients, scalar(1.0), **how)
    return [weights.params["w"].item() for weights in history.weights]


def test_the_released_correction_takes_the_path_worked_by_hand():
    """w^2 / 2, one step of 0.1: slopes 1, then 0.9 - 1 = -0.1, then 0.91 + 0.1 = 1.01, then 0.809 - 1.01 = -0.201."""
    path = corrected([quadratic_data(1.0, 0.0)], rounds=4, steps=1, lr=0.1)
    assert path == pytest.approx([0.9, 0.91, 0.809, 0.8291], abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_under_the_released_correction_a_constant_gradient_counts_every_second_visit(momentum):
    batch = Batch(number([0.0]), number([2.0]), number([1.0]))
    path = corrected([batch], objective=slope(), rounds=4, steps=3, lr=0.1, momentum=momentum)
    move = 2.0 * travel_of(3, 0.1, momentum)
    assert path == pytest.approx([1.0 - move, 1.0 - move, 1.0 - 2 * move, 1.0 - 2 * move], abs=1e-12)


def test_the_released_correction_spares_first_visits():
    cohorts = [[0], [1], [1]]
    how = {"rounds": 3, "steps": 2, "lr": 0.1, "cohorts": cohorts}
    ours = corrected(CLIENTS, **how)
    plain = federate_by_hand(with_quadratic(fednova()), scalar_model(), CLIENTS, scalar(1.0), **how).weights
    assert ours[:2] == [weights.params["w"].item() for weights in plain[:2]]
    assert ours[2] != plain[2].params["w"].item()


def test_the_recipe_with_the_released_correction_has_the_term_and_without_it_has_not():
    assert set(released("fedlmd", "fednova")().objective.init(scalar(1.0))) == {"own_direction"}
    assert fednova().objective.init(scalar(1.0)) == {}
