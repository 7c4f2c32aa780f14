"""Golden values of the FedCurv card: u = (2, 1, 0.5), theta = (1, -1, 3), seen from client 0 at x = 0.5."""

from importlib import import_module

import pytest
import torch
from by_hand import blobs, linear, linear_model, local_view, number, scalar, scalar_model
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.tree import rows, stack, tree_map
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Traits, Weights
from fedstill.methods.fedcurv import curvature
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
