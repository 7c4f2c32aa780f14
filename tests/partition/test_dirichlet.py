"""Worked numbers and edges of the schemes without a smallest-size loop."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS, class_counts
from fedstill.partition import published_streams as legacy
from fedstill.partition.by_class import cut_evenly
from fedstill.partition.common import keep_large
from fedstill.partition.dirichlet import balanced_counts, column_counts, draw_attempts, floor_counts, sinkhorn
from fedstill.partition.skew import top_class_share

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
PUBLISHED_SEED = 19940817


def counts_of(name: str, labels: np.ndarray, clients: int, **options: object) -> np.ndarray:
    options = {"seed": 0, **options}
    return class_counts(PARTITIONS[name](labels, clients, **options), labels, int(labels.max()) + 1)


def test_iid_cuts_100_000_clients_without_loss() -> None:
    sizes = [len(part) for part in PARTITIONS["iid"](np.zeros(250_000, int), 100_000, seed=0)]
    assert sorted(set(sizes)) == [2, 3]
    assert sum(sizes) == 250_000


def test_stratified_iid_deals_each_class_evenly() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 503)
    counts = counts_of("iid", labels, 7, stratified=True)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(axis=1)) <= 1
    assert counts.sum() == 503


@pytest.mark.parametrize(
    ("per_client", "client_0", "distinct"),
    [
        (2, {1: 250, 4: 250}, 1.94),
        (5, {2: 100, 4: 100, 7: 200, 8: 100}, 4.17),
        (10, {0: 50, 1: 50, 2: 50, 4: 200, 7: 100, 8: 50}, 6.37),
    ],
)
def test_the_published_seed_deals_the_published_shards(
    per_client: int, client_0: dict[int, int], distinct: float
) -> None:
    counts = counts_of("shards", CIFAR10, 100, shards_per_client=per_client, legacy_seed=PUBLISHED_SEED)
    assert {c: int(n) for c, n in enumerate(counts[0]) if n} == client_0
    assert (counts.sum(axis=1) == 500).all()
    assert round(float((counts > 0).sum(axis=1).mean()), 2) == distinct


def test_the_published_shards_of_three_keep_their_leftovers() -> None:
    counts = counts_of("shards", CIFAR10, 100, shards_per_client=3, legacy_seed=PUBLISHED_SEED)
    extra = counts[0] - np.array([0, 0, 0, 0, 332, 0, 0, 0, 166, 0])  # 166 a shard, and one leftover for 2 in 3
    assert ((extra >= 0) & (extra <= np.array([0, 0, 0, 0, 2, 0, 0, 0, 1, 0]))).all()
    assert counts.sum() == 50_000
    assert round(float((counts > 0).sum(axis=1).mean()), 2) == 2.74


def test_cifar100_shards_have_the_published_mean_of_distinct_labels() -> None:
    counts = counts_of("shards", CIFAR100, 100, shards_per_client=10, legacy_seed=PUBLISHED_SEED)
    assert round(float((counts > 0).sum(axis=1).mean()), 2) == 9.49


def test_shards_are_consecutive_and_the_first_take_the_leftovers() -> None:
    pieces = cut_evenly(np.arange(100, 111), 4)
    assert [piece.tolist() for piece in pieces] == [[100, 101, 108], [102, 103, 109], [104, 105, 110], [106, 107]]


def test_a_client_holds_whole_shards_of_at_most_s_classes() -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 40))
    counts = counts_of("shards", labels, 10, shards_per_client=3)  # 6 shards a class, of 6 or 7 samples
    assert ((counts > 0).sum(axis=1) <= 3).all()
    assert counts.sum() == 200
    shards = np.rint(counts / (40 / 6))
    assert (shards.sum(axis=1) == 3).all()
    assert (shards.sum(axis=0) == 6).all()


@pytest.mark.parametrize(("clients", "per_client"), [(7, 2), (3, 1), (10, 0)])
def test_shards_that_do_not_deal_out_evenly_name_their_key(clients: int, per_client: int) -> None:
    with pytest.raises(FedstillError, match=r"partition\.shards_per_client"):
        PARTITIONS["shards"](CIFAR10, clients, seed=0, shards_per_client=per_client)


def test_mrtf_counts_of_the_worked_example() -> None:
    draws = np.array([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]])
    assert column_counts(draws, np.array([10, 10])).tolist() == [[5, 2], [1, 5], [4, 3]]


def test_mrtf_rounding_cannot_hand_out_more_than_there_is() -> None:
    counts = column_counts(np.full((3, 1), 1 / 3), np.array([5]))  # 1.67 each -> 2, 2, and one left
    assert counts.ravel().tolist() == [2, 2, 1]


def test_mrtf_loses_samples_to_rounding_as_reported() -> None:
    # CIFAR-100 on 1000 clients, alpha = 1: 42.6k of 50k are handed out.
    handed_out = [counts_of("mrtf", CIFAR100, 1000, seed=seed, alpha=1.0, min_size=0).sum() for seed in range(3)]
    assert np.mean(handed_out) == pytest.approx(42_600, abs=150)


def test_mrtf_drops_small_clients() -> None:
    labels = np.repeat(np.arange(10), 60)
    everyone = PARTITIONS["mrtf"](labels, 100, seed=0, alpha=0.1, min_size=0)
    kept = PARTITIONS["mrtf"](labels, 100, seed=0, alpha=0.1, min_size=5)
    assert [len(part) for part in kept] == [len(part) for part in everyone if len(part) >= 5]
    assert len(kept) < 100


@pytest.mark.parametrize(("name", "options"), [("mrtf", {"alpha": 1.0}), ("label_split", {"classes_per_client": 3})])
def test_a_fifth_of_each_clients_rows_is_left_unused_as_in_mrtfs_code(name: str, options: dict[str, float]) -> None:
    whole = PARTITIONS[name](CIFAR10, 100, seed=0, **options)
    left = PARTITIONS[name](CIFAR10, 100, seed=0, held_out=0.2, **options)
    assert [len(part) for part in left] == [len(part) - len(part) // 5 for part in whole]
    assert all(set(some.tolist()) < set(all_.tolist()) for some, all_ in zip(left, whole, strict=True))
    dropped = [np.setdiff1d(all_, some) for some, all_ in zip(left, whole, strict=True)]
    spread = [np.mean(CIFAR10[rows]) - np.mean(CIFAR10[all_]) for rows, all_ in zip(dropped, whole, strict=True)]
    assert abs(np.mean(spread)) < 0.15  # a random fifth, not its first or last classes
    assert [part.tolist() for part in PARTITIONS[name](CIFAR10, 100, seed=0, held_out=0.0, **options)] == [
        part.tolist() for part in whole
    ]


def test_at_least_one_row_is_held_out_and_one_is_left() -> None:
    parts = [np.arange(4), np.array([7]), np.arange(0), np.arange(29)]
    assert [part.tolist() for part in keep_large(parts, 0, held_out=0.2)] == [[0, 1, 2], [7], [], list(range(24))]
    assert [len(part) for part in keep_large([np.arange(100)], 0, held_out=0.29)] == [
        71
    ]  # 0.29 * 100 is 28.999999999999996
    assert keep_large(parts, 0, held_out=0.0) == parts


def test_the_papers_class_counts_are_those_of_the_80_percent_that_clients_train_on() -> None:
    """Classes with 5 or more samples at alpha = 0.1: 3.73 (CIFAR-10), 17.1 (CIFAR-100); with all rows 3.9 and 18.7."""
    for labels, trained, everything in ((CIFAR10, 3.73, 3.9), (CIFAR100, 17.1, 18.7)):
        for held_out, wanted in ((0.2, trained), (0.0, everything)):
            counts = [counts_of("mrtf", labels, 100, seed=s, alpha=0.1, held_out=held_out) for s in range(8)]
            seen = np.mean([(count >= 5).sum(axis=1).mean() for count in counts])
            assert seen == pytest.approx(wanted, rel=0.025)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("name", ["mrtf", "label_split"])
def test_an_impossible_share_to_hold_out_names_its_key(name: str, share: float) -> None:
    with pytest.raises(FedstillError, match=r"partition\.held_out"):
        PARTITIONS[name](CIFAR10, 10, seed=0, held_out=share)


def test_mrtf_without_any_client_left_says_so() -> None:
    with pytest.raises(FedstillError, match=r"partition\.min_size = 50"):
        PARTITIONS["mrtf"](np.repeat(np.arange(2), 20), 5, seed=0, min_size=50)


def test_mrtf_hands_out_classes_that_nobody_wants() -> None:
    counts = counts_of(
        "mrtf", CIFAR100, 5, alpha=1e-6
    )  # five clients want five classes: the released code divides by 0
    assert counts.sum(axis=0).tolist() == [500] * 100


def test_fedaux_with_an_alpha_that_starves_clients_names_its_key() -> None:
    with pytest.raises(FedstillError, match=r"partition\.alpha = 1e-06"):
        PARTITIONS["fedaux"](CIFAR10, 100, seed=0, alpha=1e-6)


def test_sinkhorn_of_the_worked_example() -> None:
    balanced = sinkhorn(np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))
    assert balanced == pytest.approx(
        np.array([[0.595119, 0.294678, 0.110203], [0.071548, 0.371989, 0.556463]]), abs=1e-6
    )
    assert balanced.sum(axis=0) == pytest.approx(2 / 3)


def test_floor_counts_of_the_worked_example() -> None:
    assert floor_counts(np.array([[0.25, 0.35, 0.4]]), np.array([10])).ravel().tolist() == [2, 4, 4]


@pytest.mark.parametrize("clients", [10, 40])
@pytest.mark.parametrize(
    ("alpha", "low", "high"),
    [(0.01, 0.85, 0.96), (0.04, 0.71, 0.83), (0.16, 0.46, 0.60), (10.24, 0.145, 0.156), (100, 0.113, 0.118)],
)
def test_fedaux_clients_are_equal_in_size_and_as_skewed_as_reported(
    clients: int, alpha: float, low: float, high: float
) -> None:
    draws = [counts_of("fedaux", CIFAR10, clients, seed=seed, alpha=alpha) for seed in range(5)]
    for counts in draws:
        assert counts.sum() == 50_000
        assert np.abs(counts.sum(axis=1) - 50_000 / clients).max() <= 10
    assert low < np.mean([top_class_share(counts) for counts in draws]) < high


def test_fedaux_cuts_each_class_in_file_order() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 300)
    parts = PARTITIONS["fedaux"](labels, 5, seed=0, alpha=1.0)
    for c in range(3):
        rows = np.concatenate([part[labels[part] == c] for part in parts])
        assert rows.tolist() == np.flatnonzero(labels == c).tolist()


def test_label_split_gives_whole_equal_shares() -> None:
    counts = counts_of("label_split", CIFAR10, 100, classes_per_client=2)  # every class 20 times, 250 each
    assert sorted(np.unique(counts).tolist()) == [0, 250]
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert counts.sum() == 50_000


@pytest.mark.parametrize(("labels", "per_client", "share"), [(CIFAR10, 3, 0.041), (CIFAR100, 30, 0.182)])
def test_label_split_draws_a_class_twice_as_often_as_reported(
    labels: np.ndarray, per_client: int, share: float
) -> None:
    draws = [counts_of("label_split", labels, 1000, seed=seed, classes_per_client=per_client) for seed in range(4)]
    twice = [((counts > 0).sum(axis=1) < per_client).mean() for counts in draws]
    assert np.mean(twice) == pytest.approx(share, abs=0.015)


def test_label_split_drops_remainders_and_small_clients() -> None:
    labels = np.repeat(np.arange(4), 23)
    parts = PARTITIONS["label_split"](labels, 6, seed=0, classes_per_client=2, min_size=5)  # 3 holders, 7 each
    assert [len(part) for part in parts] == [14] * 6
    with pytest.raises(FedstillError, match=r"partition\.min_size"):
        PARTITIONS["label_split"](labels, 6, seed=0, classes_per_client=2, min_size=15)


@pytest.mark.parametrize(("clients", "per_client"), [(3, 3), (3, 11), (3, 0)])
def test_label_split_that_cannot_place_all_classes_names_its_key(clients: int, per_client: int) -> None:
    with pytest.raises(FedstillError, match=r"partition\.classes_per_client"):
        PARTITIONS["label_split"](CIFAR10, clients, seed=0, classes_per_client=per_client)


def test_bias_of_the_paper_on_ten_classes() -> None:
    labels = np.repeat(np.arange(10), 2000)
    counts = counts_of("bias", labels, 100, bias=0.8, size=600)
    assert (np.sort(counts, axis=1) == [13] * 6 + [14] * 3 + [480]).all()
    assert np.bincount(counts.argmax(axis=1)).tolist() == [10] * 10  # round-robin favourites


def test_bias_of_the_paper_on_a_hundred_classes() -> None:
    counts = counts_of("bias", np.repeat(np.arange(100), 200), 100, bias=0.8, size=100)
    assert (np.sort(counts, axis=1) == [0] * 79 + [1] * 20 + [80]).all()
    assert np.bincount(counts.argmax(axis=1)).tolist() == [1] * 100


def test_two_classes_share_evenly_and_an_odd_sample_goes_to_one() -> None:
    labels = np.repeat(np.arange(10), 2000)
    assert (np.sort(counts_of("n_class", labels, 100, size=600), axis=1)[:, -2:] == 300).all()
    assert (np.sort(counts_of("n_class", labels, 100, size=601), axis=1)[:, -2:] == [300, 301]).all()


def test_queues_use_every_sample_before_they_repeat_one() -> None:
    labels = np.zeros(50, int)
    parts = PARTITIONS["n_class"](labels, 10, seed=0, classes_per_client=1, size=20)  # 200 draws from 50
    uses = np.bincount(np.concatenate(parts), minlength=50)
    assert uses.sum() == 200
    assert np.ptp(uses) <= 1
    assert all(len(np.unique(part)) == 20 for part in parts)  # 20 does not divide 50: refills inside a client


@pytest.mark.parametrize("name", ["bias", "n_class"])
def test_a_quota_larger_than_a_class_names_its_key(name: str) -> None:
    with pytest.raises(FedstillError, match=r"partition\.size asks for \d+ different samples of a class that has 30"):
        PARTITIONS[name](np.repeat(np.arange(3), 30), 3, seed=0, size=80)


@pytest.mark.parametrize(
    ("name", "options"), [("bias", {"bias": 1.2}), ("n_class", {"classes_per_client": 11}), ("bias", {"size": 0})]
)
def test_an_impossible_bias_names_its_key(name: str, options: dict[str, float]) -> None:
    (key,) = options
    with pytest.raises(FedstillError, match=rf"partition\.{key}"):
        PARTITIONS[name](CIFAR10, 10, seed=0, **options)


def test_natural_makes_one_client_of_each_key() -> None:
    keys = np.array(["bo", "al", "bo", "cy", "al", "bo"])
    parts = PARTITIONS["natural"](np.zeros(6, int), 0, seed=0, keys=keys)
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]
    large = PARTITIONS["natural"](np.zeros(6, int), 2, seed=0, keys=keys, min_size=2)
    assert [part.tolist() for part in large] == [[1, 4], [0, 2, 5]]


def test_natural_keeps_a_random_choice_of_owners() -> None:
    keys = np.repeat(np.arange(20), 3)
    kept = [PARTITIONS["natural"](np.zeros(60, int), 5, seed=seed, keys=keys) for seed in range(20)]
    owners = [tuple(int(keys[part[0]]) for part in parts) for parts in kept]
    assert all(len(set(chosen)) == 5 and list(chosen) == sorted(chosen) for chosen in owners)
    assert len(set(owners)) > 1
    assert set().union(*owners) == set(range(20))


@pytest.mark.parametrize(
    ("clients", "keys", "min_size", "named"),
    [(4, [0, 0, 1, 2], 1, "clients"), (0, [0, 0, 1, 2], 3, "clients"), (2, [0, 1], 1, "keys")],
)
def test_natural_without_enough_owners_names_its_key(clients: int, keys: list[int], min_size: int, named: str) -> None:
    with pytest.raises(FedstillError, match=rf"partition\.{named}"):
        PARTITIONS["natural"](np.zeros(4, int), clients, seed=0, keys=np.array(keys), min_size=min_size)


# The Dirichlet split with the smallest-size rule: published draws, the same law as the naive loop, edges.


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
