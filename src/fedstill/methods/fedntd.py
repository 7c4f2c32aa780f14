"""FedNTD and its version without a teacher."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative, Temperature
from fedstill.core.types import Method
from fedstill.local.distillation import not_true_distillation
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average


def fedntd(*, beta: NotNegative = 1.0, tau: Temperature = 1.0) -> Method:
    """FedNTD: clients keep the global model's answers about all classes but the true one of a sample.

        F_k + beta tau^2 mean KL(softmax_{i != y}(z_global / tau) || softmax_{i != y}(z / tau)),
        w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Args:
        beta: weight of the distillation (beta); 0 is FedAvg bit for bit.
        tau: temperature (tau).

    Tries: beta = 0.3, 1.0, 3.0; tau = 1.0, 3.0.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: the factor tau^2 is in the released code, not in the text. The true class is masked by
        -inf instead of -1000. The teacher runs in eval mode.
    Reference: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
        NeurIPS 2022.
    """
    return Method(combine(cross_entropy(), not_true_distillation(beta, tau=tau)), average())


def fedntd_tf(*, beta: NotNegative = 1.0, tau: Temperature = 1.0) -> Method:
    """FedNTD-Tf: FedNTD for clients without room for a teacher, whose place an even guess takes.

        F_k + beta tau^2 mean KL(uniform over i != y || softmax_{i != y}(z / tau)),
        w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Args:
        beta: weight of the distillation (beta); 0 is FedAvg bit for bit.
        tau: temperature (tau).

    Tries: beta = 0.1, 0.3, 1.0; tau = 1.0, 3.0.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: FedLMD, which compares with it, prints neither its loss nor beta and tau, and released no
        code of it; this is FedNTD with the mass 1 / (C - 1) on every class that the sample is not. The factor tau^2
        as in fedntd.
    Reference: Lu et al., Federated Learning with Label-Masking Distillation, ACM MM 2023, Table 2.
    """
    return Method(combine(cross_entropy(), not_true_distillation(beta, tau=tau, teacher=False)), average())
