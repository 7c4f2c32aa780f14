"""The Dirichlet split with the smallest-size rule: published draws, the same law as the naive loop, edges."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS, class_counts
from fedstill.partition import published_streams as legacy
from fedstill.partition.dirichlet import balanced_counts, draw_attempts

CIFAR10 = np.repeat(np.arange(10), 5000)
PUBLISHED_SEED = 19940817

SIZES, CLIENTS, ALPHA, MIN_SIZE = np.array([24, 15, 20]), 5, 0.3, 8  # accepts about 1 attempt in 20


def published(alpha: float) -> np.ndarray:
    parts = PARTITIONS["lda"](CIFAR10, 100, seed=0, alpha=alpha, legacy_seed=PUBLISHED_SEED)
    return class_counts(parts, CIFAR10, 10)


@pytest.mark.parametrize(
    ("alpha", "client_0"),
    [
        (0.1, [0, 0, 6, 49, 34, 188, 0, 2, 2, 0]),
        (0.3, [258, 6, 133, 5, 204, 0, 0, 0, 0, 0]),
        (0.5, [239, 14, 136, 15, 0, 0, 31, 19, 185, 0]),
    ],
)
def test_the_published_seed_gives_the_published_clients(alpha: float, client_0: list[int]) -> None:
    assert published(alpha)[0].tolist() == client_0


@pytest.mark.parametrize(
    ("alpha", "sizes", "present"),
    [(0.1, (22, 421.5, 2349), 4.28), (0.3, (34, 503.5, 1317), 6.88), (0.5, (134, 506.5, 1004), 7.98)],
)
def test_the_published_seed_gives_the_published_table(alpha: float, sizes: tuple[float, ...], present: float) -> None:
    counts = published(alpha)
    totals = counts.sum(axis=1)
    assert (totals.min(), np.median(totals), totals.max()) == sizes
    assert round(float((counts > 0).sum(axis=1).mean()), 2) == present
    if alpha == 0.1:
        assert totals[:5].tolist() == [281, 1062, 716, 410, 675]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each attempt of a replay."""
    made: list[int] = []
    attempt = legacy._attempt
    monkeypatch.setattr(legacy, "_attempt", lambda *given: (made.append(1), attempt(*given))[1])
    return made


@pytest.mark.parametrize(("alpha", "expected"), [(0.1, 2), (0.3, 1), (0.5, 1)])
def test_the_published_seed_needs_the_published_number_of_attempts(
    alpha: float, expected: int, attempts: list[int]
) -> None:
    published(alpha)
    assert len(attempts) == expected


@pytest.mark.slow
def test_the_published_seed_accepts_attempt_19126_at_alpha_005(attempts: list[int]) -> None:
    counts = published(0.05)
    assert len(attempts) == 19126
    assert counts.sum(axis=1)[:5].tolist() == [420, 411, 463, 561, 63]
    assert counts[0].tolist() == [0, 4, 67, 196, 153, 0, 0, 0, 0, 0]
    assert counts[1].tolist() == [0, 125, 99, 0, 0, 35, 0, 152, 0, 0]


def test_replayed_rows_are_a_partition_of_the_data() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 100))
    parts = PARTITIONS["lda"](labels, 5, seed=0, alpha=0.5, legacy_seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    assert min(len(part) for part in parts) >= 10


def naive_cuts(rng: np.random.Generator, held: np.ndarray, size: int) -> np.ndarray:
    """Where one class is cut. Behind the last open client all is handed out: floats alone may stop at 1 - 1e-16."""
    still_open = held < SIZES.sum() / CLIENTS
    shares = rng.dirichlet(np.repeat(ALPHA, CLIENTS)) * still_open
    cuts = (np.cumsum(shares / shares.sum()) * size).astype(int)
    cuts[np.flatnonzero(still_open)[-1] :] = size
    return cuts


def naive_attempt(rng: np.random.Generator) -> np.ndarray:
    """One pass over the classes with lists of rows, as published: (clients, classes)."""
    held: list[list[int]] = [[] for _ in range(CLIENTS)]
    counts = np.zeros((CLIENTS, len(SIZES)), int)
    for c, size in enumerate(SIZES):
        cuts = naive_cuts(rng, np.array([len(rows) for rows in held]), size)
        for k, piece in enumerate(np.split(np.arange(size), cuts[:-1])):
            held[k] += piece.tolist()
            counts[k, c] = len(piece)
    return counts


def naive(rng: np.random.Generator) -> np.ndarray:
    while True:
        counts = naive_attempt(rng)
        if counts.sum(axis=1).min() >= MIN_SIZE:
            return counts


def ours(rng: np.random.Generator) -> np.ndarray:
    return balanced_counts(rng, SIZES, clients=CLIENTS, alpha=ALPHA, min_size=MIN_SIZE)


def redraws_the_last_class_only(rng: np.random.Generator) -> np.ndarray:
    """A tempting but wrong shortcut: keep the first classes and redraw the last one."""
    while True:
        start = naive_attempt(rng)
        for _ in range(200):
            counts = start.copy()
            cuts = naive_cuts(rng, start[:, :-1].sum(axis=1), SIZES[-1])
            counts[:, -1] = np.diff(cuts, prepend=0)
            if counts.sum(axis=1).min() >= MIN_SIZE:
                return counts


def smallest_p_value(one: np.ndarray, other: np.ndarray) -> float:
    """Over chi-square tests of 12 statistics of (draws, clients, classes) samples."""

    def statistics(draws: np.ndarray) -> list[np.ndarray]:
        sizes = draws.sum(axis=2)
        ends = [
            sizes[:, 0],
            sizes[:, 2],
            sizes[:, -1],
            draws[:, 0, 0],
            draws[:, -1, 0],
            draws[:, 1, 1],
            draws[:, -1, -1],
        ]
        shapes = [
            sizes.min(axis=1),
            sizes.max(axis=1),
            sizes.argmax(axis=1),
            (draws == 0).sum(axis=(1, 2)),
            (draws[:, :, 0] == 0).sum(axis=1),
        ]
        return ends + shapes

    return min(chi_square(a, b) for a, b in zip(statistics(one), statistics(other), strict=True))


def chi_square(one: np.ndarray, other: np.ndarray) -> float:
    """Homogeneity of two samples of integers, in cells of at least 20 draws."""
    both = np.sort(np.concatenate([one, other]))
    edges = np.unique(both[:: max(len(both) // 8, 20)])
    table = np.array([np.bincount(np.searchsorted(edges, x, "right"), minlength=len(edges) + 1) for x in (one, other)])
    table = table[:, table.sum(axis=0) > 0]
    return float(stats.chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0


def sample(sampler: Callable[[np.random.Generator], np.ndarray], draws: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([sampler(rng) for _ in range(draws)])


@pytest.fixture(scope="module")
def naive_draws() -> np.ndarray:
    return sample(naive, 800, seed=11)


@pytest.mark.slow
def test_counts_follow_the_law_of_the_naive_loop(naive_draws: np.ndarray) -> None:
    assert smallest_p_value(naive_draws, sample(ours, 3000, seed=12)) > 0.002  # 12 tests


@pytest.mark.slow
def test_that_comparison_would_see_a_wrong_law(naive_draws: np.ndarray) -> None:
    assert smallest_p_value(naive_draws, sample(redraws_the_last_class_only, 400, seed=13)) < 1e-4


def test_attempts_are_accepted_as_often_as_in_the_naive_loop() -> None:
    rng = np.random.default_rng(5)
    slow = sum(naive_attempt(rng).sum(axis=1).min() >= MIN_SIZE for _ in range(4000))
    attempts = draw_attempts(rng, SIZES, attempts=40_000, clients=CLIENTS, alpha=ALPHA)
    fast = (attempts.sum(axis=1).min(axis=1) >= MIN_SIZE).sum()
    assert 0.02 < fast / 40_000 < 0.1
    assert stats.fisher_exact([[slow, 4000 - slow], [fast, 40_000 - fast]]).pvalue > 0.01


def test_open_shares_are_dirichlet_where_gamma_draws_underflow() -> None:
    # At alpha = 1e-4 one client takes the whole class, and each is equally likely to: Dir(a) -> uniform vertex.
    counts = draw_attempts(np.random.default_rng(3), np.array([50]), attempts=4000, clients=3, alpha=1e-4)[:, 0]
    winners = np.bincount(counts.argmax(axis=1), minlength=3)
    assert (counts.max(axis=1) == 50).mean() > 0.99
    assert stats.chisquare(winners).pvalue > 0.01


def test_full_clients_get_nothing_more() -> None:
    sizes = np.array([40, 7, 30, 23, 51])
    attempts = draw_attempts(np.random.default_rng(1), sizes, attempts=3000, clients=4, alpha=0.2)
    held = np.zeros((3000, 4))
    for c in range(len(sizes)):
        assert (attempts[:, c][held >= sizes.sum() / 4] == 0).all()
        held += attempts[:, c]
    assert (attempts.sum(axis=2) == sizes).all()


def test_every_client_gets_the_smallest_size_at_alpha_005_within_seconds() -> None:
    parts = PARTITIONS["lda"](CIFAR10, 100, seed=3, alpha=0.05)
    assert min(len(part) for part in parts) >= 10
    assert sum(len(part) for part in parts) == 50_000


def test_a_smallest_size_that_needs_more_samples_than_there_are_is_an_error() -> None:
    with pytest.raises(FedstillError, match=r"partition\.min_size = 30"):
        PARTITIONS["lda"](np.repeat(np.arange(2), 50), 4, seed=0, min_size=30)


def test_a_hopeless_alpha_gives_up_and_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fedstill.partition.dirichlet"], "_MOST_CELLS", 10**6)
    with pytest.raises(FedstillError, match=r"partition\.alpha = 0\.001 left \d+ or more of 50 clients"):
        PARTITIONS["lda"](np.repeat(np.arange(4), 200), 50, seed=0, alpha=0.001, min_size=10)


def test_the_papers_least_size_is_asked_only_of_data_that_can_meet_it() -> None:
    scarce, ample = np.repeat(np.arange(10), 140), np.repeat(np.arange(10), 1000)
    assert sum(map(len, PARTITIONS["lda"](scarce, 100, seed=0, alpha=0.1))) == 1400
    assert min(map(len, PARTITIONS["lda"](ample, 100, seed=0, alpha=0.5))) >= 10


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_the_legacy_range_is_an_error(seed: int) -> None:
    with pytest.raises(FedstillError, match=r"partition\.legacy_seed"):
        PARTITIONS["lda"](CIFAR10, 10, seed=0, legacy_seed=seed)


def test_a_replay_survives_shares_that_underflow() -> None:
    labels = np.repeat(np.arange(3), 40)
    parts = PARTITIONS["lda"](labels, 3, seed=0, alpha=0.002, legacy_seed=4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))


def feddf_counts(clients: int, *, alpha: float, recut: bool, seed: int) -> np.ndarray:
    labels = np.repeat(np.arange(5), 600)
    return class_counts(PARTITIONS["feddf"](labels, clients, seed=seed, alpha=alpha, recut=recut), labels, 5)


@pytest.mark.parametrize("clients", [10, 20, 23])
def test_feddf_clients_have_half_the_mean_size_of_their_group(clients: int) -> None:
    counts = feddf_counts(clients, alpha=0.2, recut=False, seed=4)
    sizes = counts.sum(axis=1)
    assert len(sizes) == clients
    assert sizes.sum() == 3000
    for start in range(0, clients, 10):
        group = sizes[start : start + 10]
        assert group.min() >= group.sum() // (2 * len(group))


def test_feddf_recut_cuts_the_joined_lists_into_equal_slices() -> None:
    labels = np.repeat(np.arange(5), 600)
    drawn = np.concatenate(PARTITIONS["feddf"](labels, 23, seed=1, alpha=0.2, recut=False))
    recut = PARTITIONS["feddf"](labels, 23, seed=1, alpha=0.2, recut=True)
    assert [len(part) for part in recut] == [3000 // 23] * 23
    assert np.array_equal(np.concatenate(recut), drawn[: 23 * (3000 // 23)])


def test_feddf_recut_mixes_neighbours() -> None:
    def purity(recut: bool) -> float:
        counts = [feddf_counts(20, alpha=0.05, recut=recut, seed=seed) for seed in range(5)]
        return float(np.mean([(c.max(axis=1) / c.sum(axis=1)).mean() for c in counts]))

    assert purity(recut=True) < purity(recut=False) - 0.02


def test_feddf_needs_ten_clients() -> None:
    with pytest.raises(FedstillError, match=r"partition\.clients = 9"):
        PARTITIONS["feddf"](CIFAR10, 9, seed=0)
