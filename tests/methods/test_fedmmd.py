"""Golden values of the FedMMD card: {0, 2} against {1, 3} in one dimension, sigma = 10 / 3, MMD^2 = 1.200789."""

import math

import numpy as np
import pytest
import torch
import toy
from by_hand import blobs, federate_by_hand, linear, local_view, number, scalar, seeing_model
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from fedstill.core.types import Batch, Need, Output
from fedstill.local import start_model
from fedstill.methods import fedavg, fedmmd
from fedstill.methods.fedmmd import kernel_discrepancy, mean_discrepancy

H, R = number([[0.0], [2.0]]), number([[1.0], [3.0]])


def plain(h, r):
    return kernel_discrepancy(h, r, torch.ones(len(h), dtype=h.dtype))


def slow_discrepancy(h, r):
    """The card's formula, pair by pair."""
    rows = np.concatenate([h, r])
    distance = np.array([[np.sum((a - b) ** 2) for b in rows] for a in rows])
    count = len(rows)
    sigma = distance.sum() / (count**2 - count) + 1e-8
    kernel = sum(np.exp(-distance / (sigma / 4 * factor)) for factor in (1, 2, 4, 8, 16))
    half = len(h)
    blocks = kernel[:half, :half] + kernel[half:, half:] - kernel[:half, half:] - kernel[half:, :half]
    return blocks.mean()


def slope_of(h, r, weight=None):
    h = h.clone().requires_grad_()
    weight = torch.ones(len(h), dtype=torch.float64) if weight is None else weight
    return torch.autograd.grad(kernel_discrepancy(h, r, weight), h)[0]


def test_the_discrepancy_has_the_cards_value():
    assert plain(H, R).item() == pytest.approx(1.200789, abs=1e-6)


def test_the_bandwidths_come_from_the_mean_distance_of_all_pairs():
    """Distances 4, 4 within the sets and 1, 9, 1, 1 across: 2 (4 + 4 + 1 + 9 + 1 + 1) / 12 = 10 / 3."""
    sigma, total = 10.0 / 3.0, 0.0
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        k = {d: math.exp(-d / (factor * sigma)) for d in (0.0, 1.0, 4.0, 9.0)}
        total += (2 * (2 * k[0.0] + 2 * k[4.0]) - 2 * (3 * k[1.0] + k[9.0])) / 4
    assert plain(H, R).item() == pytest.approx(total, abs=1e-7)


def test_equal_sets_have_no_discrepancy_in_any_order():
    h = number([[0.0, 1.0], [2.0, -1.0], [5.0, 0.5]])
    assert plain(h, h).item() == pytest.approx(0.0, abs=1e-15)
    assert plain(h, h[[2, 0, 1]]).item() == pytest.approx(0.0, abs=1e-15)


def test_the_first_step_of_a_round_has_no_gradient():
    h = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert slope_of(h, h).abs().max() < 1e-15
    assert slope_of(h + 0.5, h).abs().max() > 1e-2


def test_a_small_step_brings_the_sets_together():
    moved = H - 0.05 * slope_of(H, R)
    assert plain(moved, R).item() < plain(H, R).item()


def test_sigma_and_the_reference_get_no_gradient():
    """With sigma held at 10 / 3, moving h_0 changes the discrepancy by the kernel's own slope."""
    sigma, step = 10.0 / 3.0, 1e-6

    def held(first):
        def k(d):
            return sum(math.exp(-d / (factor * sigma)) for factor in (0.25, 0.5, 1.0, 2.0, 4.0))

        own = 2 * k(0.0) + 2 * k((first - 2.0) ** 2)
        across = k((first - 1.0) ** 2) + k((first - 3.0) ** 2) + 2 * k(1.0)
        return (own - 2 * across) / 4

    assert slope_of(H, R)[0].item() == pytest.approx((held(step) - held(-step)) / (2 * step), abs=1e-6)
    assert not plain(H, R.clone().requires_grad_()).requires_grad


sets = st.integers(2, 5).flatmap(
    lambda count: st.lists(st.lists(st.floats(-4, 4), min_size=6, max_size=6), min_size=count, max_size=count)
)


@given(rows=sets, garbage=st.sampled_from([0.0, 7.0, 1e30, float("inf"), float("nan")]), padding=st.integers(0, 3))
def test_it_is_the_slow_formula_whatever_the_padding_holds(rows, garbage, padding):
    both = number(rows)
    h, r = both[:, :3], both[:, 3:]
    strange = torch.full((padding, 3), garbage, dtype=torch.float64)
    weight = torch.cat([torch.ones(len(h)), torch.zeros(padding)]).double()
    padded, reference = torch.cat([h, strange]), torch.cat([r, -strange])
    expected = slow_discrepancy(h.numpy(), r.numpy())
    assert kernel_discrepancy(padded, reference, weight).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    slope = slope_of(padded, reference, weight)
    torch.testing.assert_close(slope[: len(h)], slope_of(h, r), rtol=1e-9, atol=1e-9)
    assert not bool(slope[len(h) :].any())


@pytest.mark.parametrize("weight", [[1.0, 0.0], [0.0, 0.0]])
def test_one_sample_alone_or_none_counts_nothing(weight):
    h = H.clone().requires_grad_()
    loss = kernel_discrepancy(h, R, number(weight))
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, h)[0].abs().max() == 0.0


def test_many_clients_at_once_equal_one_after_the_other():
    generator = torch.Generator().manual_seed(1)
    h, r = (torch.randn(3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = number([[1.0] * 5, [1.0] * 3 + [0.0] * 2, [1.0] + [0.0] * 4])
    together = vmap(kernel_discrepancy)(h, r, weight)
    alone = torch.stack([kernel_discrepancy(*each) for each in zip(h, r, weight, strict=True)])
    torch.testing.assert_close(together, alone)


def test_the_term_is_lambda_times_the_discrepancy_to_the_received_model():
    term = mean_discrepancy(0.5)
    view = local_view(scalar(0.0), frozen={"start": Output(R, R)})
    batch = Batch(H, torch.zeros(2, dtype=torch.int64), number([1.0, 1.0]))
    assert term.loss(Output(H, H), batch, view).item() == pytest.approx(0.5 * 1.200789, abs=1e-6)
    assert term.frozen == {"start": start_model}
    assert term.needs == {Need.FEATURES}


def test_half_precision_features_are_compared_in_float32():
    assert plain(H.bfloat16(), R.bfloat16()).dtype == torch.float32


def test_fedmmd_starts_like_fedavg_and_then_drifts_less():
    """On softmax regression whose logits are its features, from the second step on."""
    data, start = blobs(0, 8), linear(3, 4, seed=1)

    def trained(method, steps):
        how = {"rounds": 1, "steps": steps, "lr": 0.2, "momentum": 0.5}
        return federate_by_hand(method, seeing_model(), [data], start, **how).weights[0]

    def drift_of_features(method):
        before, after = (seeing_model().apply(w, data.x)[0].features for w in (start, trained(method, 20)))
        return float((after - before).square().sum(-1).mean())

    assert toy.furthest(trained(fedmmd(lam=3.0), 1), trained(fedavg(), 1)) < 1e-14
    assert drift_of_features(fedmmd(lam=3.0)) < 0.5 * drift_of_features(fedavg())
