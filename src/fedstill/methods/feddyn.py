"""FedDyn."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import Positive
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy, dynamic_regularization
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.memory import dynamic_correction


def feddyn(*, alpha: Positive = 0.01, weighting: Weighting = "uniform", buffers: BufferPolicy = "average") -> Method:
    """FedDyn: each client's objective is bent until its own optimum is the federation's.

        client:  w_k ~ argmin_v F_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2,    g_k <- g_k - alpha (w_k - w)
        server:  h <- h - alpha (|S| / N) sum_{k in S} p_k (w_k - w),    w <- sum_{k in S} p_k w_k - h / alpha

    Args:
        alpha: strength of the regularizer (alpha).
        weighting: p_k = 1 / |S| ("uniform") or n_k / sum_j n_j ("size").
        buffers: BatchNorm statistics of the new model, without h: "average", "pooled", "reset", "local" or "last"
            (see fedavg).

    Reveals: the trained model and the number of samples n_k. Each client keeps g_k between rounds.
    Differs from the paper: alpha is the same for all clients; released code divides it by n_k N / n.
    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.
    """
    objective = combine(cross_entropy(), dynamic_regularization(alpha))
    return Method(objective, average(weighting, buffers=buffers), (dynamic_correction(alpha),))
