"""Two quadratics, w^2 / 2 and 3 / 2 (w - 4)^2: the joint optimum is 3; numbers from the method card."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from by_hand import (
    blobs,
    federate_by_hand,
    linear,
    linear_model,
    number,
    quadratic,
    quadratic_data,
    round_of,
    scalar,
    scalar_model,
    uploads_of,
    with_quadratic,
)
from papers import released
from quick import first_quick
from torch.nn.functional import cross_entropy
from weighed import weighed

import fedstill
from fedstill.experiment.build import build, build_federation
from fedstill.local import control_variates
from fedstill.loop.federate import federate
from fedstill.loop.here import Here
from fedstill.methods import fedavg, scaffold
from fedstill.methods.scaffold import update_control

CLIENTS = [quadratic_data(1.0, 0.0), quadratic_data(3.0, 4.0)]


def run(
    option="II", *, clients=CLIENTS, rounds=1, steps=2, lr=0.1, weighting="uniform", global_lr=1.0, recipe=None, **how
):
    recipe = recipe or weighed(scaffold(option=option, global_lr=global_lr), weighting)
    method = with_quadratic(recipe, control_variates(option, risk=quadratic()))
    return federate_by_hand(method, scalar_model(), clients, scalar(1.0), rounds=rounds, steps=steps, lr=lr, **how)


def values(history):
    return [weights.params["w"].item() for weights in history.weights]


def server_control(state):
    return state["control"]["control"]["w"].item()


@pytest.mark.parametrize(
    ("option", "path", "controls", "control"),
    [("II", [1.67, 2.1485, 2.458465], [0.95, -7.65], -3.35), ("I", [1.67, 2.1555, 2.464375], [1.0, -9.0], -4.0)],
)
def test_scaffold_takes_the_path_worked_by_hand(option, path, controls, control):
    assert values(run(option, rounds=3)) == pytest.approx(path, abs=1e-12)
    first = run(option)
    assert [first.clients[k]["control"]["w"].item() for k in (0, 1)] == pytest.approx(controls)
    assert server_control(first.server[0]) == pytest.approx(control)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("momentum", first_quick([0.0, 0.9]))
def test_scaffold_reaches_the_joint_optimum(option, momentum):
    history = run(option, rounds=300, steps=3, lr=0.1 if momentum == 0 else 0.02, momentum=momentum)
    assert values(history)[-1] == pytest.approx(3.0, abs=1e-6)
    assert [history.clients[k]["control"]["w"].item() for k in (0, 1)] == pytest.approx([3.0, -3.0], abs=1e-5)
    assert server_control(history.server[-1]) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("option", ["I", "II"])
def test_unequal_local_work_does_not_move_the_optimum(option):
    assert values(run(option, rounds=300, steps=[1, 5]))[-1] == pytest.approx(3.0, abs=1e-6)


def test_fedavg_stops_elsewhere():
    history = federate_by_hand(
        with_quadratic(weighed(fedavg(), "uniform")), scalar_model(), CLIENTS, scalar(1.0), rounds=200, steps=2, lr=0.1
    )
    assert values(history)[-1] == pytest.approx(2.9142857, abs=1e-7)


def test_one_of_two_clients_moves_the_control_by_half():
    history = run(cohorts=[[0]])
    assert values(history) == pytest.approx([0.81])
    assert server_control(history.server[0]) == pytest.approx(0.475)


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_server_control_is_the_mean_of_all_clients_even_when_some_are_away(option):
    cohorts = [[0], [1], [0, 1], [1], [1], [0]]
    for rounds in range(1, 7):
        history = run(option, rounds=rounds, cohorts=cohorts)
        mean = sum(history.clients[k]["control"]["w"].item() for k in (0, 1)) / 2
        assert server_control(history.server[-1]) == pytest.approx(mean, abs=1e-12)


def test_with_size_weights_controls_cancel_and_the_pooled_optimum_is_reached():
    heavy = [client._replace(weight=client.weight * n) for client, n in zip(CLIENTS, (3.0, 1.0), strict=True)]
    history = run(clients=heavy, weighting="size", rounds=300)
    own = [history.clients[k]["control"]["w"].item() for k in (0, 1)]
    assert server_control(history.server[-1]) == pytest.approx(0.75 * own[0] + 0.25 * own[1], abs=1e-9)
    assert values(history)[-1] == pytest.approx(2.0, abs=1e-6)  # 3 w + 3 (w - 4) = 0


HEAVY = [client._replace(weight=client.weight * n) for client, n in zip(CLIENTS, (3.0, 1.0), strict=True)]


def test_the_released_weights_take_the_path_worked_by_hand():
    """Models by size, controls evenly: y = (0.81, 2.53), then (1.8214, 1.9166) with c - c_k = (-4.3, 4.3)."""
    history = run(clients=HEAVY, recipe=released("fedlmd", "scaffold")(), rounds=2)
    assert server_control(history.server[0]) == pytest.approx(-3.35)
    assert values(history) == pytest.approx([0.75 * 0.81 + 0.25 * 2.53, 0.75 * 1.8214 + 0.25 * 1.9166], abs=1e-12)
    alike = run(clients=HEAVY, weighting="size", rounds=2)
    assert server_control(alike.server[0]) == pytest.approx(0.75 * 0.95 - 0.25 * 7.65)


def test_the_released_weights_lead_to_the_optimum_of_the_controls_not_of_the_models():
    assert values(run(clients=HEAVY, recipe=released("fedlmd", "scaffold")(), rounds=300))[-1] == pytest.approx(3.0)


@pytest.mark.parametrize("option", ["I", "II"])
def test_partial_participation_also_reaches_the_joint_optimum(option):
    history = run(option, rounds=800, steps=2, lr=0.02, cohorts=[[t % 2] for t in range(800)])
    assert values(history)[-1] == pytest.approx(3.0, abs=1e-2)


def test_a_single_client_is_plain_gradient_descent():
    path = values(run(clients=CLIENTS[1:], rounds=4))
    w = 1.0
    for t in range(4):
        for _ in range(2):
            w -= 0.1 * 3.0 * (w - 4.0)
        assert path[t] == pytest.approx(w, abs=1e-12)


def test_the_global_rate_scales_the_move():
    assert values(run(global_lr=0.5)) == pytest.approx([1.0 + 0.5 * 0.67])


def joint_gradient(weights, data, shares):
    params = {name: leaf.clone().requires_grad_() for name, leaf in weights.params.items()}
    losses = [cross_entropy(batch.x @ params["weight"].T + params["bias"], batch.y) for batch in data]
    loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
    return max(float(g.abs().max()) for g in torch.autograd.grad(loss, list(params.values())))


@pytest.mark.parametrize("option", first_quick(["I", "II"]))
@pytest.mark.parametrize("weighting", first_quick(["uniform", "size"]))
def test_the_recipe_reaches_a_joint_optimum_of_cross_entropy_that_fedavg_misses(option, weighting):
    data, start = [blobs(k, 20 * (k + 1)) for k in range(2)], linear(3, 4)
    shares = [0.5, 0.5] if weighting == "uniform" else [1 / 3, 2 / 3]
    how = {"rounds": 150, "steps": 5, "lr": 0.3}
    ours = federate_by_hand(weighed(scaffold(option=option), weighting), linear_model(), data, start, **how)
    plain = federate_by_hand(weighed(fedavg(), weighting), linear_model(), data, start, **how)
    left = joint_gradient(ours.weights[-1], data, shares)
    halfway, stalled = (joint_gradient(plain.weights[t], data, shares) for t in (74, 149))
    assert left < 1e-6
    assert stalled == pytest.approx(halfway, rel=0.01)  # FedAvg has converged, elsewhere
    assert stalled > 1000 * left


# The server's step alone.


def control_after(deltas, sizes, *, population, weighting="uniform", control=1.0):
    uploads = uploads_of([scalar(0.0)] * len(deltas), sizes, extra={"control_delta": {"w": number(deltas)}})
    step = update_control(weighting)
    candidate, state = step.apply(
        scalar(5.0), {"control": {"w": number(control)}}, round_of(scalar(0.0), uploads, population=population)
    )
    assert candidate.params["w"].item() == 5.0
    assert step.broadcast(state) == {"control": state["control"]}
    return state["control"]["w"].item()


def test_the_control_moves_by_the_sum_of_changes_over_the_population():
    assert control_after([2.0, -6.0], [1, 9], population=8) == pytest.approx(1.0 + (2.0 - 6.0) / 8)


def test_size_weights_apply_to_controls_too():
    assert control_after([2.0, -6.0], [1, 3], population=2, weighting="size") == pytest.approx(1.0 + 0.5 - 4.5)


def test_a_client_without_samples_does_not_count_as_a_participant():
    assert control_after([2.0, float("nan")], [1, 0], population=4) == pytest.approx(1.0 + 2.0 / 4)


def test_the_first_control_is_zero():
    assert update_control().init(scalar(3.0))["control"]["w"].item() == 0.0


# What a client says about its control must agree with its move.


class OneLiar(Here):
    """Clients one of which changes its slot in round 3."""

    def __init__(self, *args, lie, **how):
        super().__init__(*args, **how)
        self.lie = lie

    def play(self, order, ids):
        uploads = super().play(order, ids)
        if order.round == 3:
            for leaf in uploads.extra["control_delta"].values():
                leaf[1] = self.lie(leaf[1])
        return uploads


def run_with_a_lie(lie, method="scaffold", **settings):
    experiment = fedstill.Experiment(
        rounds=4, cohort=4, data={"source": "digits", "unlabeled": 20}, partition={"scheme": "iid", "clients": 4},
        model={"name": "mlp", "hidden": [8]}, local={"epochs": 1, "batch_size": 40, "lr": 0.1, **settings},
        method={"name": method}, engine={"device": "cpu", "threads": 1},
    )  # fmt: skip
    return federate(replace(build(experiment, build_federation(experiment)), population=partial(OneLiar, lie=lie)))


@pytest.mark.parametrize("factor", [-4.0, -1.0, 0.0, 1.5])
def test_a_change_of_control_that_does_not_follow_from_the_move_is_refused(factor):
    (record,) = run_with_a_lie(lambda slot: factor * slot).audit
    assert (record["round"], record.get("note")) == (3, None)
    assert record["reason"] == "'control_delta' does not follow from the move that came with it"


@pytest.mark.parametrize("method", ["scaffold", "fedlmd+scaffold", "scaffold+update_noise(sigma=0.5)"])
@pytest.mark.parametrize("settings", first_quick([{}, {"momentum": 0.9, "weight_decay": 0.01}, {"part": "head"}]))
def test_an_honest_change_of_control_is_never_refused(method, settings):
    assert run_with_a_lie(lambda slot: slot, method, **settings).audit == []


def test_by_option_one_a_change_of_control_may_be_anything():
    assert run_with_a_lie(lambda slot: -slot, "scaffold(option='I')").audit == []
