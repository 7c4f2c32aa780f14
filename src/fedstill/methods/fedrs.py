"""FedRS."""

from __future__ import annotations

from typing import Literal

from fedstill.core.limits import Share
from fedstill.core.types import Method
from fedstill.local.labels import restricted_softmax
from fedstill.server.aggregate import average

ScaleRule = Literal["binary", "proportional"]


def fedrs(*, alpha: Share = 0.5, rule: ScaleRule = "binary") -> Method:
    """FedRS: clients scale down the logits of classes that they lack, because their data would only push them down.

        F_k = mean cross-entropy of softmax(alpha_c z_c),    w <- sum_{k in S} p_k w_k
        binary:        alpha_c = 1 if client k has class c, else alpha
        proportional:  alpha_c = (1 - alpha) n_k^c / max_j n_k^j + alpha
        p_k = n_k / sum_{j in S} n_j

    Args:
        alpha: scale of the logit of a missing class (alpha), from 0 to 1; 1 is FedAvg bit for bit.
        rule: "binary" (the paper's) or "proportional" (classes that the client has little of are scaled too).

    Tries: alpha = 0.1, 0.25, 0.5, 0.75, 0.9.
    Reveals: the trained model and the number of samples n_k. The label counts n_k^c stay on the client.
    Differs from the paper: the whole logit is scaled, bias included; the authors' classifier has no bias. The
        proportional rule is that of their released code. The global model predicts with the plain softmax.
    Reference: Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data,
        KDD 2021.
    """
    return Method(restricted_softmax(alpha, proportional=rule == "proportional"), average())
