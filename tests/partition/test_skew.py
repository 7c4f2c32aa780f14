"""Measures of a partition against values worked out by hand and from their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedstill.partition import class_counts, describe
from fedstill.partition.skew import label_entropy, pairwise_distance, size_gini, top_class_share

ALIKE = np.full((4, 5), 7)
APART = np.diag([9, 9, 9])

count_matrices = arrays(np.int64, st.tuples(st.integers(1, 8), st.integers(2, 6)), elements=st.integers(0, 50)).filter(
    lambda counts: counts.sum() > 0
)


def test_clients_that_are_alike_have_no_skew() -> None:
    assert label_entropy(ALIKE) == pytest.approx(1)
    assert top_class_share(ALIKE) == pytest.approx(1 / 5)
    assert size_gini(ALIKE) == pytest.approx(0)
    assert pairwise_distance(ALIKE) == (0, 0)


def test_clients_of_one_class_each_have_all_of_it() -> None:
    assert label_entropy(APART) == pytest.approx(0)
    assert top_class_share(APART) == pytest.approx(1)
    assert pairwise_distance(APART) == pytest.approx((1, 1))


def test_measures_of_a_worked_example() -> None:
    counts = np.array([[3, 1], [1, 1]])
    entropy = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert label_entropy(counts) == pytest.approx((entropy + 1) / 2)
    assert top_class_share(counts) == pytest.approx((0.75 + 0.5) / 2)
    assert size_gini(counts) == pytest.approx(1 / 6)  # sizes 4 and 2: |4 - 2| * 2 / (2 * 2 * 6)
    variation, hellinger = pairwise_distance(counts)
    assert variation == pytest.approx(0.25)
    assert hellinger == pytest.approx(np.sqrt(1 - np.sqrt(0.75 * 0.5) - np.sqrt(0.25 * 0.5)))


@given(counts=count_matrices)
def test_gini_is_the_mean_absolute_difference(counts: np.ndarray) -> None:
    sizes = counts.sum(axis=1)
    direct = np.abs(sizes[:, None] - sizes[None]).sum() / (2 * len(sizes) * sizes.sum())
    assert size_gini(counts) == pytest.approx(direct, abs=1e-12)


@given(counts=count_matrices, seed=st.integers(0, 1000))
def test_measures_do_not_depend_on_the_order_of_clients_or_classes(counts: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixed = rng.permutation(rng.permutation(counts, axis=0), axis=1)
    assert describe(mixed) == pytest.approx(describe(counts))


@given(counts=count_matrices)
def test_measures_stay_in_their_range_and_empty_clients_count_in_sizes_only(counts: np.ndarray) -> None:
    measures = describe(counts)
    for name in ("label_entropy", "top_class_share", "size_gini", "total_variation", "hellinger"):
        assert -1e-9 <= measures[name] <= 1 + 1e-9
    assert measures["hellinger"] ** 2 <= measures["total_variation"] + 1e-9  # H^2 <= TV, and Jensen
    with_empty = describe(np.vstack([counts, np.zeros((1, counts.shape[1]), int)]))
    assert with_empty["smallest"] == 0
    for name in ("label_entropy", "top_class_share", "classes_present", "total_variation"):
        assert with_empty[name] == pytest.approx(measures[name])


def test_sampled_pairs_estimate_the_mean_over_all_pairs() -> None:
    counts = np.random.default_rng(0).multinomial(50, np.full(5, 0.2), size=400)
    shares = counts / 50
    every = np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2
    exact = every.sum() / (400 * 399)
    assert pairwise_distance(counts, seed=1)[0] == pytest.approx(exact, rel=0.02)
    assert pairwise_distance(counts, seed=1) == pairwise_distance(counts, seed=1)
    assert pairwise_distance(counts, seed=1) != pairwise_distance(counts, seed=2)


def test_class_counts_keeps_empty_clients_and_absent_classes() -> None:
    parts = [np.array([0, 2]), np.array([], np.int64), np.array([1])]
    assert class_counts(parts, np.array([1, 0, 1]), 3).tolist() == [[0, 2, 0], [0, 0, 0], [1, 0, 0]]


def test_a_hundred_thousand_clients_are_described_by_all_measures() -> None:
    measures = describe(np.tile([[4, 0, 1]], (100_000, 1)))
    assert measures["clients"] == 100_000
    assert measures["top_class_share"] == pytest.approx(0.8)
    assert measures["total_variation"] == pytest.approx(0, abs=1e-12)
