"""FedMMD."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative
from fedstill.core.tree import full_precision
from fedstill.core.types import Batch, Local, Method, Need, Objective, Output
from fedstill.local.distillation import start_model
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average

_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the mean squared distance: one kernel each


def kernel_discrepancy(features: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    """MMD^2 between two sets of B feature vectors: mean_ij k(h_i, h_j) + k(r_i, r_j) - k(h_i, r_j) - k(r_i, h_j).

        k(a, b) = sum_s exp(-||a - b||^2 / (s sigma)),    s in {1/4, 1/2, 1, 2, 4}
        sigma = sum of the squared distances of all pairs of the 2B vectors / ((2B)^2 - 2B) + 1e-8

    The estimate is biased (i = j counts). No gradient reaches sigma or the reference. Rows of weight 0 count nowhere,
    B is the sum of the weights. One sample alone counts 0, because sigma would be its own distance, and the gradient up
    to 1e4 long while h is near r. It costs 3 B^2 F for F features, because differences are taken: |a|^2 + |b|^2 - 2 ab
    loses the small distances of an early step.

    >>> h, r = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    >>> round(kernel_discrepancy(h, r, torch.ones(2)).item(), 4)
    1.2008
    """
    real = weight.unsqueeze(-1) > 0  # not a product: 0 * Inf is NaN
    h, r = (torch.where(real, full_precision(side), 0.0) for side in (features, reference.detach()))
    pairs = weight.unsqueeze(-1) * weight
    in_features, in_reference, across = _squared_distances(h, h), _squared_distances(r, r), _squared_distances(h, r)
    count = 2.0 * weight.sum()
    total = (pairs * (in_features + in_reference + 2.0 * across)).sum().detach()
    sigma = total / (count * (count - 1.0)).clamp_min(1.0) + 1e-8
    values = _kernel(in_features, sigma) + _kernel(in_reference, sigma) - 2.0 * _kernel(across, sigma)
    return torch.where(count > 2.0, (pairs * values).sum() / pairs.sum().clamp_min(1.0), 0.0)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)


def _kernel(distance: Tensor, sigma: Tensor) -> Tensor:
    return torch.stack([torch.exp(-distance / (scale * sigma)) for scale in _SCALES]).sum(0)


def mean_discrepancy(lam: float) -> Objective:
    """lam MMD^2(features, features of the start model) on each batch, with five Gaussian kernels (FedMMD)."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        return lam * kernel_discrepancy(output.features, local.frozen["start"].features, batch.weight)

    return Objective(loss, frozen={"start": start_model}, needs=frozenset({Need.FEATURES}))


def fedmmd(*, lam: NotNegative = 0.01) -> Method:
    """FedMMD: a client's features keep the distribution that the received model gives them.

        F_k + lam MMD^2(h, h_global),    w <- sum_{k in S} p_k w_k
        MMD^2 = mean_{i,j in batch} k(h_i, h_j) + k(g_i, g_j) - k(h_i, g_j) - k(g_i, h_j),    g = h_global
        k(a, b) = sum_s exp(-||a - b||^2 / (s sigma)),    s in {1/4, 1/2, 1, 2, 4},    sigma: mean squared distance
        p_k = n_k / sum_{j in S} n_j

    Args:
        lam: weight of the discrepancy (lambda); 0 is FedAvg bit for bit.

    Tries: lam = 0.001, 0.01, 0.1.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: the kernels, with sigma from each batch and without gradient, are those of MrTF's code. The
        features are what the network's head reads. A batch of one sample has no such term.
    Reference: Yao et al., Two-Stream Federated Learning: Reduce the Communication Costs, VCIP 2018.
    """
    return Method(combine(cross_entropy(), mean_discrepancy(lam)), average())
