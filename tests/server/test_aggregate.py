import pytest
import torch
from by_hand import number, round_of, scalar, uploads_of

from fedstill.core.errors import FedstillError
from fedstill.core.types import Need, Weights
from fedstill.server import average, normalized_average
from fedstill.server.aggregate import shares, with_buffers


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
