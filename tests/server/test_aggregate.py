from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from by_hand import number, round_of, scalar, uploads_of
from hostile import SignFlippers
from running import federate

import fedstill
from fedstill.compose.combine import run_steps
from fedstill.core.errors import FedstillError
from fedstill.core.types import Method, Need, ServerStep, Stage, Training, Weights
from fedstill.engine import build_engines
from fedstill.local.terms import cross_entropy
from fedstill.methods.lookup import build_method
from fedstill.partition import PARTITIONS
from fedstill.server import (
    AGGREGATES,
    average,
    centred_clipping,
    geometric_median,
    krum,
    median,
    norm_bound,
    normalized_average,
    trimmed_mean,
)
from fedstill.server.aggregate import shares, squared_distances, with_buffers


def averaged(models, sizes, weighting="size", buffers="average"):
    step = with_buffers(average(weighting), buffers)
    return step.apply(models[0], {}, round_of(models[0], uploads_of(models, sizes)))[0]


@pytest.mark.parametrize(("weighting", "expected"), [("size", 2.5), ("uniform", 2.0)])
def test_two_scalars_average_as_worked_by_hand(weighting, expected):
    assert averaged([scalar(1.0), scalar(3.0)], [100, 300], weighting).params["w"].item() == expected


def random_models(count: int, dtype=torch.float32) -> list[Weights]:
    generator = torch.Generator().manual_seed(5)
    return [Weights({"w": torch.randn(7, 3, generator=generator).to(dtype)}, {}) for _ in range(count)]


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_one_client_comes_back_bit_for_bit(weighting):
    (model,) = random_models(1)
    result = averaged([model], [17], weighting)
    assert torch.equal(result.params["w"], model.params["w"])


def test_identical_clients_change_nothing():
    (model,) = random_models(1)
    result = averaged([model] * 7, [3, 1, 4, 1, 5, 9, 2])
    torch.testing.assert_close(result.params, model.params, rtol=1e-6, atol=1e-7)


def test_the_order_of_clients_does_not_matter():
    models, sizes = random_models(4), [4, 1, 3, 2]
    order = [2, 0, 3, 1]
    shuffled = averaged([models[i] for i in order], [sizes[i] for i in order])
    torch.testing.assert_close(shuffled.params, averaged(models, sizes).params, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_weights_sum_to_one_in_float64(weighting):
    share = shares(uploads_of(random_models(3), [3, 7, 11]), weighting)
    assert share.dtype == torch.float64
    assert share.sum().item() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_a_client_without_samples_adds_nothing_not_even_a_nan(weighting):
    models = [scalar(1.0), scalar(float("nan")), scalar(3.0)]
    assert averaged(models, [10, 0, 10], weighting).params["w"].item() == 2.0


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_a_cohort_without_any_sample_is_an_error(weighting):
    with pytest.raises(FedstillError, match="no client of this round has any sample"):
        averaged([scalar(1.0), scalar(2.0)], [0, 0], weighting)


def test_the_average_keeps_the_dtype_of_each_tensor():
    assert averaged(random_models(2, torch.bfloat16), [1, 2]).params["w"].dtype == torch.bfloat16


def normed(mean: float, variance: float, count: int) -> Weights:
    buffers = {
        "bn.running_mean": number([mean]),
        "bn.running_var": number([variance]),
        "bn.num_batches_tracked": torch.tensor(count),
    }
    return Weights({"w": number(0.0)}, buffers)


@pytest.mark.parametrize(
    ("policy", "mean", "variance", "count"),
    [("average", 1.0, 1.0, 9), ("pooled", 1.0, 2.0, 9), ("reset", 0.0, 1.0, 0), ("local", 0.5, 4.0, 2)],
)
def test_each_policy_gives_its_batchnorm_statistics(policy, mean, variance, count):
    start, models = normed(0.5, 4.0, 2), [normed(0.0, 1.0, 9), normed(2.0, 1.0, 4)]
    this = round_of(start, uploads_of(models, [50, 50]))
    buffers = with_buffers(average(), policy).apply(start, {}, this)[0].buffers
    assert buffers["bn.running_mean"].tolist() == [mean]
    assert buffers["bn.running_var"].tolist() == [variance]
    assert buffers["bn.num_batches_tracked"].item() == count
    assert buffers["bn.num_batches_tracked"].dtype == torch.int64


def test_statistics_are_weighted_like_the_parameters():
    models = [normed(0.0, 1.0, 1), normed(4.0, 5.0, 1)]
    buffers = averaged(models, [3, 1]).buffers
    assert buffers["bn.running_mean"].tolist() == [1.0]
    assert buffers["bn.running_var"].tolist() == [2.0]
    pooled = averaged(models, [3, 1], buffers="pooled").buffers
    assert pooled["bn.running_var"].tolist() == [0.75 * 1.0 + 0.25 * (5.0 + 16.0) - 1.0]


@pytest.mark.parametrize("policy", ["average", "pooled", "reset", "local"])
def test_the_result_shares_no_memory_with_what_came_in(policy):
    start = normed(0.5, 4.0, 2)
    uploads = uploads_of([normed(1.0, 1.0, 1)], [5])
    result = with_buffers(average(), policy).apply(start, {}, round_of(start, uploads))[0]
    for tree in (result.params, result.buffers):
        for leaf in tree.values():
            leaf.fill_(77)
    assert (uploads.weights.params["w"] == 0.0).all()
    assert all((leaf == 1).all() for leaf in uploads.weights.buffers.values())
    assert start.buffers["bn.running_var"].tolist() == [4.0]


def test_an_unknown_weighting_is_named_with_the_nearest_right_one():
    with pytest.raises(FedstillError, match="did you mean 'size'"):
        average("sizes")


def nova(start, ends, sizes, travel, weighting="size"):
    models = [scalar(end) for end in ends]
    this = round_of(scalar(start), uploads_of(models, sizes, travel=travel))
    return normalized_average(weighting).apply(scalar(start), {}, this)[0].params["w"].item()


def test_fednova_moves_as_worked_by_hand():
    start = 10.0
    ends = [start - 1.0, start - 4.0]
    assert start - nova(start, ends, [75, 25], [2.0, 4.0]) == pytest.approx(1.5625, abs=1e-12)
    assert start - averaged([scalar(end) for end in ends], [75, 25]).params["w"].item() == pytest.approx(1.75)


def test_fednova_sees_only_ratios_of_travel():
    ends, sizes = [0.3, -2.0, 1.1], [5, 2, 9]
    steps = [2.0, 7.0, 3.0]
    scaled = [0.01 * s for s in steps]
    assert nova(1.0, ends, sizes, scaled) == pytest.approx(nova(1.0, ends, sizes, steps), abs=1e-14)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_fednova_with_equal_travel_is_the_average_bit_for_bit(weighting):
    models, sizes = random_models(5), [3, 1, 4, 1, 5]
    start = Weights({"w": torch.full((7, 3), 0.1)}, {})
    this = round_of(start, uploads_of(models, sizes, travel=[0.1 * 7] * 5))
    plain = average(weighting).apply(start, {}, this)[0]
    assert torch.equal(normalized_average(weighting).apply(start, {}, this)[0].params["w"], plain.params["w"])


def test_fednova_ignores_a_client_that_has_no_data_and_stands_still_at_rate_zero():
    assert nova(1.0, [0.0, float("nan")], [5, 0], [2.0, 0.0]) == 0.0
    assert nova(1.0, [1.0, 1.0], [5, 5], [0.0, 0.0]) == 1.0


def test_fednova_averages_statistics_plainly():
    models = [normed(0.0, 1.0, 1), normed(4.0, 5.0, 1)]
    this = round_of(models[0], uploads_of(models, [3, 1], travel=[1.0, 100.0]))
    assert normalized_average().apply(models[0], {}, this)[0].buffers["bn.running_mean"].tolist() == [1.0]


def test_fednova_needs_plain_sgd():
    assert normalized_average().needs == {Need.PLAIN_SGD}


def test_pooled_statistics_are_those_of_all_the_data_together():
    generator = torch.Generator().manual_seed(4)
    data = [
        centre + torch.randn(n, 3, generator=generator, dtype=torch.float64) for n, centre in ((20, 3.0), (50, -1.0))
    ]
    models = [
        Weights({"w": number(0.0)}, {"bn.running_mean": x.mean(0), "bn.running_var": x.var(0, correction=0)})
        for x in data
    ]
    buffers = averaged(models, [20, 50], buffers="pooled").buffers
    everything = torch.cat(data)
    torch.testing.assert_close(buffers["bn.running_mean"], everything.mean(0))
    torch.testing.assert_close(buffers["bn.running_var"], everything.var(0, correction=0))


# Robust aggregates: worked numbers, a reference in NumPy, and how far a minority can move them.


ROBUST = {
    "median": median(),
    "trimmed_mean": trimmed_mean(0.25),
    "geometric_median": geometric_median(),
    "krum": krum(f=1, m=2),
    "norm_bound": norm_bound(0.5),
    "centred_clipping": centred_clipping(0.5),
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
    centre = np.median(each, axis=0)
    for _ in range(3):
        away = each - centre
        apart_from_it = np.linalg.norm(away, axis=1, keepdims=True)
        centre = centre + (away * np.minimum(1.0, 0.5 * np.median(apart_from_it) / apart_from_it)).mean(0)
    wanted = {
        "median": np.median(each, axis=0),
        "trimmed_mean": ordered[1:-1].mean(0),
        "geometric_median": point,
        "krum": each[np.argsort(scores)[:2]].mean(0),
        "norm_bound": (each * np.minimum(1.0, 0.5 / norms)).mean(0),
        "centred_clipping": centre,
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


@pytest.mark.parametrize(
    ("step", "seen"),
    [
        (krum(f=0, m=2), [[1.0], [1.1]]),
        (norm_bound(1.05), [[1.0], [1.05], [1.05]]),
        # the median is 1.1 and the distances 0.1, 0, 7.9: the median distance is 0.1
        (centred_clipping(1.0, 1), [[1.0], [1.1], [1.2]]),
    ],
)
def test_the_steps_that_follow_see_the_uploads_as_the_aggregate_took_them(step, seen):
    """So an upload that is left out, or shortened, teaches accordingly."""
    start, models = Weights({"w": torch.zeros(1)}, {}), [Weights({"w": torch.tensor([x])}, {}) for x in (1.0, 1.1, 9.0)]
    heard = []

    def listen(candidate, state, round):
        heard.append(round.uploads.weights.params["w"])
        return candidate, state

    method = Method(cross_entropy(), step, (ServerStep("listen", listen),))
    made, _ = run_steps(method, start, {}, round_of(start, uploads_of(models, [1.0] * 3)))
    assert heard[0].tolist() == [[pytest.approx(x)] for (x,) in seen]
    assert float(made.params["w"]) == pytest.approx(sum(x for (x,) in seen) / len(seen))


@pytest.mark.parametrize(("lengthen", "kept"), [(False, [0, 4]), (True, [0, 1])])
def test_krum_keeps_a_short_move_against_all_others_unless_it_judges_it_as_long(lengthen, kept):
    """Four honest moves at right angles of length 1, at sqrt 2 from each other; one backwards of length 0.1."""
    moves = [*torch.eye(4), -0.05 * torch.ones(4)]
    start, models = Weights({"w": torch.zeros(4)}, {}), [Weights({"w": move}, {}) for move in moves]
    taken = krum(f=1, m=2, lengthen=lengthen).hands_on(round_of(start, uploads_of(models, [1.0] * 5)))
    assert taken.ids.tolist() == kept
    assert torch.equal(taken.weights.params["w"], torch.stack([moves[place] for place in kept]))


@pytest.mark.parametrize("step", [median(), trimmed_mean(0.2), geometric_median(), average()])
def test_an_aggregate_that_works_coordinate_by_coordinate_hands_all_uploads_on(step):
    assert step.hands_on is None


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
        ("fedavg+centred_clipping(iterations=0)", "at least 1"),
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


# Against 20 % of clients that send their moves backwards, robust aggregates keep what the average loses.


POPULATION, HOSTILE, SCALE, SEEDS = 20, 4, 10.0, 5


def accuracy(text: str, seed: int, *, hostile: int) -> float:
    """The mean test accuracy of the last five of 30 rounds on the embedded digits, everybody taking part."""
    source = fedstill.load("digits")
    parts = PARTITIONS["lda"](source.train.y.numpy(), POPULATION, seed=seed, alpha=1.0)
    federation = fedstill.make_federation(source, parts)
    model = fedstill.build_model("mlp", input_shape=(1, 8, 8), classes=10, hidden=(64,), init="torch")
    engines = build_engines("batched", "cpu", model=model, federation=federation)
    cohort = SignFlippers(engines.cohort, range(hostile), SCALE)
    result = federate(
        method=build_method(text),
        model=model,
        federation=federation,
        training=Training(epochs=2, batch_size=20, lr=0.1),
        rounds=30,
        cohort=POPULATION,
        seed=seed,
        engine=cohort,
    )
    return result.history.mean_last(5)


def middle(text: str, *, hostile: int = HOSTILE) -> float:
    return statistics.median(accuracy(text, seed, hostile=hostile) for seed in range(SEEDS))


@pytest.mark.slow
def test_the_median_keeps_nine_tenths_of_the_clean_accuracy_where_fedavg_falls_apart():
    clean = middle("fedavg", hostile=0)
    assert middle("fedavg+median") >= 0.9 * clean
    assert middle("fedavg") < 0.5 * clean
