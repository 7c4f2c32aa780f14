"""Noise in whole steps: that it is the rounded Gaussian, exactly, and that what it hides stays within its bound."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri

from fedstill.core.seeds import Secret
from fedstill.privacy import noise
from fedstill.privacy.noise import FINEST, gaussian_steps, in_whole_steps, lower_tail, steps_in

SECRET = Secret.of(b"a secret")


@pytest.mark.parametrize("size", [0.0, 0.3, 1.0, 3.0, 8.0])
def test_the_digits_of_a_tail_are_those_of_scipy(size):
    assert float(lower_tail(Decimal(size))) == pytest.approx(ndtr(-size), rel=1e-14)


def test_the_digits_go_far_beyond_what_a_draw_needs():
    """1/2 less the series is the difference of two equal numbers where the tail is nothing: a wrong constant shows."""
    assert 0 < lower_tail(Decimal(20)) < Decimal("1e-88")  # 2.7536e-89
    assert abs(lower_tail(Decimal(30))) < Decimal("1e-110")


def test_scipys_quantiles_are_as_exact_as_a_draw_takes_them_to_be():
    sizes = np.concatenate([np.linspace(1e-6, 8.5, 400), 10.0 ** -np.arange(1, 9)])
    for size in sizes.tolist():
        tail = lower_tail(Decimal(size))
        nearest = float(tail)  # its own rounding moves the size by this much
        moved = abs(nearest) * 2.0**-53 / (math.exp(-size * size / 2) / math.sqrt(2 * math.pi))
        assert abs(-ndtri(nearest) - size) < noise.SURE * (1 + size) + moved


@pytest.mark.parametrize("sigma", [0.3, 2.0, 1000.0, 2.0**24])
def test_a_draw_is_the_step_that_its_bits_say_with_or_without_the_digits(sigma, monkeypatch):
    fast = gaussian_steps(SECRET, (300,), sigma)
    monkeypatch.setattr(noise, "SURE", 1.0)  # nothing is sure: 120 digits decide each draw
    assert torch.equal(gaussian_steps(SECRET, (300,), sigma), fast)


@pytest.mark.parametrize("sigma", [0.4, 1.5])
def test_steps_are_as_frequent_as_a_rounded_gaussian_has_them(sigma):
    """Chi-squared of 200,000 draws over the steps that are expected at least ten times; 99.99 % lie below the bound."""
    count = 200_000
    drawn = gaussian_steps(SECRET, (count,), sigma).numpy()
    edges = np.arange(-12, 13) + 0.5
    chances = np.diff(np.concatenate([[0.0], ndtr(edges / sigma), [1.0]]))
    found = np.bincount(np.searchsorted(edges, drawn), minlength=len(chances))
    often = chances * count >= 10
    distance = ((found - chances * count)[often] ** 2 / (chances * count)[often]).sum()
    assert distance < often.sum() + 4 * math.sqrt(2 * often.sum()) + 10
    assert found[~often].sum() <= 40


def test_noise_that_protects_is_normal_in_the_middle_and_in_the_tails():
    drawn = gaussian_steps(SECRET, (500, 1000), 2.0**24).double() / 2**24
    assert abs(float(drawn.mean())) < 5 / 500_000**0.5
    assert abs(float(drawn.std()) - 1) < 5 / 1_000_000**0.5
    assert float((drawn.abs() > 3).double().mean()) == pytest.approx(0.0026998, rel=0.15)
    assert 4.0 < float(drawn.abs().max()) < 6.5


def test_all_bits_of_a_seed_count_and_the_same_seed_gives_the_same_draws():
    one, other = gaussian_steps(5, (8,), 1e6), gaussian_steps(5 + 2**32, (8,), 1e6)
    assert not torch.equal(one, other)
    assert torch.equal(gaussian_steps(5, (8,), 1e6), one)
    assert not torch.equal(gaussian_steps(Secret(5), (8,), 1e6), gaussian_steps(Secret(5 + 2**200), (8,), 1e6))
    assert gaussian_steps(5, (), 2.0).shape == ()


def test_a_long_tensor_is_drawn_in_pieces_that_share_nothing(monkeypatch):
    monkeypatch.setattr(noise, "AT_ONCE", 100)
    drawn = gaussian_steps(SECRET, (250,), 1e6)
    assert not set(drawn[:100].tolist()) & set(drawn[100:].tolist())
    assert float(drawn[200:].double().std()) == pytest.approx(1e6, rel=0.4)


@pytest.mark.parametrize("clip", [1.0, 0.1, 3.7e-5])
def test_a_move_in_whole_steps_is_no_longer_than_its_bound(clip):
    """Ten thousand equal numbers whose norm is the bound but for rounding."""
    move = {"w": torch.full((10_000,), clip / 100 * (1 + 1e-12), dtype=torch.float64)}
    whole = in_whole_steps(move, clip, FINEST)["w"]
    assert whole.dtype == torch.int64
    assert sum(int(step) ** 2 for step in whole.tolist()) <= FINEST**2
    assert torch.allclose(whole.double() * (clip / FINEST), move["w"], rtol=1e-5)


def test_rounding_goes_towards_zero():
    whole = in_whole_steps({"w": torch.tensor([0.9, -0.9, 0.1]) / 1024}, 1.0, 1024)["w"]
    assert whole.tolist() == [0, 0, 0]
    assert in_whole_steps({"w": torch.tensor([1.9, -1.9]) / 1024}, 1.0, 1024)["w"].tolist() == [1, -1]


def test_what_is_released_is_made_of_the_gaussian_mechanisms_output():
    """x + round(s e) = round(x + s e) for each whole x: neighbours reach the same numbers, shifted by whole steps."""
    drawn = gaussian_steps(SECRET, (1000,), 37.5)
    assert set((drawn + 5).tolist()) == {step + 5 for step in drawn.tolist()}


@pytest.mark.parametrize(
    ("sigma", "steps"), [(1e-4, FINEST), (1.0, FINEST), (64.0, FINEST), (65.0, FINEST // 2), (1e6, 2**10)]
)
def test_very_loud_noise_has_coarser_steps_so_that_few_draws_need_digits(sigma, steps):
    assert steps_in(1.0, sigma) == steps_in(0.25, 0.25 * sigma) == steps


def test_a_secret_shows_nothing_and_its_paths_are_one_way():
    below = SECRET.below("noise", 3)
    assert repr(SECRET) == str(SECRET) == f"{SECRET}" == "Secret(...)"
    assert below == SECRET.below("noise").below(3) != SECRET.below("noise", "3")
    assert 2**240 < below < 2**256
    assert below != SECRET.below("noise", 4)
