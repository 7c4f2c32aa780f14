"""FedAvg."""

from __future__ import annotations

from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average


def fedavg() -> Method:
    """FedAvg: clients train from the same model, the server averages the models that they send back.

        w_k = SGD on F_k from w,    w <- sum_{k in S} p_k w_k,    F_k(w) = mean cross-entropy on client k
        p_k = n_k / sum_{j in S} n_j

    With fedavg+average(weighting="uniform"), p_k is 1 / |S|. Every method takes another aggregate in the same way:
    beside its name, or for the whole run in the section [server], which also chooses how BatchNorm statistics are
    averaged.

    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: nothing; the sum and its weights are over the cohort S.
    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        AISTATS 2017, Algorithm 1.
    """
    return Method(cross_entropy(), average())
