"""KD."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative, Temperature
from fedstill.core.types import Method
from fedstill.local.distillation import plain_distillation
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average


def kd(*, beta: NotNegative = 1.0, tau: Temperature = 1.0) -> Method:
    """KD: clients imitate the model they received while they fit their own data.

        F_k + beta tau^2 mean KL(softmax(z_global / tau) || softmax(z / tau)),    w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    Helps: not with skewed clients: choose fedntd or fedlmd, whose clients imitate the received model only about other
        classes than a sample's own. Without skew it is about level with FedAvg.

    Args:
        beta: weight of the distillation (beta); 0 is FedAvg bit for bit.
        tau: temperature (tau).

    Tries: beta = 0.1, 0.3, 1.0, 3.0; tau = 1.0, 2.0, 4.0.
    Reveals: the trained model and the number of samples n_k.
    Differs from the paper: FedLMD compares with this under the name FedAvg+KD and gives neither beta nor tau; the
        factor tau^2 is Hinton's, and that of FedNTD's released code. The teacher runs in eval mode.
    Reference: Lu et al., Federated Learning with Label-Masking Distillation, ACM MM 2023, Eq. 2; the loss is that of
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
    """
    return Method(combine(cross_entropy(), plain_distillation(beta, tau=tau)), average())
