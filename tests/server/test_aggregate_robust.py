"""Robust aggregates: worked numbers, a reference in NumPy, and how far a minority can move them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import round_of, uploads_of

from fedstill.core.errors import FedstillError
from fedstill.core.types import Need, Stage, Weights
from fedstill.methods.lookup import build_method
from fedstill.server import AGGREGATES, average, geometric_median, krum, median, norm_bound, trimmed_mean
from fedstill.server.aggregate import squared_distances, with_buffers

ROBUST = {
    "median": median(),
    "trimmed_mean": trimmed_mean(0.25),
    "geometric_median": geometric_median(),
    "krum": krum(f=1, m=2),
    "norm_bound": norm_bound(0.5),
}
every_aggregate = pytest.mark.parametrize("name", ROBUST)


def model_of(values, *, mean=0.0, var=1.0, count=3) -> Weights:
    params = {
        "weight": torch.tensor(values, dtype=torch.float64).reshape(-1, 1),
        "bias": torch.tensor([values[0] / 2.0]),
    }
    buffers = {
        "norm.running_mean": torch.tensor([mean]),
        "norm.running_var": torch.tensor([var]),
        "norm.num_batches_tracked": torch.tensor(count),
    }
    return Weights(params, buffers)


START = model_of([0.0, 0.0])
CLIENTS = [model_of(list(pair)) for pair in np.random.default_rng(3).normal(size=(7, 2)).tolist()]


def aggregated(step, models=CLIENTS, sizes=None) -> Weights:
    this = round_of(START, uploads_of(models, sizes or [1.0] * len(models)))
    return step.apply(START, {}, this)[0]


def weights_of(models) -> np.ndarray:
    return np.stack([np.concatenate([leaf.numpy().ravel() for leaf in model.params.values()]) for model in models])


@pytest.mark.parametrize(
    ("step", "values", "wanted"),
    [
        (median(), [5.0, 1.0, 9.0], 5.0),
        (median(), [4.0, 1.0, 2.0, 100.0], 3.0),
        (trimmed_mean(0.25), [8.0, 2.0, 4.0, -90.0], 3.0),
        (trimmed_mean(0.0), [8.0, 2.0, 5.0], 5.0),
        (krum(f=1, m=1), [1.5, 1.0, 1.1, 40.0], 1.0),  # one neighbour each: 0.16, 0.01, 0.01, ...; the smaller id
        (krum(f=0, m=2), [1.0, 2.0, 2.5, 40.0], 2.25),  # two each: 3.25, 1.25, 2.5, 2850
        (geometric_median(200), [0.0, 0.0, 7.0], 0.0),
        (norm_bound(1e9), [3.0, 9.0], 6.0),
    ],
)
def test_worked_numbers(step, values, wanted):
    start, models = Weights({"w": torch.zeros(1)}, {}), [Weights({"w": torch.tensor([value])}, {}) for value in values]
    made, _ = step.apply(start, {}, round_of(start, uploads_of(models, [1.0] * len(models))))
    assert float(made.params["w"]) == pytest.approx(wanted, abs=1e-5)


def test_a_move_beyond_the_bound_keeps_its_direction():
    far = Weights({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, {})  # of norm 5
    near = Weights({"a": torch.tensor([0.6]), "b": torch.tensor([0.0])}, {})
    start = Weights({"a": torch.zeros(1), "b": torch.zeros(1)}, {})
    made, _ = norm_bound(1.0).apply(start, {}, round_of(start, uploads_of([far, near], [1.0, 1.0])))
    assert float(made.params["a"]) == pytest.approx((0.6 + 0.6) / 2)
    assert float(made.params["b"]) == pytest.approx(0.8 / 2)


def test_against_numpy():
    each = weights_of(CLIENTS)
    ordered = np.sort(each, axis=0)
    apart = ((each[:, None] - each[None]) ** 2).sum(-1)
    scores = np.sort(apart, axis=1)[:, 1 : 1 + len(each) - 1 - 2].sum(1)
    norms = np.linalg.norm(each, axis=1, keepdims=True)
    point = each.mean(0)
    for _ in range(20):
        weight = 1.0 / np.maximum(1e-6, np.linalg.norm(each - point, axis=1))
        point = (weight[:, None] * each).sum(0) / weight.sum()
    wanted = {
        "median": np.median(each, axis=0),
        "trimmed_mean": ordered[1:-1].mean(0),
        "geometric_median": point,
        "krum": each[np.argsort(scores)[:2]].mean(0),
        "norm_bound": (each * np.minimum(1.0, 0.5 / norms)).mean(0),
    }
    for name, step in ROBUST.items():
        np.testing.assert_allclose(weights_of([aggregated(step)])[0], wanted[name], atol=1e-6, err_msg=name)
    params = uploads_of(CLIENTS, [1.0] * len(CLIENTS)).weights.params
    np.testing.assert_allclose(squared_distances(params, START.params).numpy(), apart, atol=1e-6)


@every_aggregate
def test_the_order_of_the_clients_changes_nothing(name):
    order = [4, 0, 6, 2, 5, 1, 3]
    uploads = uploads_of([CLIENTS[k] for k in order], [1.0] * 7)._replace(ids=torch.tensor(order))
    mixed, _ = ROBUST[name].apply(START, {}, round_of(START, uploads))
    np.testing.assert_allclose(weights_of([mixed]), weights_of([aggregated(ROBUST[name])]), atol=1e-12)


@every_aggregate
def test_one_client_at_a_million_moves_it_no_further_than_the_others_reach(name):
    far = [*CLIENTS[:6], model_of([1e6, -1e6], mean=1e6)]
    made = aggregated(ROBUST[name], far)
    reach = np.abs(weights_of(CLIENTS[:6])).max() + 1.0
    assert np.abs(weights_of([made])).max() < reach
    if name != "norm_bound":  # it bounds the parameters alone
        assert abs(float(made.buffers["norm.running_mean"])) < 10.0
    assert np.abs(weights_of([aggregated(average("uniform"), far)])).max() > 1e5


@pytest.mark.parametrize("step", [trimmed_mean(0.0), krum(f=1, m=7), krum(f=0, m=99), norm_bound(1e9)])
def test_with_nothing_left_out_it_is_the_uniform_average(step):
    made, plain = aggregated(step), aggregated(average("uniform"))
    np.testing.assert_allclose(weights_of([made]), weights_of([plain]), atol=1e-7)


@every_aggregate
@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_uploads_are_enough(name, count):
    made = aggregated(ROBUST[name], [model_of([0.3, 0.1])] * count)
    np.testing.assert_allclose(weights_of([made])[0], [0.3, 0.1, 0.15], atol=1e-6)
    assert made.buffers["norm.num_batches_tracked"].dtype == torch.int64


@every_aggregate
def test_clients_without_samples_do_not_count_whatever_they_send(name):
    broken = model_of([float("nan"), 1.0], mean=float("nan"))
    made = aggregated(ROBUST[name], [*CLIENTS, broken], [1.0] * 7 + [0.0])
    np.testing.assert_allclose(weights_of([made]), weights_of([aggregated(ROBUST[name])]), atol=1e-12)


@every_aggregate
@pytest.mark.parametrize("policy", ["average", "pooled", "reset", "local"])
def test_every_policy_for_batchnorm_statistics_fits_every_aggregate(name, policy):
    models = [model_of([0.1 * k, 0.2], mean=float(k), var=1.0 + k) for k in range(5)]
    made = aggregated(with_buffers(ROBUST[name], policy), models).buffers
    wanted = {"reset": (0.0, 1.0), "local": (0.0, 1.0)}.get(policy)
    if wanted:
        assert (float(made["norm.running_mean"]), float(made["norm.running_var"])) == wanted
    else:
        assert float(made["norm.running_var"]) >= 0
        assert 0.0 <= float(made["norm.running_mean"]) <= 4.0


def test_the_pooled_variance_is_that_of_all_samples_together():
    samples = [np.array([0.0, 2.0]), np.array([5.0, 9.0])]
    models = [model_of([0.0, 0.0], mean=float(x.mean()), var=float(x.var())) for x in samples]
    made = aggregated(with_buffers(average("uniform"), "pooled"), models).buffers
    assert float(made["norm.running_var"]) == pytest.approx(np.concatenate(samples).var())


def test_all_look_at_every_upload_alone_but_the_averages():
    alone = {name for name, make in AGGREGATES.items() if Need.INDIVIDUAL_UPLOADS in make().needs}
    assert alone == set(ROBUST)
    assert {make().stage for make in AGGREGATES.values()} == {Stage.AGGREGATE}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fedavg+trimmed_mean(share=0.5)", r"share=0.5.*below 0.5"),
        ("fedavg+krum(m=0)", "m of at least 1"),
        ("fedavg+norm_bound(bound=0.0)", "positive"),
        ("fedavg+geometric_median(iterations=0)", "at least 1"),
        ("fedavg+median+krum", "median and krum both make one model"),
        ("median", "write a method beside it, e.g. fedavg[+]median"),
        ("fedavg+krum(g=2)", "unknown key 'aggregate.g' for krum"),
    ],
)
def test_mistakes_are_told(text, told):
    with pytest.raises(FedstillError, match=told):
        build_method(text)


def test_a_named_aggregate_wins_over_the_methods_own():
    (phase,) = build_method("scaffold+fednova+trimmed_mean(share=0.2)")
    assert [step.name for step in phase.method.steps] == ["trimmed_mean", "control"]
    (phase,) = build_method('scaffold+average(weighting="size")')
    assert phase.method.aggregate == average("size")
