"""What methods with a generator share, against the worked numbers of the cards."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from server_rounds import network, server_round

from fedstill.methods.data_free.inventing import (
    asked_for,
    class_shares,
    diversity,
    gaussian_noise,
    label_counts,
    quota_labels,
)


def counted(labels, classes):
    return torch.bincount(labels, minlength=classes).tolist()


@pytest.mark.parametrize(
    ("total", "counts", "wanted"), [(10, [1, 1, 1], [3, 3, 4]), (500, [300, 0, 200], [300, 0, 200])]
)
def test_labels_come_in_exact_proportions(total, counts, wanted):
    """Card 14.2, step 2."""
    assert counted(quota_labels(torch.tensor(counts, dtype=torch.float64), total, 1), 3) == wanted


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 300), st.integers(0, 99))
def test_every_quota_is_within_one_of_its_share_and_absent_classes_are_never_asked_for(counts, total, seed):
    share = np.array(counts) / sum(counts) * total
    found = np.array(counted(quota_labels(torch.tensor(counts, dtype=torch.float64), total, seed), len(counts)))
    assert found.sum() == total
    assert (np.abs(found - share) < 1 + 1e-6).all()
    assert (found[np.array(counts) == 0] == 0).all()


def test_labels_are_shuffled_by_the_seed():
    counts = torch.ones(4, dtype=torch.float64)
    first, again, other = (quota_labels(counts, 40, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert first != sorted(first)


def test_without_any_count_all_classes_are_asked_for_alike():
    assert counted(quota_labels(torch.zeros(4), 8, 0), 4) == [2, 2, 2, 2]


def test_counts_near_the_largest_float32_give_labels_and_shares():
    """What a guard without a cap lets through: their sum is no float32."""
    model = network()
    this = server_round([model.init(0), model.init(1)], model)
    told = torch.tensor([[3e38, 0.0, 1.0], [3e38, 3e38, 0.0]])
    counts = label_counts(dataclasses.replace(this, uploads=this.uploads._replace(label_counts=told)))
    assert counted(quota_labels(counts.sum(0), 12, 1), 3) == [8, 4, 0]
    torch.testing.assert_close(class_shares(counts)[:, 0], torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_class_shares_are_those_of_the_card():
    """Card 14.7: counts [[30, 10, 0], [10, 10, 0]]."""
    found = class_shares(torch.tensor([[30.0, 10.0, 0.0], [10.0, 10.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(
        found, torch.tensor([[0.75, 0.5, 0.0], [0.25, 0.5, 0.0]], dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_diversity_is_that_of_the_card():
    """Card 14.7: z = (0, 0), (1, 1), x = 0000, 2222 give e^-1; the printed 2-norms would give 0.059106."""
    z, x = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0] * 4, [2.0] * 4])
    assert float(diversity(x, z)) == pytest.approx(math.exp(-1))
    assert float(diversity(torch.ones(3, 2, 2), torch.rand(3, 4))) == 1.0


def test_diversity_of_images_does_not_vanish():
    """Card 14.2: 50 images of unit variance, 100 noise values; 2-norms underflow to 0.

    E d_z = 2, E d_x = 2 / sqrt(pi), and one pair in 50 is of a sample with itself. (The card drew 0.113.)
    """
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(50, 3, 32, 32, generator=generator), torch.randn(50, 100, generator=generator)
    assert float(diversity(x, z)) == pytest.approx(math.exp(-0.98 * 2 * 2 / math.sqrt(math.pi)), abs=0.01)


def test_what_a_generator_reads_is_noise_beside_a_one_hot_class():
    assert asked_for(torch.tensor([[0.5, -1.0]]), torch.tensor([2]), 3).tolist() == [[0.5, -1.0, 0.0, 0.0, 1.0]]


def test_noise_is_normal_and_a_function_of_the_seed():
    like = torch.zeros((), dtype=torch.float64)
    drawn = gaussian_noise(3, (200, 100), like)
    assert torch.equal(drawn, gaussian_noise(3, (200, 100), like))
    assert not torch.equal(drawn, gaussian_noise(4, (200, 100), like))
    assert abs(float(drawn.mean())) < 0.03
    assert abs(float(drawn.var()) - 1) < 0.05
