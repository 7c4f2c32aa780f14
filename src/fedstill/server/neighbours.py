"""A look at an extractor: how well the labels of nearby samples tell a sample's own. For checking, not for choosing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.seeds import seed_for, torch_generator
from fedstill.core.types import Preparation, Weights
from fedstill.server.pools import full_precision
from fedstill.server.pretrain import Probe

BANK, QUERIES = 50_000, 10_000  # at most: what the reference code has for CIFAR-10
QUERY_SHARE = 0.2
QUERIES_AT_ONCE = 512


def neighbour_accuracy(
    bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor, *, k: int = 200, temperature: float = 0.5
) -> float:
    """Share of the queries whose nearest neighbours vote for their class.

        vote for c: sum over the k nearest j with label c of exp(cos(f, f_j) / temperature)

    bank (n, F) with labels (n,), queries (m, F) with truth (m,). With fewer than k samples in the bank, all vote.
    """
    bank, queries = (F.normalize(full_precision(part), dim=1) for part in (bank, queries))
    classes = int(torch.maximum(labels.max(), truth.max())) + 1
    right = torch.zeros((), dtype=torch.int64, device=bank.device)
    for some, answer in zip(*(torch.split(part, QUERIES_AT_ONCE) for part in (queries, truth)), strict=True):
        near = (some @ bank.T).topk(min(k, len(bank)), dim=1)
        votes = torch.zeros(len(some), classes, dtype=some.dtype, device=some.device)
        votes.scatter_add_(1, labels[near.indices], (near.values / temperature).exp())
        right += (votes.argmax(1) == answer).sum()
    return int(right) / max(len(queries), 1)


def neighbour_probe(*, k: int = 200, temperature: float = 0.5) -> Probe:
    """Reports knn_accuracy of an extractor's features, in eval mode, where a simulation knows labels; else nothing.

    A fifth of the samples are queries (at most 10,000), the others the bank (at most 50,000): the same in every run.
    """

    def probe(weights: Weights, preparation: Preparation) -> dict[str, float]:
        if preparation.labeled is None:
            return {}
        x, y = preparation.labeled
        known = (y >= 0).nonzero().flatten().cpu()
        shuffled = known[torch.randperm(len(known), generator=torch_generator(seed_for(0, "neighbours")))]
        asked = min(int(QUERY_SHARE * len(known)), QUERIES)
        if asked == 0:
            return {}
        features = preparation.trainer.outputs(weights, x).features
        places = shuffled.to(features.device)
        asking, told = places[:asked], places[asked : asked + BANK]
        y = y.to(features.device)
        found = neighbour_accuracy(features[told], y[told], features[asking], y[asking], k=k, temperature=temperature)
        return {"knn_accuracy": found}

    return probe
