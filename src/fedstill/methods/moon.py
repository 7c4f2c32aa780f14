"""MOON."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.core.limits import NotNegative, Temperature
from fedstill.core.types import Method
from fedstill.local.contrast import model_contrast
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average


def moon(*, mu: NotNegative = 0.1, temperature: Temperature = 0.5) -> Method:
    """MOON: a client's representation stays near the global model's and leaves its own last one.

        F_k + mu mean -log(e^{cos(z, z_global) / T} / (e^{cos(z, z_global) / T} + e^{cos(z, z_previous) / T})),
        w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    z, z_global, z_previous: features that the model in training, the received one and the one that the client sent
    last give to a sample. At its first visit a client has no last model, and no contrast.

    Args:
        mu: weight of the contrast (mu); 0 is FedAvg bit for bit. 0.1 is FedLMD's setting, for a network without a
            projection; the authors take 5 on CIFAR-10, with a projection of 256 (model.projection).
        temperature: temperature of the contrast (tau, here T).

    Reveals: the trained model and the number of samples n_k. Each client keeps the model that it sent last.
    Differs from the paper: the features are the network's own unless it has a projection (model.projection = 256 is the
        paper's). At its first visit a client of the authors' code contrasts with an untrained network of its own, and
        with nothing in round 1.
    Reference: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.
    """
    contrast = model_contrast(mu, temperature=temperature)
    return Method(combine(cross_entropy(), contrast), average())
