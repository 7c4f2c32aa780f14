"""Label smoothing."""

from __future__ import annotations

from fedstill.core.limits import Decay
from fedstill.core.types import Method
from fedstill.local.labels import smoothed_cross_entropy
from fedstill.server.aggregate import average


def label_smoothing(*, epsilon: Decay = 0.1) -> Method:
    """LS: FedAvg whose clients leave a share of every label to all classes.

        F_k = mean -sum_i t_i log softmax(z)_i,    t = (1 - epsilon) onehot(y) + epsilon / C,
        w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Args:
        epsilon: share of the label that is spread evenly (epsilon; mu in FedLMD); 0 is FedAvg bit for bit.

    Tries: epsilon = 0.05, 0.1, 0.2.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: nothing. FedLMD, which compares with it as FedAvg+LS (0.1), does not say whether the
        share goes to all C classes, as here and in the original, or to the other C - 1.
    Reference: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016, Section 7; as a
        federated baseline Lu et al., Federated Learning with Label-Masking Distillation, ACM MM 2023, Table 2.
    """
    return Method(smoothed_cross_entropy(epsilon), average())
