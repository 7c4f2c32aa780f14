"""Noise on updates."""

from __future__ import annotations

from fedstill.core.limits import NotNegative, Positive
from fedstill.core.types import Mechanism, Method
from fedstill.local.terms import cross_entropy
from fedstill.privacy.mechanisms import clip_and_noise
from fedstill.server.aggregate import average


def update_noise(*, sigma: NotNegative = 0.01, clip: Positive | None = None) -> Method:
    """Update noise: FedAvg whose clients add Gaussian noise to the model that they send.

        w_k' = w + (w_k - w) min(1, clip / ||w_k - w||) + sigma e_k,  e_k ~ N(0, I),    w <- sum_{k in S} p_k w_k'
        p_k = n_k / sum_{j in S} n_j

    In the average of m clients the noise has a standard deviation of sigma sqrt(sum_k p_k^2), which is
    sigma / sqrt(m) when they count alike. It is made to be joined: mrtf+update_noise(sigma=0.01). It is an
    experiment about accuracy under noise and makes NO claim of privacy: sizes, losses and BatchNorm statistics leave
    as they are, and without `clip` nothing bounds how far one client's data can move its model. For a claim use
    dp_fedavg.

    Args:
        sigma: standard deviation of the noise on every parameter (the paper's sigma); 0 adds none.
        clip: bound of the norm of a client's move over all parameters; None switches it off (in TOML: a large number).

    Reveals: the trained model with noise on its parameters; without noise its BatchNorm statistics, the number of
        samples n_k, the mean training loss, and whatever a method that it is joined with sends beside the model
        (SCAFFOLD's control, FedCurv's Fisher information).
    Differs from the paper: the paper clips but does not say where, its released code does not clip, so it is off;
        the released code has noise on BatchNorm statistics too, here they are left alone. The paper says that this
        guarantees differential privacy and gives no epsilon; we do not say so.
    Reference: Li et al., MrTF: Model Refinery for Transductive Federated Learning, Data Mining and Knowledge
        Discovery 2023, Table 3.
    """
    return Method(cross_entropy(), average(), way=(Mechanism(per_client=clip_and_noise(sigma, clip)),))
