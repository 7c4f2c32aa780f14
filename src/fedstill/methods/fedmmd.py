"""FedMMD."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative
from fedstill.core.types import Method
from fedstill.local.discrepancy import mean_discrepancy
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average


def fedmmd(*, lam: NotNegative = 0.01) -> Method:
    """FedMMD: a client's features keep the distribution that the received model gives them.

        F_k + lam MMD^2(h, h_global),    w <- sum_{k in S} p_k w_k
        MMD^2 = mean_{i,j in batch} k(h_i, h_j) + k(g_i, g_j) - k(h_i, g_j) - k(g_i, h_j),    g = h_global
        k(a, b) = sum_s exp(-||a - b||^2 / (s sigma)),    s in {1/4, 1/2, 1, 2, 4},    sigma: mean squared distance
        p_k = n_k / sum_{j in S} n_j

    Args:
        lam: weight of the discrepancy (lambda); 0 is FedAvg bit for bit.

    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: the kernels, with sigma from each batch and without gradient, are those of MrTF's code. The
        features are what the network's head reads. A batch of one sample has no such term.
    Reference: Yao et al., Two-Stream Federated Learning: Reduce the Communication Costs, VCIP 2018.
    """
    return Method(combine(cross_entropy(), mean_discrepancy(lam)), average())
