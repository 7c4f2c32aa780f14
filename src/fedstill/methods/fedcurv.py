"""FedCurv."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative
from fedstill.core.types import Method
from fedstill.local.curvature import Fisher, curvature
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average
from fedstill.server.memory import sum_curvature


def fedcurv(*, lam: NotNegative = 1.0, fisher: Fisher = "per_batch") -> Method:
    """FedCurv: each weight is held where the other clients left it, as firmly as it matters to them.

        client:  F_k(v) + lam sum_{j != k} (v - w_j)' diag(u_j) (v - w_j)
                 = F_k(v) + lam (sum P v^2 - 2 sum Q v) + const,    P = U - u_k,    Q = V - v_k
                 then u_k+ = diagonal of the Fisher matrix at w_k,    v_k+ = u_k+ w_k
        server:  w <- sum_{k in S} p_k w_k
                 U <- U + sum_{k in S} (u_k+ - u_k),    V <- V + sum_{k in S} (v_k+ - v_k)
        p_k = n_k / sum_{j in S} n_j

    Args:
        lam: weight of the penalty (lambda); 0 is FedAvg bit for bit, and so is the first round.
        fisher: "per_batch" squares the mean gradient of a batch, as the released code of FedNTD and FedLMD does;
            "per_sample" squares the gradient of each sample, as the definition does. lam does not carry over.

    Reveals: the trained model, the number of samples n_k and the changes of u_k and v_k (mean squared gradients of its
        data; each as large as the model). Each client keeps its pair (u_k, v_k) between rounds.
    Differs from the paper: a client sends the change of its pair and the server keeps the two sums, which replaces the
        old pair by the new one as storing all pairs would, up to rounding. The Fisher matrix is the empirical one (true
        labels), in eval mode, over all local data without augmentation, and per batch by default. The constant is left
        out, so the training loss can be negative.
    Reference: Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, NeurIPS 2019 workshop on
        Federated Learning for Data Privacy and Confidentiality.
    """
    objective = combine(cross_entropy(), curvature(lam, fisher=fisher))
    return Method(objective, average(), (sum_curvature(),))
