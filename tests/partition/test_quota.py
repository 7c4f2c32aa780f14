"""Clients that draw from their own prior: the law of the naive loop, published draws, sizes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS, class_counts
from fedstill.partition.quota import draw_classes, feddyn_sizes, fill_order

CIFAR10 = np.repeat(np.arange(10), 5000)
FEDFTG_SEED = 1024


@pytest.mark.parametrize(
    ("beta", "client_0"),
    [
        (0.6, [4, 5, 68, 3, 98, 105, 12, 297, 3, 4]),
        pytest.param(0.3, [84, 1, 28, 181, 14, 4, 3, 13, 4, 267], marks=pytest.mark.slow),  # 42.5 million redraws
    ],
)
def test_fedftgs_seed_gives_fedftgs_first_client(beta: float, client_0: list[int]) -> None:
    sizes = feddyn_sizes(np.random.RandomState(0), 50_000, 100, sigma=0.0, fedftg=True)
    if sizes[0] != 599:
        pytest.skip("exp and log round differently here, so the sizes do too")
    parts = PARTITIONS["feddyn"](CIFAR10, 100, seed=0, beta=beta, fedftg_sizes=True, legacy_seed=FEDFTG_SEED)
    assert class_counts(parts, CIFAR10, 10)[0].tolist() == client_0


def test_a_replay_hands_out_every_sample_once() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 3, 7], 50))
    parts = PARTITIONS["feddyn"](labels, 6, seed=0, beta=0.1, legacy_seed=5)
    assert sorted(np.concatenate(parts).tolist()) == list(range(150))
    assert [len(part) for part in parts] == [25] * 6


def naive_fill(rng: np.random.Generator, priors: np.ndarray, sizes: np.ndarray, stock: np.ndarray) -> np.ndarray:
    """The released loop, redraws and all: class counts (clients, classes)."""
    cumulated, left, stock = np.cumsum(priors, axis=1), sizes.copy(), stock.copy()
    counts = np.zeros(priors.shape, int)
    while left.sum():
        client = rng.integers(len(left))
        if left[client] <= 0:
            continue
        left[client] -= 1
        c = np.argmax(rng.uniform() <= cumulated[client])
        while stock[c] <= 0:
            c = np.argmax(rng.uniform() <= cumulated[client])
        stock[c] -= 1
        counts[client, c] += 1
    return counts


def fast_fill(rng: np.random.Generator, priors: np.ndarray, sizes: np.ndarray, stock: np.ndarray) -> np.ndarray:
    order = fill_order(rng, sizes)
    classes = draw_classes(rng, order, log_priors=np.log(priors), stock=stock)
    counts = np.zeros(priors.shape, int)
    np.add.at(counts, (order, classes), 1)
    return counts


@pytest.mark.slow
def test_filling_follows_the_law_of_the_naive_redraws() -> None:
    priors = np.array([[0.8, 0.15, 0.05], [0.7, 0.1, 0.2], [0.1, 0.2, 0.7], [0.05, 0.9, 0.05]])
    sizes, stock = np.array([6, 3, 5, 4]), np.array([5, 4, 9])
    draws = []
    for fill, seed, count in ((naive_fill, 1, 1200), (fast_fill, 2, 4000)):
        rng = np.random.default_rng(seed)
        draws.append(np.array([fill(rng, priors, sizes, stock) for _ in range(count)]))
    p_values = []
    for client in range(4):
        for c in range(3):
            table = np.array([np.bincount(d[:, client, c], minlength=10) for d in draws])
            table = table[:, table.min(axis=0) > 5]
            p_values.append(stats.chi2_contingency(table).pvalue)
    assert min(p_values) > 0.002  # 12 tests


def test_two_clients_and_two_samples_have_the_exact_probability() -> None:
    # Client 0 first (1/2): it takes class 0 with 0.9. Client 1 first: it leaves class 0 with 1 - 0.6.
    priors, ones = np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([1, 1])
    rng = np.random.default_rng(8)
    hits = sum(fast_fill(rng, priors, ones, ones)[0, 0] for _ in range(4000))
    assert stats.binomtest(int(hits), 4000, 0.5 * 0.9 + 0.5 * 0.4).pvalue > 0.01


def test_the_next_client_is_uniform_among_those_not_full() -> None:
    # Sizes (2, 1): 0 0 1 and 0 1 0 have probability 1/4 each, 1 0 0 has 1/2 (a shuffle would give 1/3 each).
    rng = np.random.default_rng(4)
    orders = [tuple(fill_order(rng, np.array([2, 1])).tolist()) for _ in range(4000)]
    seen = [orders.count(order) for order in ((0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert sum(seen) == 4000
    assert stats.chisquare(seen, [1000, 1000, 2000]).pvalue > 0.01


def test_a_prior_without_mass_on_what_is_left_still_fills_the_client() -> None:
    log_priors = np.array([[0.0, -2000.0, -3000.0]])  # exp(-2000) is 0 in floats
    classes = draw_classes(np.random.default_rng(0), np.zeros(6, int), log_priors=log_priors, stock=np.array([2, 3, 1]))
    assert classes.tolist() == [0, 0, 1, 1, 1, 2]


def test_exhausted_classes_are_never_drawn_again() -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        stock = rng.integers(1, 30, size=4)
        order = rng.integers(3, size=stock.sum())
        classes = draw_classes(rng, order, log_priors=rng.normal(scale=3, size=(3, 4)), stock=stock)
        assert np.bincount(classes, minlength=4).tolist() == stock.tolist()


def test_feddyn_sizes_are_equal_and_the_first_client_takes_the_remainder() -> None:
    labels = np.repeat(np.arange(3), 41)  # 123 = 10 * 12 + 3
    assert [len(part) for part in PARTITIONS["feddyn"](labels, 10, seed=0)] == [15] + [12] * 9


def test_fedftg_sizes_truncate_and_give_what_is_missing_to_the_first_client() -> None:
    sizes = feddyn_sizes(np.random.default_rng(0), 50_000, 100, sigma=0.0, fedftg=True)
    assert sizes.sum() == 50_000
    assert len(set(sizes[1:].tolist())) == 1
    assert sizes[1] in (499, 500)  # depends on how exp(log 500) rounds
    assert sizes[0] == 50_000 - 99 * sizes[1]


def test_sigma_spreads_the_sizes_and_keeps_their_sum() -> None:
    sizes = [len(part) for part in PARTITIONS["feddyn"](CIFAR10, 50, seed=1, sigma=0.8)]
    assert sum(sizes) == 50_000
    assert np.log(sizes).std() == pytest.approx(0.8, abs=0.25)


def test_a_negative_sigma_names_its_key() -> None:
    with pytest.raises(FedstillError, match=r"partition\.sigma"):
        PARTITIONS["feddyn"](CIFAR10, 10, seed=0, sigma=-0.1)


def test_hsu_concentrations_sum_to_alpha() -> None:
    # q ~ Dir(alpha prior): the variance of q_c is prior_c (1 - prior_c) / (alpha + 1).
    labels = np.repeat([0, 1], [30_000, 10_000])
    parts = PARTITIONS["hsu"](labels, 400, seed=2, alpha=3.0, size=50)
    shares = class_counts(parts, labels, 2)[:, 0] / 50
    expected = 0.75 * 0.25 / 4
    noise = 0.75 * 0.25 * (3 / 4) / 50  # binomial variance around q
    assert shares.mean() == pytest.approx(0.75, abs=0.04)
    assert shares.var() == pytest.approx(expected + noise, rel=0.2)


def test_hsu_late_clients_take_what_is_left() -> None:
    labels = np.repeat(np.arange(5), 100)
    parts = PARTITIONS["hsu"](labels, 10, seed=0, alpha=0.1)
    assert class_counts(parts, labels, 5).sum(axis=0).tolist() == [100] * 5


def test_hsu_asked_for_too_much_names_its_key() -> None:
    with pytest.raises(FedstillError, match=r"partition\.size = 60 .* lower it to 50"):
        PARTITIONS["hsu"](np.repeat(np.arange(5), 100), 10, seed=0, size=60)


def test_a_pathological_tail_takes_no_time() -> None:
    labels = np.repeat(np.arange(100), 500)
    parts = PARTITIONS["feddyn"](labels, 100, seed=0, beta=0.01)  # the released loop would redraw for hours
    assert [len(part) for part in parts] == [500] * 100
