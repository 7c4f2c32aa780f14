"""FedProx."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy, proximal
from fedstill.server.aggregate import average


def fedprox(*, mu: NotNegative = 0.01) -> Method:
    """FedProx: FedAvg whose clients are held near the model they received.

        w_k ~ argmin_v F_k(v) + (mu / 2) ||v - w||^2,    w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Args:
        mu: strength of the pull (mu); 0 is FedAvg bit for bit.

    Tries: mu = 0.001, 0.01, 0.1, 1.0.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: all clients do the same number of epochs; the paper also allows inexact local solves, and
        samples clients by n_k with a uniform average. Released code of other papers calls weight decay or a
        mean smooth-L1 by this name; this is the quadratic term.
    Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.
    """
    return Method(combine(cross_entropy(), proximal(mu)), average())
