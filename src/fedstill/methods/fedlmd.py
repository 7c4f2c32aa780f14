"""FedLMD and its version without a teacher."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative, Temperature
from fedstill.core.types import Method
from fedstill.local.distillation import label_masked_distillation
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average


def fedlmd(*, beta: NotNegative = 1.0, tau: Temperature = 1.0) -> Method:
    """FedLMD: clients keep the global model's knowledge of the classes of which they have few samples.

        F_k + beta tau^2 mean KL(softmax_{i in M}(z_global / tau) || softmax_{i != y}(z / tau)),
        M = {i != y: n_k^i <= n_k / C},    w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Args:
        beta: weight of the distillation (beta); 0 is FedAvg bit for bit.
        tau: temperature (tau).

    Tries: beta = 0.3, 1.0, 3.0; tau = 1.0, 3.0.
    Reveals: the trained model and the number of samples n_k. The label counts n_k^y stay on the client.
    Differs from the paper: a class is majority when n_k^y > n_k / C, as in the released code; the paper prints
        n_k^y >= n_k / n_k^y. The sample's own class is masked in the teacher also where it is no majority class. The
        factor tau^2 is in the released code, not in the text. Classes are masked by -inf instead of -1000, and a
        sample with no class left to the teacher counts 0. Models are weighted by n_k as in the code; the paper
        prints 1 / |S|.
    Reference: Lu et al., Federated Learning with Label-Masking Distillation, ACM MM 2023, Eq. 3-6.
    """
    return Method(combine(cross_entropy(), label_masked_distillation(beta, tau=tau)), average())


def fedlmd_tf(*, beta: NotNegative = 1.0, tau: Temperature = 1.0) -> Method:
    """FedLMD-Tf: FedLMD for clients without room for a teacher, whose place an even guess takes.

        F_k + beta tau^2 mean KL(uniform over M || softmax_{i != y}(z / tau)),
        M = {i != y: n_k^i <= n_k / C},    w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Args:
        beta: weight of the distillation (beta); 0 is FedAvg bit for bit.
        tau: temperature (tau).

    Tries: beta = 0.1, 0.3, 1.0; tau = 1.0, 3.0.
    Reveals: the trained model and the number of samples n_k. The label counts n_k^y stay on the client.
    Differs from the paper: the mass 1 / (C - C_k) is 1 / |M| here, the same where y is a majority class and normalised
        where it is not. The released code cannot run (it takes the batch size for the number of masked classes), so
        this follows the equation. Majority rule, tau^2 and weights as in fedlmd.
    Reference: Lu et al., Federated Learning with Label-Masking Distillation, ACM MM 2023, Eq. 7-8.
    """
    return Method(combine(cross_entropy(), label_masked_distillation(beta, tau=tau, teacher=False)), average())
