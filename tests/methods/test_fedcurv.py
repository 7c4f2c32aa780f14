"""Golden values of the FedCurv card: u = (2, 1, 0.5), theta = (1, -1, 3), seen from client 0 at x = 0.5."""

from importlib import import_module

import pytest
import torch
from by_hand import (
    blobs,
    federate_by_hand,
    linear,
    linear_model,
    local_view,
    number,
    quadratic,
    quadratic_data,
    round_of,
    scalar,
    scalar_model,
    train_client,
    uploads_of,
    with_quadratic,
)
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Stage, Traits, Weights
from fedstill.methods import fedavg, fedcurv
from fedstill.methods.fedcurv import curvature, sum_curvature
from fedstill.models import build_model

U, THETA = (2.0, 1.0, 0.5), (1.0, -1.0, 3.0)
NOTHING = Batch(number([[0.0]]), torch.tensor([0]), number([1.0]))


def pair(u, v):
    return {"fisher": {"w": number(u)}, "fisher_weights": {"w": number(v)}}


def seen_by(client: int, w, u=U, theta=THETA) -> Local:
    sums = pair(sum(u), sum(a * b for a, b in zip(u, theta, strict=True)))
    own = pair(u[client], u[client] * theta[client])
    return local_view(scalar(0.0), params={"w": w}, received=sums, state=own)


def penalty(client: int, w, *, lam=1.0, **how):
    empty = w.new_zeros((1, 1))
    return curvature(lam).loss(Output(empty, empty), NOTHING, seen_by(client, w, **how))


def slope(client: int, at: float, **how) -> float:
    w = number(at).requires_grad_()
    return torch.autograd.grad(penalty(client, w, **how), w)[0].item()


def test_the_penalty_has_the_cards_values():
    view = seen_by(0, number(0.5))
    assert (view.received["fisher"]["w"].item(), view.received["fisher_weights"]["w"].item()) == (3.5, 2.5)
    assert penalty(0, number(0.5)).item() == pytest.approx(-0.125, abs=1e-15)  # P = 1.5, Q = 0.5
    assert slope(0, 0.5) == pytest.approx(0.5, abs=1e-15)
    assert slope(0, 1 / 3) == pytest.approx(0.0, abs=1e-15)


def test_it_is_the_sum_over_the_others_but_for_a_constant():
    """At 0.5: 1 (1.5)^2 + 0.5 (2.5)^2 = 5.375, and the constant is 1 + 0.5 9 = 5.5."""
    assert penalty(0, number(0.5)).item() == pytest.approx(5.375 - 5.5, abs=1e-15)


clients = st.lists(st.tuples(st.floats(0, 10), st.floats(-10, 10)), min_size=1, max_size=5)


@given(clients=clients, w=st.floats(-10, 10), lam=st.floats(0, 5))
def test_its_slope_pulls_towards_each_other_client_by_its_own_curvature(clients, w, lam):
    u, theta = zip(*clients, strict=True)
    wanted = 2 * lam * sum(u[j] * (w - theta[j]) for j in range(1, len(u)))
    assert slope(0, w, lam=lam, u=u, theta=theta) == pytest.approx(wanted, abs=1e-9)


def test_before_anybody_was_seen_there_is_no_penalty():
    term = curvature(1.0)
    first = term.init(Weights({"w": number([1.0, 2.0])}, {}))
    assert [first[slot]["w"].tolist() for slot in ("fisher", "fisher_weights")] == [[0.0, 0.0]] * 2
    assert penalty(0, number(0.5), u=(0.0,), theta=(0.0,)).item() == 0.0


def slopes_of(*values: float) -> Batch:
    """Samples whose loss has these gradients by w."""
    return Batch(number(list(values)), number(list(values)), torch.ones(len(values), dtype=torch.float64))


def slope_risk() -> Objective:
    def loss(output, batch, local):
        return (batch.weight * batch.x).sum() / batch.weight.sum().clamp_min(1.0) * local.params["w"]

    return Objective(loss)


def measured(fisher, batch, model=None):
    term = curvature(1.0, fisher=fisher, risk=slope_risk())
    return term.measure(model or scalar_model(), batch, local_view(scalar(7.0)))["fisher"]["w"].item()


@pytest.mark.parametrize(("fisher", "expected"), [("per_batch", 4.0), ("per_sample", 5.0)])
def test_gradients_1_and_3_have_the_cards_fisher(fisher, expected):
    assert measured(fisher, slopes_of(1.0, 3.0)) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("fisher", "expected"), [("per_batch", 4.0), ("per_sample", 5.0)])
def test_padding_does_not_count(fisher, expected):
    padded = slopes_of(1.0, 3.0, 100.0)._replace(weight=number([1.0, 1.0, 0.0]))
    assert measured(fisher, padded) == pytest.approx(expected, abs=1e-15)
    assert measured(fisher, padded._replace(weight=number([0.0, 0.0, 0.0]))) == 0.0


@pytest.mark.parametrize("entries", [1, 2, 4, 1 << 24])
def test_how_many_samples_run_at_once_changes_nothing(monkeypatch, entries):
    home = import_module("fedstill.methods.fedcurv")
    monkeypatch.setattr(home, "_ENTRIES", entries)  # one parameter: so many samples
    assert measured("per_sample", slopes_of(1.0, 2.0, 3.0, 4.0, 5.0)) == pytest.approx(11.0)


def test_a_model_that_vmap_cannot_run_is_measured_sample_by_sample():
    def apply(weights, x, **_):
        float(x.sum())  # impossible under vmap
        return Output(x.new_zeros((1, 1)), x.new_zeros((1, 1))), {}

    model = Model("stubborn", scalar_model().init, apply, traits=Traits(unbatchable="it calls float()"))
    assert measured("per_sample", slopes_of(1.0, 3.0), model) == pytest.approx(5.0)


def test_the_fisher_of_softmax_regression_is_the_mean_of_squared_errors_times_inputs():
    data, here = blobs(1, 8), linear(3, 4, seed=3)
    elsewhere = Weights({name: leaf + 1.0 for name, leaf in here.params.items()}, {})
    error = torch.softmax(data.x @ here.params["weight"].T, -1) - (data.y.unsqueeze(-1) == torch.arange(3)).double()
    each = error.unsqueeze(-1) * data.x.unsqueeze(1)  # (B, K, F)
    view = local_view(elsewhere, params=here.params)
    for fisher, weight, bias in (
        ("per_sample", each.square().mean(0), error.square().mean(0)),
        ("per_batch", each.mean(0).square(), error.mean(0).square()),
    ):
        found = curvature(1.0, fisher=fisher).measure(linear_model(), data, view)["fisher"]
        torch.testing.assert_close(found["weight"], weight)
        torch.testing.assert_close(found["bias"], bias)


@pytest.mark.parametrize("fisher", ["per_batch", "per_sample"])
def test_it_is_measured_in_eval_mode_with_the_statistics_that_training_left(fisher):
    def apply(weights, x, *, training=False, weight=None, seed=None):
        assert not training
        logits = torch.stack([weights.params["w"] * weights.buffers["scale"], torch.zeros((), dtype=x.dtype)])
        return Output(logits.unsqueeze(0), logits.unsqueeze(0)), {}

    start = Weights({"w": number(9.0)}, {"scale": number(100.0)})
    view = local_view(start, params={"w": number(0.0)}, buffers={"scale": number(3.0)})
    model = Model("scaled", scalar_model().init, apply)
    found = curvature(1.0, fisher=fisher).measure(model, NOTHING, view)["fisher"]["w"]
    assert found.item() == pytest.approx((3.0 * (0.5 - 1.0)) ** 2)


def test_a_client_keeps_its_new_pair_and_sends_the_change():
    view = local_view(scalar(0.0), params={"w": number(3.0)}, state=pair(2.0, 5.0))
    state, extra = curvature(1.0).finish(view, {"fisher": {"w": number(0.5)}})
    assert {slot: tree["w"].item() for slot, tree in state.items()} == {"fisher": 0.5, "fisher_weights": 1.5}
    assert {slot: tree["w"].item() for slot, tree in extra.items()} == {
        "fisher_delta": -1.5,
        "fisher_weights_delta": -3.5,
    }


def test_it_needs_memory_and_any_optimiser():
    assert curvature(1.0).needs == {Need.CLIENT_STATE}


@pytest.mark.parametrize("fisher", ["per_batch", "per_sample"])
@pytest.mark.parametrize("name", ["cnn", "resnet8"])
def test_many_clients_at_once_are_measured_as_one_after_the_other(monkeypatch, fisher, name):
    """Convolutions and BatchNorm statistics of two clients, padded unequally, a few samples at once."""
    model = build_model(name, input_shape=(1, 8, 8), classes=3)
    clients = tree_map(
        lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, stack([model.init(s) for s in (1, 2)])
    )
    parameters = sum(leaf[0].numel() for leaf in clients.params.values())
    monkeypatch.setattr(import_module("fedstill.methods.fedcurv"), "_ENTRIES", 3 * parameters)
    x = torch.randn(2, 5, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = Batch(x, torch.arange(10).reshape(2, 5) % 3, number([[1.0] * 5, [1.0] * 2 + [0.0] * 3]))

    def look(weights, batch):
        view = local_view(weights, params=weights.params, buffers=weights.buffers)
        return curvature(1.0, fisher=fisher).measure(model, batch, view)["fisher"]

    together = torch.func.vmap(look)(clients, batches)
    for k in range(2):
        alone = look(rows(clients, k), Batch(*(part[k] for part in batches)))
        torch.testing.assert_close(rows(together, k), alone, rtol=1e-8, atol=1e-12)
    real = Batch(*(part[1][:2] for part in batches))
    torch.testing.assert_close(rows(together, 1), look(rows(clients, 1), real), rtol=1e-8, atol=1e-12)


# Quadratics w^2 / 2 and 3 / 2 (w - 4)^2 on one weight; their Fisher is the squared slope where a client stopped.


CLIENTS = [quadratic_data(1.0, 0.0), quadratic_data(3.0, 4.0), quadratic_data(2.0, -1.0)]
DATA = [blobs(k, 8 + 4 * k) for k in range(3)]


def run(lam=0.05, *, clients=CLIENTS, rounds=1, steps=2, lr=0.1, cohorts=None):
    method = with_quadratic(fedcurv(lam=lam), curvature(lam, risk=quadratic()))
    return federate_by_hand(
        method, scalar_model(), clients, scalar(1.0), rounds=rounds, steps=steps, lr=lr, cohorts=cohorts
    )


def plain(rounds, *, clients=CLIENTS, cohorts=None):
    return federate_by_hand(
        with_quadratic(fedavg()), scalar_model(), clients, scalar(1.0), rounds=rounds, steps=2, lr=0.1, cohorts=cohorts
    )


def values(history):
    return [weights.params["w"].item() for weights in history.weights]


def sums(history, round):
    kept = history.server[round]["curvature"]
    return kept["fisher"]["w"].item(), kept["fisher_weights"]["w"].item()


def pairs(history):
    return {
        k: (state["fisher"]["w"].item(), state["fisher_weights"]["w"].item()) for k, state in history.clients.items()
    }


def test_fedcurv_takes_the_path_worked_by_hand():
    """One step of 0.1 from 1: clients reach 0.9 and 1.9, slopes there 0.9 and -6.3, so u = (0.81, 39.69)."""
    history = run(0.01, clients=CLIENTS[:2], rounds=2, steps=1)
    u, theta = (0.81, 39.69), (0.9, 1.9)
    assert sums(history, 0) == pytest.approx((sum(u), u[0] * theta[0] + u[1] * theta[1]))
    w = values(history)[0]
    assert w == pytest.approx(1.4)
    first = w - 0.1 * (w + 2 * 0.01 * u[1] * (w - theta[1]))
    second = w - 0.1 * (3.0 * (w - 4.0) + 2 * 0.01 * u[0] * (w - theta[0]))
    assert values(history)[1] == pytest.approx((first + second) / 2, abs=1e-12)


def test_the_first_round_is_fedavg_bit_for_bit():
    assert values(run(lam=5.0)) == values(plain(1))
    assert values(run(lam=0.05, rounds=2))[1] != values(plain(2))[1]


def test_one_client_alone_is_fedavg_up_to_rounding():
    """U is the sum of changes, so U - u_k may differ from 0 in the last bits of u_k."""
    history = run(lam=5.0, clients=CLIENTS[1:2], rounds=8)
    assert values(history) == pytest.approx(values(plain(8, clients=CLIENTS[1:2])), rel=1e-13)
    assert sums(history, 7) == pytest.approx(pairs(history)[0], rel=1e-13, abs=1e-13)


def test_the_sums_are_those_of_the_latest_pairs_of_all_who_were_ever_seen():
    cohorts = [[0], [1], [0, 1], [2], [2], [0]]
    for rounds in range(1, 7):
        history = run(rounds=rounds, cohorts=cohorts)
        seen = {k for cohort in cohorts[:rounds] for k in cohort}
        latest = pairs(history)
        wanted = [sum(latest[k][i] for k in seen) for i in (0, 1)]
        assert sums(history, rounds - 1) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        assert all(latest[k] == (0.0, 0.0) for k in {0, 1, 2} - seen)


def test_a_client_that_stays_away_goes_on_holding_the_others():
    """Client 1 is seen once; its pair stays in the sums, and client 0 alone is held towards where client 1 was."""
    away = [[1], [0], [0], [0]]
    history = run(rounds=4, cohorts=away)
    assert pairs(history)[1] == pytest.approx(
        tuple(a - b for a, b in zip(sums(history, 3), pairs(history)[0], strict=True))
    )
    theta = values(history)[0]
    assert abs(values(history)[3] - theta) < abs(values(plain(4, cohorts=away))[3] - theta)


@pytest.mark.parametrize(("lam", "settled"), [(0.0, 0.0), (1.0, 0.25), (1000.0, 1000.0 / 3001.0)])
def test_a_client_settles_between_its_own_optimum_and_the_others(lam, settled):
    """P = 1.5 and Q = 0.5 of the card: w^2 / 2 + lam (1.5 w^2 - w) is least at lam / (1 + 3 lam), towards 1/3."""
    objective = with_quadratic(fedcurv(lam=lam), curvature(lam, risk=quadratic())).objective
    sums = {"fisher": {"w": number(3.5)}, "fisher_weights": {"w": number(2.5)}}
    own = {"fisher": {"w": number(2.0)}, "fisher_weights": {"w": number(2.0)}}
    weights, _, _, _ = train_client(
        objective,
        scalar_model(),
        scalar(1.0),
        CLIENTS[0],
        received=sums,
        state=own,
        steps=60,
        lr=0.5 / (1.0 + 3.0 * lam),
    )
    assert weights.params["w"].item() == pytest.approx(settled, abs=1e-9)


# The server's step alone.


def extra(fisher, weights):
    return {"fisher_delta": {"w": number(fisher)}, "fisher_weights_delta": {"w": number(weights)}}


def state_after(state, fisher, weights, sizes):
    uploads = uploads_of([scalar(0.0)] * len(sizes), sizes, extra=extra(fisher, weights))
    step = sum_curvature()
    candidate, state = step.apply(scalar(5.0), state, round_of(scalar(0.0), uploads, population=9))
    assert candidate.params["w"].item() == 5.0
    assert step.broadcast(state) == state
    return state


def sums_of(state):
    return [state[slot]["w"].item() for slot in ("fisher", "fisher_weights")]


def test_the_first_sums_are_zero():
    assert sums_of(sum_curvature().init(scalar(3.0))) == [0.0, 0.0]


def test_changes_are_added_unweighted_whatever_the_sizes():
    """The card's three clients, u = (2, 1, 0.5) and theta = (1, -1, 3): U = 3.5, V = 2.5."""
    state = state_after(sum_curvature().init(scalar(3.0)), [2.0, 1.0, 0.5], [2.0, -1.0, 1.5], [1, 100, 7])
    assert sums_of(state) == pytest.approx([3.5, 2.5])
    assert sums_of(state_after(state, [-1.5], [0.25], [4])) == pytest.approx([2.0, 2.75])


def test_a_client_without_samples_does_not_count():
    state = state_after(sum_curvature().init(scalar(3.0)), [2.0, float("nan")], [1.0, float("nan")], [3, 0])
    assert sums_of(state) == [2.0, 1.0]


def test_it_stands_after_the_average_and_needs_no_client_alone():
    assert sum_curvature().stage is Stage.KEEP
    assert sum_curvature().needs == frozenset()
