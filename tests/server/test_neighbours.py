"""The nearest-neighbour look at an extractor."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedstill.core.setup import Preparation
from fedstill.core.types import Output, Weights
from fedstill.methods.pretraining.contrastive import neighbour_accuracy, neighbour_probe


def slow_accuracy(bank, labels, queries, truth, k, temperature):
    right = 0
    for query, answer in zip(queries, truth, strict=True):
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in bank]
        votes = {}
        for place in sorted(range(len(bank)), key=lambda j: -cosines[j])[:k]:
            votes[labels[place]] = votes.get(labels[place], 0.0) + math.exp(cosines[place] / temperature)
        right += max(sorted(votes), key=lambda c: votes[c]) == answer
    return right / len(queries)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.5), (7, 0.5), (7, 0.05), (500, 0.1)])
def test_it_is_the_weighted_vote_of_the_nearest(k, temperature):
    generator = np.random.default_rng(0)
    labels, truth = generator.integers(0, 3, 60), generator.integers(0, 3, 700)  # more than one piece of queries
    bank = generator.normal(size=(60, 4)) + np.eye(3, 4)[labels]
    queries = generator.normal(size=(700, 4)) + np.eye(3, 4)[truth]
    found = neighbour_accuracy(
        *(torch.from_numpy(part) for part in (bank, labels, queries, truth)), k=k, temperature=temperature
    )
    assert found == pytest.approx(slow_accuracy(bank, labels, queries, truth, min(k, 60), temperature))
    assert 0.3 < found < 0.95


def test_near_neighbours_count_more_than_many_far_ones():
    """At 0, 60 and 60 degrees: e^(1/t) against 2 e^(0.5/t), equal at t = 0.5 / ln 2 = 0.72."""
    bank = torch.tensor([[1.0, 0.0], [0.5, 3**0.5 / 2], [0.5, -(3**0.5) / 2]])
    labels, query = torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.0]])
    for temperature, answer in ((0.7, 0), (0.75, 1)):
        assert neighbour_accuracy(bank, labels, query, torch.tensor([answer]), temperature=temperature) == 1.0


@dataclass
class Features:
    """A trainer whose extractor hands on what it is shown."""

    def outputs(self, weights, x, **_):
        return Output(x, x)


def looked_at(labeled):
    preparation = Preparation(1, None, 1, None, 0, Features(), None, labeled=labeled)
    return neighbour_probe(k=5)(Weights({}, {}), preparation)


def test_a_probe_tells_good_features_from_useless_ones_and_leaves_out_what_has_no_label():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (400,), generator=generator)
    noise = torch.randn(400, 4, generator=generator)
    good = torch.nn.functional.one_hot(y, 4) + 0.1 * noise
    assert looked_at((good, y)) == {"knn_accuracy": 1.0}
    assert looked_at((noise, y))["knn_accuracy"] < 0.5
    half = torch.where(torch.arange(400) % 2 == 0, y, -1)
    assert looked_at((good, half)) == {"knn_accuracy": 1.0}


@pytest.mark.parametrize("labeled", [None, (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))])
def test_without_labels_or_with_hardly_any_it_says_nothing(labeled):
    assert looked_at(labeled) == {}
