"""Clipping and noise on the way to the server: what is changed, by how much, and what is left alone.

Worked numbers: card 7 (MrTF), T7.13, and hand calculation on moves of length 5 and 13.
"""

import inspect
import math

import pytest
import torch
from quick import first_quick
from running import changed_on_the_way
from toy import same_bits

from fedstill.about.toy import trial_run
from fedstill.compose.combine import on_the_way
from fedstill.core.errors import FedstillError
from fedstill.core.tree import rows, stack
from fedstill.core.types import Uploads, Weights
from fedstill.loop.guard import Guard, admit
from fedstill.methods import update_noise
from fedstill.methods.lookup import build_method
from fedstill.models import build_model
from fedstill.privacy.mechanisms import clip_and_noise

START = Weights({"a": torch.tensor([1.0, 1.0]), "b": torch.tensor(2.0)}, {"seen": torch.tensor(7)})
MOVES = [(3.0, 0.0, 4.0), (3.0, 4.0, 12.0), (0.0, 0.0, 0.0), (0.3, 0.0, 0.4)]  # of length 5, 13, 0 and 0.5


def uploads_of(moves, ids=None, buffers=None) -> Uploads:
    ends = [Weights({"a": START.params["a"] + torch.tensor(m[:2]), "b": START.params["b"] + m[2]}, {}) for m in moves]
    ones = torch.ones(len(moves), dtype=torch.float64)
    weights = stack(ends)._replace(buffers=buffers or {"seen": torch.arange(len(moves))})
    ids = torch.arange(len(moves)) if ids is None else torch.tensor(ids)
    return Uploads(
        weights, ones, 2 * ones, 3 * ones, 4 * ones, {"control": {"a": torch.ones(len(moves), 2)}}, None, ids
    )


def wide_uploads(clients: int, width: int = 20_000, dtype=torch.float32) -> tuple[Uploads, Weights]:
    start = Weights({"w": torch.zeros(width, dtype=dtype), "v": torch.zeros(100, 3, dtype=dtype)}, {})
    ones = torch.ones(clients, dtype=torch.float64)
    return Uploads(stack([start] * clients), ones, ones, ones, ones, {}, None, torch.arange(clients)), start


def moves_of(uploads: Uploads) -> torch.Tensor:
    params = uploads.weights.params
    return torch.cat([params["a"] - START.params["a"], (params["b"] - START.params["b"]).unsqueeze(1)], dim=1)


def test_without_noise_and_bound_nothing_is_done_at_all():
    assert clip_and_noise(0.0) is None
    assert update_noise(sigma=0.0).per_client == ()
    assert update_noise().per_client


@pytest.mark.parametrize("clients", [1, 4, 25])
def test_the_average_of_m_clients_has_noise_of_sigma_over_root_m(clients):
    """T7.13, second half. 20,300 draws: the estimate of a standard deviation is off by 0.5 % (one sigma)."""
    uploads, start = wide_uploads(clients)
    sent = clip_and_noise(0.3)(uploads, start, 11).weights.params
    values = torch.cat([leaf.mean(0).flatten() for leaf in sent.values()])
    assert float(values.std()) == pytest.approx(0.3 / math.sqrt(clients), rel=0.025)
    assert abs(float(values.mean())) < 5 * 0.3 / math.sqrt(clients * len(values))


def test_the_noise_is_gaussian():
    uploads, start = wide_uploads(5)
    values = clip_and_noise(2.0)(uploads, start, 3).weights.params["w"].flatten() / 2.0
    for bound, share in ((1.0, 0.682689), (2.0, 0.954500), (3.0, 0.997300)):
        assert float((values.abs() < bound).double().mean()) == pytest.approx(share, abs=0.006)


def test_clients_tensors_and_rounds_have_unrelated_noise():
    uploads, start = wide_uploads(2, width=300)
    one, other = (clip_and_noise(1.0)(uploads, start, seed).weights.params for seed in (1, 2))
    streams = torch.stack([one["w"][0], one["w"][1], one["v"][0].flatten(), other["w"][0]])
    related = torch.corrcoef(streams) - torch.eye(4)
    assert float(related.abs().max()) < 0.25  # 300 numbers: four standard deviations


def test_noise_follows_the_client_whoever_else_is_there():
    """A pure function of seed, client and tensor: order, cohort and position change no bit."""
    transmit = clip_and_noise(0.5, clip=2.0)
    everybody = transmit(uploads_of(MOVES, ids=[4, 9, 1, 6]), START, 5).weights
    order = [2, 0, 3]
    some = transmit(uploads_of([MOVES[i] for i in order], ids=[[4, 9, 1, 6][i] for i in order]), START, 5).weights
    assert same_bits(some.params, rows(everybody, torch.tensor(order)).params)
    renamed = transmit(uploads_of(MOVES, ids=[4, 9, 1, 7]), START, 5).weights
    assert same_bits(rows(renamed, slice(0, 3)).params, rows(everybody, slice(0, 3)).params)
    assert not torch.equal(renamed.params["a"][3], everybody.params["a"][3])


def test_as_many_threads_as_there_are_draw_the_same_noise():
    uploads, start = wide_uploads(5, width=50)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(clip_and_noise(1.0)(uploads, start, 8).weights)
    finally:
        torch.set_num_threads(before)
    assert same_bits(*found)


def test_in_float64_the_noise_is_the_one_of_float32():
    single, double = (wide_uploads(2, width=40, dtype=dtype) for dtype in (torch.float32, torch.float64))
    one, other = (clip_and_noise(1.0)(uploads, start, 8).weights.params["w"] for uploads, start in (single, double))
    assert other.dtype == torch.float64
    assert torch.equal(one.double(), other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_noise_of_its_own_that_follows_client_and_seed_too():
    uploads, start = wide_uploads(3)
    there = uploads._replace(weights=Weights({n: p.cuda() for n, p in uploads.weights.params.items()}, {}))
    first, again, other = (clip_and_noise(1.0)(there, start, seed).weights.params["w"] for seed in (8, 8, 9))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float((first.cpu() - uploads.weights.params["w"]).std()) == pytest.approx(1.0, rel=0.025)


def test_a_move_beyond_the_bound_is_shortened_over_all_parameters_together():
    """(3, 0, 4) has length 5, at a bound of 2 it becomes 2/5 of itself; (3, 4, 12) has length 13 and becomes 2/13."""
    moves = moves_of(clip_and_noise(0.0, clip=2.0)(uploads_of(MOVES), START, 0))
    assert moves[0].tolist() == pytest.approx([1.2, 0.0, 1.6], abs=1e-6)
    assert moves[1].tolist() == pytest.approx([6 / 13, 8 / 13, 24 / 13], abs=1e-6)
    assert moves.norm(dim=1)[:2].tolist() == pytest.approx([2.0, 2.0], abs=1e-6)


def test_a_move_within_the_bound_keeps_every_bit():
    sent = uploads_of(MOVES)
    found = clip_and_noise(0.0, clip=2.0)(sent, START, 0).weights
    assert same_bits(rows(found, slice(2, 4)), rows(sent.weights, slice(2, 4)))


def test_noise_comes_after_the_clipping():
    quiet = moves_of(clip_and_noise(0.0, clip=2.0)(uploads_of(MOVES), START, 9))
    loud = moves_of(clip_and_noise(10.0, clip=2.0)(uploads_of(MOVES), START, 9))
    plain = moves_of(clip_and_noise(10.0)(uploads_of(MOVES), START, 9)) - torch.tensor(MOVES)
    assert torch.allclose(loud - quiet, plain, atol=1e-4)
    assert float(loud.norm(dim=1).max()) > 2.0


def test_only_parameters_change():
    buffers = {"running_var": torch.tensor([[0.5], [0.25], [1.0], [2.0]])}
    sent = uploads_of(MOVES, buffers=buffers)
    found = clip_and_noise(1.0, clip=0.1)(sent, START, 0)
    assert found.weights.buffers is sent.weights.buffers
    assert found._replace(weights=sent.weights) == sent


def test_what_goes_beside_the_model_is_not_noised():
    """SCAFFOLD's control leaves as it is: the docs must not let anybody think otherwise."""
    seen = []

    def look(method):
        def transmit(uploads, start, seed):
            sent = on_the_way(method, uploads, start, seed)
            seen.append((uploads, sent))
            return sent

        return transmit

    (phase,) = build_method("scaffold+update_noise(sigma=0.1)")
    trial_run(changed_on_the_way(phase.method, look(phase.method)))
    before, after = seen[0]
    delta = before.extra["control_delta"]
    assert all(torch.equal(leaf, after.extra["control_delta"][name]) for name, leaf in delta.items())
    assert not same_bits(before.weights, after.weights)


def test_a_broken_upload_is_still_seen_by_the_guard():
    """A bound must not turn NaN or Inf into a harmless model."""
    for bad in (float("nan"), float("inf")):
        sent = clip_and_noise(0.1, clip=1.0)(uploads_of([(1.0, 0.0, 0.0), (bad, 0.0, 0.0), (0.0, 1.0, 0.0)]), START, 0)
        admitted = admit(sent, START, Guard(), round=1)
        assert admitted.kept.tolist() == [0, 2]


@pytest.mark.parametrize("text", ["fedavg+update_noise(sigma=0.01)", "update_noise(sigma=0.01)+fedprox(mu=0.0)"])
def test_joined_with_others_it_is_their_method_with_noise(text):
    (phase,) = build_method(text)
    found, wanted = (trial_run(one, rounds=2).weights for one in (phase.method, update_noise(sigma=0.01)))
    assert same_bits(found, wanted)


@pytest.mark.parametrize("method", first_quick(["scaffold", "feddf(student.steps=3)", "mrtf(student.steps=3)"]))
def test_joined_with_a_method_that_averages_evenly_it_does_so_too_and_only_the_noise_is_new(method):
    alone, silent, noisy = (
        trial_run(build_method(text)[0].method, rounds=2).weights
        for text in (method, f"{method}+update_noise(sigma=0.0)", f"{method}+update_noise(sigma=0.01)")
    )
    assert same_bits(silent, alone)
    assert not same_bits(noisy, alone)


def test_the_documentation_makes_no_claim_of_privacy():
    text = " ".join(inspect.getdoc(update_noise).split())
    assert "NO claim of privacy" in text
    assert "SCAFFOLD's control" in text.split("Reveals:")[1]


def test_batchnorm_statistics_arrive_as_they_were():
    model = build_model("resnet8", input_shape=(3, 32, 32), classes=3, norm="batch")
    start = model.init(0)
    ones = torch.ones(2, dtype=torch.float64)
    sent = Uploads(stack([start, start]), ones, ones, ones, ones, {}, None, torch.arange(2))
    found = clip_and_noise(0.1)(sent, start, 0).weights
    assert start.buffers
    assert all(torch.equal(leaf, sent.weights.buffers[name]) for name, leaf in found.buffers.items())
    assert not same_bits(found, sent.weights)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sigma": -0.1}, "method.sigma = -0.1 must be a number, at least 0"),
        ({"sigma": float("inf")}, "method.sigma = inf must be"),
        ({"clip": 0.0}, "method.clip = 0.0 must be a number above 0"),
    ],
)
def test_impossible_noise_is_refused_in_one_line(options, told):
    with pytest.raises(FedstillError) as refused:
        build_method("update_noise", options)
    assert str(refused.value).startswith(told)
