"""D2C-FL's splits of a pool of 20,000: alike, biased, two classes; clients share samples, none has one twice."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.partition import PARTITIONS, SHARES_ROWS, class_counts

EVEN_POOL = np.repeat(np.arange(10), 2000)
DRAWN_POOL = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))[:20_000]  # as from CIFAR-10's 50,000
HUNDRED = np.random.default_rng(1).permutation(np.repeat(np.arange(100), 500))[:20_000]

every_pool = pytest.mark.parametrize("pool", [EVEN_POOL, DRAWN_POOL], ids=["even", "drawn"])
every_split = pytest.mark.parametrize(
    ("scheme", "keys", "wanted"),
    [
        ("n_class", {"classes_per_client": 10}, [60] * 10),  # IID
        ("bias", {"bias": 0.8}, [13] * 6 + [14] * 3 + [480]),
        ("n_class", {"classes_per_client": 2}, [0] * 8 + [300] * 2),
    ],
    ids=["iid", "0.8-bias", "2-class"],
)


@every_pool
@every_split
def test_a_hundred_clients_of_six_hundred_come_from_twenty_thousand(pool, scheme, keys, wanted):
    parts = PARTITIONS[scheme](pool, 100, seed=3, size=600, **keys)
    assert (np.sort(class_counts(parts, pool, 10), axis=1) == wanted).all()
    assert all(len(np.unique(part)) == 600 for part in parts)
    assert scheme in SHARES_ROWS


@every_pool
def test_alike_clients_use_every_sample_of_a_class_equally_often(pool):
    """Each class is asked 6,000 times: a sample is used 6,000 / n_c times, rounded down or up."""
    parts = PARTITIONS["n_class"](pool, 100, seed=3, size=600, classes_per_client=10)
    uses, sizes = np.bincount(np.concatenate(parts), minlength=len(pool)), np.bincount(pool)
    for c, size in enumerate(sizes):
        assert uses[pool == c].sum() == 6000
        assert set(uses[pool == c]) <= {6000 // size, -(-6000 // size)}


def test_alike_clients_of_a_hundred_classes_have_one_of_each():
    parts = PARTITIONS["n_class"](HUNDRED, 100, seed=3, size=100, classes_per_client=100)
    assert (class_counts(parts, HUNDRED, 100) == 1).all()


def test_alike_clients_are_not_all_the_same_client():
    parts = PARTITIONS["n_class"](EVEN_POOL, 100, seed=3, size=600, classes_per_client=10)
    first, *others = (set(part.tolist()) for part in parts)
    assert all(len(first & other) < 600 for other in others)
    assert sum(len(first & other) for other in others) == pytest.approx(2 * 600, abs=60)  # used three times in all


def test_a_size_that_the_classes_do_not_divide_gives_odd_samples_to_distinct_classes():
    parts = PARTITIONS["n_class"](EVEN_POOL, 100, seed=3, size=604, classes_per_client=10)
    assert (np.sort(class_counts(parts, EVEN_POOL, 10), axis=1) == [60] * 6 + [61] * 4).all()
