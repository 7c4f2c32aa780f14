"""FedAvg."""

from __future__ import annotations

from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import BufferPolicy, Weighting, average


def fedavg(*, weighting: Weighting = "size", buffers: BufferPolicy = "average") -> Method:
    """FedAvg: clients train from the same model, the server averages what comes back.

        w_k = SGD on F_k from w,    w <- sum_{k in S} p_k w_k,    F_k(w) = mean cross-entropy on client k

    Args:
        weighting: "size" takes p_k = n_k / sum_j n_j, "uniform" takes p_k = 1 / |S|.
        buffers: BatchNorm statistics of the new model: "average" (p_k-weighted means), "pooled" (variance of the
            union of the data), "reset" (mean 0, variance 1), "local" (the server keeps its own) or "last" (those of the
            last client of the cohort, by its number; for this one, the server must see a client's model alone).

    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: nothing; the sum and its weights are over the cohort S.
    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        AISTATS 2017, Algorithm 1.
    """
    return Method(cross_entropy(), average(weighting, buffers=buffers))
