"""MOON."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.compose.combine import combine, weighted_mean
from fedstill.core.limits import NotNegative, Temperature
from fedstill.core.tree import clone, full_precision
from fedstill.core.types import Batch, Local, Method, Need, Objective, Output, Tree, Weights, nothing
from fedstill.local.distillation import start_model
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average

Previous = Literal["skip", "init", "start"]


def previous_model(local: Local) -> Weights:
    """Return the model that this client sent at its last visit; before its first visit the very first model."""
    kept = local.state["previous"]
    return Weights(kept["params"], kept["buffers"])


def contrast_loss(features: Tensor, positive: Tensor, negative: Tensor, *, temperature: float = 0.5) -> Tensor:
    """-log of the share of the positive in e^{cos(z, positive) / T} + e^{cos(z, negative) / T} for each sample, (B,).

    No gradient reaches the positive or the negative.

    >>> z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> round(contrast_loss(z, z, other).item(), 6)
    0.126928
    """
    z = full_precision(features)
    near, far = (F.cosine_similarity(z, full_precision(other.detach()), dim=-1) for other in (positive, negative))
    return F.softplus((far - near) / temperature)


def model_contrast(mu: float, *, temperature: float = 0.5, previous: Previous = "skip") -> Objective:
    """mu mean -log(e^{cos(z, z_global) / T} / (e^{cos(z, z_global) / T} + e^{cos(z, z_previous) / T})) (MOON).

    z, z_global, z_previous are the features that the model in training, the received model and the client's last model
    give to a sample. `previous` names the last model of a client that takes part for the first time:

        skip:   none, the term is 0
        init:   the first global model
        start:  the model received now; the term is ln 2 and has no gradient

    Slots: keeps "previous" (params and buffers of the model it sent last) and, but for "init", "seen" (0 or 1).
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        received, last = local.frozen["start"].features, local.frozen["previous"].features
        if previous == "start":
            last = torch.where(local.state["seen"] > 0, last, received)
        losses = contrast_loss(output.features, received, last, temperature=temperature)
        if previous == "skip":
            losses = torch.where(local.state["seen"] > 0, losses, 0.0)
        return mu * weighted_mean(losses, batch.weight)

    def state(params: Tree, buffers: Tree, seen: Tensor) -> Tree:
        kept: Tree = {"previous": clone({"params": params, "buffers": buffers})}
        return kept if previous == "init" else {**kept, "seen": seen}

    def init(weights: Weights) -> Tree:
        return state(*weights, seen=next(iter(weights.params.values())).new_zeros(()))

    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        seen = torch.ones_like(local.size, dtype=next(iter(local.params.values())).dtype)
        return state(local.params, local.buffers, seen), nothing()

    frozen = {"start": start_model, "previous": previous_model}
    return Objective(loss, frozen, init, None, finish, frozenset({Need.CLIENT_STATE, Need.FEATURES}))


def moon(*, mu: NotNegative = 0.1, temperature: Temperature = 0.5) -> Method:
    """MOON: a client's features stay near the global model's features and move away from its last model's.

        F_k + mu mean -log(e^{cos(z, z_global) / T} / (e^{cos(z, z_global) / T} + e^{cos(z, z_previous) / T})),
        w <- sum_{k in S} p_k w_k
        p_k = n_k / sum_{j in S} n_j

    z, z_global, z_previous: features that the model in training, the received one and the one that the client sent
    last give to a sample. At its first visit a client has no last model, and no contrast.

    Args:
        mu: weight of the contrast (mu); 0 is FedAvg bit for bit. 0.1 is FedLMD's setting, for a network without a
            projection; the authors take 5 on CIFAR-10, with a projection of 256 (model.projection).
        temperature: temperature of the contrast (tau, here T).

    Tries: mu = 0.01, 0.1, 1.0, 5.0; temperature = 0.1, 0.5, 1.0.
    Reveals: the trained model and the number of samples n_k. Each client keeps the model that it sent last.
    Differs from the paper: the features are the network's own unless it has a projection (model.projection = 256 is the
        paper's). At its first visit a client of the authors' code contrasts with an untrained network of its own, and
        with nothing in round 1.
    Reference: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.
    """
    return Method(combine(cross_entropy(), model_contrast(mu, temperature=temperature)), average())
