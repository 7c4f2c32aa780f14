"""Noise that later rounds take back: that it is A^-1 e, what it costs, and that no rounding gives a value away."""

import itertools
import math

import numpy as np
import pytest
import torch

from fedstill.core.seeds import Secret, seed_for
from fedstill.privacy import correlated
from fedstill.privacy.correlated import banded_root, correlated_noise, highest_price
from fedstill.privacy.noise import MOST_STEPS

ROOT = Secret.of(b"a secret")
SEEDS = [seed_for(ROOT, number) for number in range(12)]


def matrix(factor, rounds) -> np.ndarray:
    """A: lower triangular, factor[lag] on the diagonal of each lag."""
    return sum(number * np.eye(rounds, k=-lag) for lag, number in enumerate(factor) if lag < rounds)


def like(*shape, name="w"):
    return {name: torch.zeros(shape)}


def streamed(factor, rounds, width, multiplier=1.0) -> tuple[np.ndarray, int]:
    """The noises of so many rounds, a row each, and how many steps the bound has."""
    noise = correlated_noise(factor)
    drawn = [noise(SEEDS[: number + 1], like(width), multiplier) for number in range(rounds)]
    return np.stack([one["w"].numpy() for one, _ in drawn]), drawn[0][1]


@pytest.mark.parametrize(
    ("bands", "numbers"), [(1, (1,)), (2, (2, 1)), (3, (8, 4, 3)), (4, (16, 8, 6, 5)), (6, (16, 8, 6, 5, 4, 4))]
)
def test_the_numbers_are_the_roots_first_ones_in_sixteenths(bands, numbers):
    """1, 1/2, 3/8, 5/16, 35/128, 63/256 times 16 are 16, 8, 6, 5, 4.375, 3.9375."""
    assert banded_root(bands) == numbers


def test_the_root_times_itself_adds_up_rounds():
    """With all bands and without rounding A A is the matrix of ones below the diagonal, of which A is the root."""
    exact = [math.comb(2 * lag, lag) / 4**lag for lag in range(6)]
    np.testing.assert_allclose(matrix(exact, 6) @ matrix(exact, 6), np.tril(np.ones((6, 6))))
    assert np.abs(np.array(banded_root(6)) / 16 - exact).max() <= 1 / 32


def test_noises_by_hand(monkeypatch):
    """2 n_t + n_{t-1} = 10, 4, -7 in turn: 5, then (4 - 5) / 2 = -0.5, which goes up to 0, then -3.5, up to -3."""
    fresh = iter([10, 4, -7])
    monkeypatch.setattr(correlated, "gaussian_steps", lambda seed, shape, sigma: torch.full(shape, next(fresh)))
    noise = correlated_noise((2, 1))
    assert [int(noise(SEEDS[: number + 1], like(1), 1.0)[0]["w"]) for number in range(3)] == [5, 0, -3]


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_the_stream_is_the_inverse_matrix_times_fresh_noise(bands, monkeypatch):
    """Against numpy with the whole matrix; each rounding is of half a step, and A^-1 carries it on."""
    factor, fresh = banded_root(bands), []
    draw = correlated.gaussian_steps

    def noted(seed, shape, sigma):
        fresh.append(draw(seed, shape, sigma))
        return fresh[-1].clone()

    monkeypatch.setattr(correlated, "gaussian_steps", noted)
    found, _ = streamed(factor, 12, 50)
    assert len(fresh) == 12  # each is drawn once
    inverse = np.linalg.inv(matrix(factor, 12))
    carried = np.abs(inverse).sum(axis=1).max() * factor[0] / 2
    assert np.abs(found - inverse @ np.stack([one.numpy() for one in fresh])).max() <= carried + 1e-6
    assert carried < 3  # steps, where the noise has millions


@pytest.mark.parametrize("bands", [2, 5])
def test_what_is_shown_is_made_of_the_gaussian_mechanisms_output(bands):
    """From w = A x + e alone, without x, everybody gets the very x_t + n_t: so n tells nothing more."""
    factor, rounds = banded_root(bands), 8
    draw = np.random.Generator(np.random.PCG64(1))
    x = draw.integers(-(2**24), 2**24, (rounds, 30))
    noises, steps = streamed(factor, rounds, 30)
    size = math.sqrt(sum(number**2 for number in factor))
    fresh = [
        correlated.gaussian_steps(seed_for(seed, "band", *factor, "w"), (30,), size * 1.0 * steps).numpy()
        for seed in SEEDS[:rounds]
    ]
    output = matrix(factor, rounds).astype(np.int64) @ x + np.stack(fresh)
    shown: list[np.ndarray] = []
    for row in output:
        past = sum(number * before for number, before in zip(factor[1:], reversed(shown), strict=False))
        shown.append((row - past + factor[0] // 2) // factor[0])
    np.testing.assert_array_equal(np.stack(shown), x + noises)


@pytest.mark.parametrize("multiplier", [0.3, 8.0, 1e4])
def test_fresh_noise_has_the_size_of_the_columns_and_few_draws_need_digits(multiplier, monkeypatch):
    """In units of the bound |a| z, on a grid of at most 2^30 steps in a deviation."""
    sizes = []
    draw = correlated.gaussian_steps
    monkeypatch.setattr(correlated, "gaussian_steps", lambda *how: (sizes.append(how[2]), draw(*how))[1])
    factor = banded_root(4)
    _, steps = correlated_noise(factor)(SEEDS[:1], like(2), multiplier)
    assert sizes[0] / steps == pytest.approx(multiplier * math.sqrt(16**2 + 8**2 + 6**2 + 5**2))
    assert sizes[0] <= MOST_STEPS


def test_prefix_sums_have_less_error_than_with_independent_noise_at_the_same_price():
    """The mean over rounds of |n_1 + ... + n_t|^2, drawn 4,000 times, is that of the matrices."""
    factor, rounds, width = banded_root(4), 12, 4000
    found, steps = streamed(factor, rounds, width)
    apart = [np.array([0]) if number % 4 == 0 else np.array([], np.int64) for number in range(rounds)]
    assert highest_price(apart, 1, factor) == highest_price(apart, 1, (1,)) == 3
    sums = np.tril(np.ones((rounds, rounds)))
    error = ((sums @ found / steps) ** 2).mean()
    size = math.sqrt(sum(number**2 for number in factor))
    exact = ((sums @ np.linalg.inv(matrix(factor, rounds)) * size) ** 2).sum() / rounds
    assert error == pytest.approx(exact, rel=0.05)
    assert error < 0.55 * (rounds + 1) / 2  # independent noises of size 1 have 1, 2, ..., 12


def test_the_noise_does_not_grow_with_the_rounds():
    found, steps = streamed(banded_root(3), 12, 2000)
    assert found[-4:].std() / steps < 1.2 * found[:4].std() / steps


def test_a_later_round_is_the_same_from_the_start_in_turn_and_again():
    """A resumed run draws the rounds before it again; another run's rounds in between change nothing."""
    noise, anew = correlated_noise((8, 4, 3)), correlated_noise((8, 4, 3))
    others = [seed_for(ROOT, "other", number) for number in range(5)]
    for number in range(5):
        turn = noise(SEEDS[: number + 1], like(7), 2.0)[0]["w"]
        again = noise(SEEDS[: number + 1], like(7), 2.0)[0]["w"]
        assert torch.equal(turn, again)
        assert torch.equal(turn, correlated_noise((8, 4, 3))(SEEDS[: number + 1], like(7), 2.0)[0]["w"])
        if number == 2:
            noise(others[:3], like(7), 2.0)
            noise(SEEDS[:3], like(7), 3.0)
            noise(SEEDS[:3], like(8), 2.0)
    assert torch.equal(anew(SEEDS[:5], like(7), 2.0)[0]["w"], turn)


def test_other_tensors_and_other_bands_share_no_draws():
    def first(factor, name):
        return correlated_noise(factor)(SEEDS[:1], like(200, name=name), 1.0)[0][name].double()

    ours = first((8, 4, 3), "w")
    for other in (first((8, 4, 3), "v"), first((16, 8, 6, 5), "w")):
        assert abs(float(torch.corrcoef(torch.stack([ours, other]))[0, 1])) < 0.3


@pytest.mark.parametrize("factor", [(1,), (2, 1), (8, 4, 3), (16, 8, 6, 5)])
@pytest.mark.parametrize("rounds", [1, 4, 6])
def test_the_price_is_the_largest_move_of_all_patterns_and_signs(factor, rounds):
    """Brute force: the client comes in any rounds, and each of its moves points one way or the other."""
    whole, size = matrix(factor, rounds), sum(number**2 for number in factor)
    for pattern in itertools.product((False, True), repeat=rounds):
        signs = itertools.product(*[(-1, 1) if here else (0,) for here in pattern])
        largest = max(float(((whole @ np.array(one)) ** 2).sum()) for one in signs) / size
        cohorts = [np.array([0] if here else [], np.int64) for here in pattern]
        assert highest_price(cohorts, 1, factor) == pytest.approx(largest, rel=1e-12)


def test_moves_in_any_direction_cost_no_more():
    """2,000 times six moves of length 1 in three dimensions."""
    factor, draw = (8, 4, 3), np.random.Generator(np.random.PCG64(0))
    moves = draw.normal(size=(2000, 6, 3))
    moves /= np.linalg.norm(moves, axis=2, keepdims=True)
    found = ((matrix(factor, 6) @ moves) ** 2).sum(axis=(1, 2)) / sum(number**2 for number in factor)
    assert found.max() <= highest_price([np.array([0])] * 6, 1, factor)


def test_the_client_that_pays_most_may_come_less_often_and_sooner():
    """Client 0 comes in rounds 1, 3 and 5, client 1 in rounds 1 and 2: 2 + 2 * 2/5 where a = (2, 1) and they meet."""
    cohorts = [np.array(ids, np.int64) for ids in ([0, 1], [1], [0], [], [0], [])]
    assert highest_price(cohorts, 2, (2, 1)) == 3
    assert highest_price([np.array([1]), *cohorts], 2, (2, 1)) == pytest.approx(3 + 4 * 2 / 5)
    assert highest_price(cohorts[:2], 2, (2, 1)) == pytest.approx((2 * 2 + (1 + 2) ** 2) / 5)  # the last row is not yet
