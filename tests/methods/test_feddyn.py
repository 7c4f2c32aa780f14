"""The quadratics of the SCAFFOLD card; local problems are solved exactly, as FedDyn's theory asks."""

import pytest
from by_hand import (
    federate_by_hand,
    number,
    quadratic_data,
    round_of,
    scalar,
    scalar_model,
    train_client,
    uploads_of,
    with_quadratic,
)
from weighed import weighed

from fedstill.compose.combine import combine
from fedstill.local import dynamic_regularization, proximal
from fedstill.methods import feddyn
from fedstill.methods.feddyn import dynamic_correction

CLIENTS = [quadratic_data(1.0, 0.0), quadratic_data(3.0, 4.0)]
EXACT = {"steps": 60, "lr": 0.3}  # contraction 0.55 and 0.05 a step
ROUGH = {"steps": 15, "lr": 0.3}  # the fixed point does not ask for exact solves


def run(rounds, alpha=0.5, *, clients=CLIENTS, start=1.0, weighting="uniform", cohorts=None, **how):
    method = with_quadratic(weighed(feddyn(alpha=alpha), weighting), dynamic_regularization(alpha))
    return federate_by_hand(
        method, scalar_model(), clients, scalar(start), rounds=rounds, cohorts=cohorts, **(how or EXACT)
    )


def values(history):
    return [weights.params["w"].item() for weights in history.weights]


def own_gradients(history):
    return [history.clients[k]["dyn_gradient"]["w"].item() for k in sorted(history.clients)]


def server_mean(history):
    return history.server[-1]["dyn"]["dyn_mean"]["w"].item()


def test_feddyn_takes_the_path_worked_by_hand():
    first = run(1)
    assert own_gradients(first) == pytest.approx([1 / 3, -9 / 7])
    assert server_mean(first) == pytest.approx(-10 / 21)
    assert values(run(2)) == pytest.approx([61 / 21, 19 / 7])


def test_one_of_two_clients_lands_where_the_card_says():
    history = run(1, cohorts=[[0]])
    assert server_mean(history) == pytest.approx(1 / 6)
    assert values(history) == pytest.approx([0.0], abs=1e-12)


def test_feddyn_reaches_the_joint_optimum_with_the_gradients_there():
    history = run(60, **ROUGH)
    assert values(history)[-1] == pytest.approx(3.0, abs=1e-6)
    assert own_gradients(history) == pytest.approx([3.0, -3.0], abs=1e-6)
    assert server_mean(history) == pytest.approx(0.0, abs=1e-6)


def test_alternating_single_clients_reach_the_joint_optimum():
    history = run(100, cohorts=[[t % 2] for t in range(100)], **ROUGH)
    assert values(history)[-1] == pytest.approx(3.0, abs=1e-6)


def test_h_is_the_mean_of_all_clients_gradients_even_when_some_are_away():
    cohorts = [[0], [1], [0, 1], [1], [1]]
    for rounds in range(1, 6):
        history = run(rounds, cohorts=cohorts)
        assert server_mean(history) == pytest.approx(sum(own_gradients(history)) / 2, abs=1e-12)


def test_after_an_exact_solve_the_state_is_the_gradient_at_the_local_model():
    objective = with_quadratic(feddyn(), dynamic_regularization(0.5)).objective
    state = {"dyn_gradient": {"w": number(0.7)}}
    weights, state, _, _ = train_client(
        objective, scalar_model(), scalar(1.0), CLIENTS[1], received={}, state=state, **EXACT
    )
    assert state["dyn_gradient"]["w"].item() == pytest.approx(3.0 * (weights.params["w"].item() - 4.0))


def test_a_stationary_point_is_kept():
    method = with_quadratic(feddyn(alpha=0.5), dynamic_regularization(0.5))
    for client, gradient in zip(CLIENTS, (3.0, -3.0), strict=True):
        state = {"dyn_gradient": {"w": number(gradient)}}
        weights, after, _, _ = train_client(
            method.objective, scalar_model(), scalar(3.0), client, received={}, state=state, steps=5, lr=0.1
        )
        assert weights.params["w"].item() == 3.0
        assert after["dyn_gradient"]["w"].item() == gradient


def test_the_first_local_problem_is_fedprox_with_mu_alpha():
    dyn = with_quadratic(feddyn(alpha=0.5), dynamic_regularization(0.5)).objective
    prox = combine(with_quadratic(feddyn()).objective, proximal(0.5))
    how = {"received": {}, "steps": 7, "lr": 0.1}
    ours = train_client(dyn, scalar_model(), scalar(1.0), CLIENTS[1], state=dyn.init(scalar(1.0)), **how)[0]
    other = train_client(prox, scalar_model(), scalar(1.0), CLIENTS[1], state={}, **how)[0]
    assert ours.params["w"].item() == other.params["w"].item()


def test_size_weights_lead_to_the_pooled_optimum():
    heavy = [client._replace(weight=client.weight * n) for client, n in zip(CLIENTS, (3.0, 1.0), strict=True)]
    assert values(run(80, clients=heavy, weighting="size", **ROUGH))[-1] == pytest.approx(2.0, abs=1e-6)


def test_feddyn_with_one_of_two_clients_lands_where_the_card_says():
    step = dynamic_correction(0.5)
    this = round_of(scalar(1.0), uploads_of([scalar(1 / 3)], [1]), population=2)
    moved, state = step.apply(scalar(1 / 3), step.init(scalar(1.0)), this)
    assert state["dyn_mean"]["w"].item() == pytest.approx(1 / 6)
    assert moved.params["w"].item() == pytest.approx(0.0, abs=1e-15)
