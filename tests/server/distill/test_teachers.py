import math
from dataclasses import replace

import pytest
import torch
from by_hand import blobs, linear, linear_model, number, round_of, uploads_of
from hypothesis import given
from hypothesis import strategies as st
from papers import released

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.tree import flatten
from fedstill.core.types import Weights
from fedstill.server.aggregate import average
from fedstill.server.distill.teachers import dirichlet_samples, gaussian_samples, teacher_outputs, uploads_teach

MANY = 40_000  # samples: a mean is off by 1 / 200 standard deviations, and five times that is never seen
direction_samples = released("fedbe", "direction_samples")
SAMPLERS = [gaussian_samples, dirichlet_samples, direction_samples]


def at(*values: float, mean: float = 0.0) -> Weights:
    return Weights({"w": number(list(values))}, {"mean": number([mean]), "count": torch.tensor(3)})


def this_round(models, sizes, start=None, **how):
    return round_of(start or at(0.0, 0.0), uploads_of(models, sizes), **how)


PAIR = [at(1.0, 2.0), at(3.0, 2.0)]


def test_the_uploads_teach():
    round = this_round(PAIR, [1, 1])
    assert uploads_teach(at(9.0, 9.0), round) is round.uploads.weights


def test_every_teacher_answers_on_every_sample():
    models = [linear(3, 4, seed=s) for s in range(3)]
    x = blobs(1, 7).x
    round = round_of(models[0], uploads_of(models, [1, 1, 1]), model=linear_model(), unlabeled=x)
    logits = teacher_outputs(round, round.uploads.weights).logits
    for teacher, model in enumerate(models):
        torch.testing.assert_close(logits[teacher], x @ model.params["weight"].T + model.params["bias"])


def test_teachers_in_train_mode_draw_their_masks_from_the_rounds_seed():
    asked = {}

    class Listening:
        def outputs(self, weights, x, stacked=False, **how):
            asked.update(how)

    round = this_round(PAIR, [1, 1], unlabeled=torch.zeros(2, 2))
    round = replace(round, trainer=Listening())
    teacher_outputs(round, round.uploads.weights, batch=64)
    assert asked == {"features": False, "batch": 64, "seed": seed_for(round.seed, "teachers")}
    asked.clear()
    teacher_outputs(round, round.uploads.weights, features=True)
    assert asked == {"features": True}


def test_no_unlabeled_data_is_one_line_with_its_cure():
    with pytest.raises(FedstillError, match=r"needs unlabeled data.*data\.unlabeled"):
        teacher_outputs(this_round(PAIR, [1, 1]), PAIR[0])


@pytest.mark.parametrize(
    ("sizes", "weighting", "mean", "variance"),
    [([5, 5], "size", [2.0, 2.0], [1.0, 0.0]), ([1, 3], "size", [2.5, 2.0], [0.75, 0.0]),
     ([1, 3], "uniform", [2.0, 2.0], [1.0, 0.0])],
)  # fmt: skip
def test_gaussian_samples_have_the_mean_and_variance_of_the_clients(sizes, weighting, mean, variance):
    drawn = gaussian_samples(at(0.0, 0.0), this_round(PAIR, sizes, weighting=weighting), count=MANY).params["w"]
    assert drawn.shape == (MANY, 2)
    for column in range(2):
        spread = math.sqrt(variance[column])
        assert drawn[:, column].mean().item() == pytest.approx(mean[column], abs=0.025 * spread + 1e-12)
        assert drawn[:, column].var().item() == pytest.approx(variance[column], rel=0.04, abs=1e-12)


def test_gaussian_samples_are_normal_and_coordinates_are_independent():
    drawn = gaussian_samples(at(0.0, 0.0), this_round([at(1.0, 2.0), at(3.0, 6.0)], [1, 1]), count=MANY).params["w"]
    z = (drawn - number([2.0, 4.0])) / number([1.0, 2.0])
    assert (z.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.01)
    assert (z[:, 0] * z[:, 1]).mean().item() == pytest.approx(0.0, abs=0.025)


def test_direction_samples_have_the_centre_and_spread_of_the_card():
    """From w = 0: mean d = (.639632, .724564), var d = (.037025, .028854), mean norm 2.920810."""
    round = this_round(PAIR, [1, 3])
    centre = direction_samples(at(0.0, 0.0), round, count=1, scale=0.0).params["w"][0]
    assert centre.tolist() == pytest.approx([1.868243, 2.116313], abs=1e-5)
    drawn = direction_samples(at(0.0, 0.0), round, count=MANY, scale=0.1).params["w"]
    wanted = [2.920810 * 0.1 * math.sqrt(0.037025), 2.920810 * 0.1 * math.sqrt(0.028854)]
    assert drawn.std(dim=0).tolist() == pytest.approx(wanted, rel=0.02)
    torch.testing.assert_close(drawn.mean(0), centre, rtol=0, atol=0.025 * max(wanted))


def test_directions_that_agree_still_have_the_least_variance():
    round = this_round([at(2.0, 0.0), at(4.0, 0.0)], [1, 1])
    drawn = direction_samples(at(0.0, 0.0), round, count=MANY, scale=0.1).params["w"]
    assert drawn.std(dim=0).tolist() == pytest.approx([3.0 * 0.1 * math.sqrt(1e-5)] * 2, rel=0.02)


def test_a_tensor_that_nobody_moved_stays_as_it_was_sent():
    round = this_round([at(1.0, 2.0), at(1.0, 2.0)], [1, 1], start=at(1.0, 2.0))
    assert torch.equal(direction_samples(at(0.0, 0.0), round, count=3).params["w"], number([[1.0, 2.0]] * 3))


@pytest.mark.parametrize("sampler", [gaussian_samples, dirichlet_samples])
def test_clients_that_agree_leave_nothing_to_sample(sampler):
    model = at(0.1, -7.3)
    round = this_round([model] * 3, [1, 2, 3])
    mean = average("size").apply(model, {}, round)[0].params["w"]
    drawn = sampler(model, round, count=4).params["w"]
    torch.testing.assert_close(drawn, mean.expand(4, 2), rtol=1e-12, atol=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.floats(1e-4, 1e4), st.integers(0, 2**32))
def test_dirichlet_samples_lie_between_the_clients(values, alpha, seed):
    round = this_round([at(value, 0.0) for value in values], [k + 1 for k in range(len(values))], start=at(0.0, 0.0))
    drawn = dirichlet_samples(at(0.0, 0.0), replace(round, seed=seed), count=50, alpha=alpha).params["w"][:, 0]
    assert drawn.min().item() >= min(values) - 1e-9
    assert drawn.max().item() <= max(values) + 1e-9


def test_a_large_alpha_gives_the_average_and_a_small_one_a_client():
    models = [at(1.0, 0.0), at(2.0, 0.0), at(7.0, 0.0)]
    round = this_round(models, [1, 2, 1], weighting="size")
    near = dirichlet_samples(at(0.0, 0.0), round, count=20, alpha=1e8).params["w"][:, 0]
    assert near.tolist() == pytest.approx([3.0] * 20, abs=2e-3)
    far = dirichlet_samples(at(0.0, 0.0), round, count=300, alpha=1e-4).params["w"][:, 0]
    distance = (far.unsqueeze(1) - number([1.0, 2.0, 7.0])).abs().min(1).values
    assert (distance < 1e-6).double().mean() > 0.98
    assert all((far.round() == value).sum() > 50 for value in (1, 2, 7))


def test_one_client_is_every_dirichlet_sample():
    drawn = dirichlet_samples(at(0.0, 0.0), this_round([at(0.3, 4.0)], [7]), count=5).params["w"]
    torch.testing.assert_close(drawn, number([[0.3, 4.0]] * 5))


def test_dirichlet_samples_of_equal_clients_have_the_moments_of_the_distribution():
    """g ~ Dir(alpha 1): mean 1 / C, Var sum_k g_k w_k = (mean of w_k^2 - mean^2) / (C alpha + 1)."""
    values, alpha = [1.0, 2.0, 7.0], 0.5
    drawn = dirichlet_samples(
        at(0.0, 0.0), this_round([at(v, 0.0) for v in values], [1, 1, 1]), count=MANY, alpha=alpha
    ).params["w"][:, 0]
    mean = sum(values) / 3
    variance = (sum(v * v for v in values) / 3 - mean**2) / (3 * alpha + 1)
    assert drawn.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(variance / MANY))
    assert drawn.var().item() == pytest.approx(variance, rel=0.05)


def test_larger_clients_count_more_in_a_dirichlet_sample():
    round = this_round([at(0.0, 0.0), at(1.0, 0.0)], [1, 3])
    by_size, alike = (
        dirichlet_samples(at(0.0, 0.0), replace(round, weighting=w), count=4000).params["w"].mean().item() * 2
        for w in ("size", "uniform")
    )
    assert alike == pytest.approx(0.5, abs=0.03)
    # E[3 b / (a + 3 b)] with (a, b) ~ Dir(1, 1): the integral of 3 t / (1 + 2 t) over (0, 1) = 1.5 - 0.75 ln 3
    assert by_size == pytest.approx(1.5 - 0.75 * math.log(3), abs=0.03)


@pytest.mark.parametrize("sampler", [gaussian_samples, dirichlet_samples])
def test_a_client_without_data_is_not_in_any_sample(sampler):
    with_stranger = this_round([*PAIR, at(1e6, 1e6)], [1, 3, 0])
    drawn = sampler(at(0.0, 0.0), with_stranger, count=50).params["w"]
    assert drawn.abs().max() < 20


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampled_models_have_the_candidates_statistics(sampler):
    """A sampled variance could be negative."""
    found = sampler(at(0.0, 0.0, mean=5.0), this_round(PAIR, [1, 1]), count=3)
    assert found.buffers["mean"].tolist() == [[5.0]] * 3
    assert found.buffers["count"].tolist() == [3] * 3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_repeat_with_the_round_and_differ_between_rounds_and_tensors(sampler):
    models = [Weights({"a": number([v]), "b": number([v])}, {}) for v in (1.0, 2.0, 4.0)]
    first = this_round(models, [1, 1, 1], start=Weights({"a": number([0.0]), "b": number([0.5])}, {}))
    rounds = first, replace(first), replace(first, seed=first.seed + 1)
    one, same, another = (flatten(sampler(models[0], round, count=4)) for round in rounds)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["params/a"], another["params/a"])
    assert len(set(one["params/a"].flatten().tolist())) == 4
    if sampler is not dirichlet_samples:  # which blends whole models
        assert not torch.allclose(one["params/a"] - one["params/a"].mean(), one["params/b"] - one["params/b"].mean())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_are_in_the_precision_of_the_models(sampler):
    models = [Weights({"w": torch.tensor([v, 1.0])}, {}) for v in (1.0, 2.0)]
    round = this_round(models, [1, 1], start=Weights({"w": torch.zeros(2)}, {}))
    assert sampler(models[0], round, count=2).params["w"].dtype == torch.float32


@pytest.mark.parametrize("sampler", [gaussian_samples, direction_samples])
@pytest.mark.parametrize(
    ("dtype", "drawn_in"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_noise_is_drawn_where_the_models_are_and_in_float32_unless_they_are_float64(
    monkeypatch, sampler, dtype, drawn_in
):
    asked, randn = [], torch.randn

    def listening(*shape, **how):
        asked.append((how["dtype"], how["device"], how["generator"].device))
        return randn(*shape, **how)

    monkeypatch.setattr(torch, "randn", listening)
    models = [Weights({"w": torch.tensor([v, 1.0], dtype=dtype)}, {}) for v in (1.0, 2.0)]
    round = this_round(models, [1, 1], start=Weights({"w": torch.zeros(2, dtype=dtype)}, {}))
    assert sampler(models[0], round, count=2).params["w"].dtype == dtype
    assert asked == [(drawn_in, torch.device("cpu"), torch.device("cpu"))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampler", [gaussian_samples, direction_samples])
def test_a_gpu_draws_samples_of_its_own_that_follow_the_rounds_seed(sampler):
    models = [Weights({"w": torch.linspace(0, v, 20_000, device="cuda")}, {}) for v in (1.0, 2.0)]
    first = this_round(models, [1, 1], start=Weights({"w": torch.zeros(20_000, device="cuda")}, {}))
    one, same, another = (
        sampler(models[0], round, count=2).params["w"] for round in (first, first, replace(first, seed=first.seed + 1))
    )
    assert one.is_cuda
    assert torch.equal(one, same)
    assert not torch.equal(one, another)
