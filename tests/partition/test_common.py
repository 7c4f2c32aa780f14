"""Partitions that took long are drawn once for the same labels and options."""

import numpy as np
import pytest

from fedstill.partition import common as module
from fedstill.partition.common import cached_parts

LABELS = np.array([0, 0, 1, 1, 2, 2])
PARTS = [np.array([3, 0]), np.array([], np.int64), np.array([1, 2, 4, 5])]


@pytest.fixture
def draws(monkeypatch, tmp_path):
    """How often parts were drawn; every draw counts as slow."""
    monkeypatch.setattr(module, "SLOW", -1.0)
    count = []

    def ask(labels=LABELS, **identity):
        def build():
            count.append(1)
            return PARTS

        found = cached_parts(build, labels, {"scheme": "lda", **identity}, cache_dir=tmp_path)
        assert [part.tolist() for part in found] == [part.tolist() for part in PARTS]
        return len(count)

    return ask


def test_the_second_time_nothing_is_drawn(draws):
    assert draws() == 1
    assert draws() == 1


def test_other_labels_and_other_options_are_other_parts(draws):
    draws()
    assert draws(labels=LABELS[::-1]) == 2
    assert draws(alpha=0.1) == 3
    assert draws(alpha=0.2) == 4


def test_what_is_fast_is_not_stored(draws, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SLOW", 100.0)
    assert draws() == 1
    assert draws() == 2
    assert not list(tmp_path.iterdir())
