"""FedNova."""

from __future__ import annotations

from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import normalized_average


def fednova() -> Method:
    """FedNova: clients that take more steps do not pull harder.

        d_k = (w - w_k) / a_k,    a_k = sum_s b_s,    b_s = momentum b_{s-1} + 1   (plain SGD: a_k = steps)
        w <- w - tau_eff sum_{k in S} p_k d_k,    tau_eff = sum_{k in S} p_k a_k
        p_k = n_k / sum_{j in S} n_j

    With equal steps it is FedAvg bit for bit.

    Reveals: the trained model, the number of samples n_k and a_k (which n_k and the batch size already tell).
    Differs from the paper: clients send w_k and a_k, the server divides. No server momentum of its own, no proximal
        solver. Learning rates that change within a round weigh their steps in a_k.
    Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
        NeurIPS 2020.
    """
    return Method(cross_entropy(), normalized_average())
