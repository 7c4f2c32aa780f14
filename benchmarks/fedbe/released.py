"""FedBE's public code: models are drawn from directions of the clients' moves, the loss is a mean over classes too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.seeds import seed_for
from fedstill.core.types import Batch, Local, Method, Objective, Output, Round, Weights
from fedstill.local.terms import cross_entropy
from fedstill.methods.fedbe import SWA, ensemble
from fedstill.server.aggregate import average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student, divergence
from fedstill.server.distill.targets import soft_belief
from fedstill.server.distill.teachers import dirichlet_samples, parameter_noise, sampled


def fedbe(
    *,
    student: Student = replace(SWA, lr_schedule="constant", average_after=500),
    sampling: Literal["direction", "dirichlet"] = "direction",
) -> Method:
    """FedBE's public code. A tensor that nobody moved stays, where the code divides 0 by 0.

    Args:
        student: how the average learns.
        sampling: ten models by `direction_samples`, or by a Dirichlet mixture of the clients'.
    """
    draw = partial(direction_samples, count=10)
    if sampling == "dirichlet":
        draw = partial(dirichlet_samples, count=10)
    step = distill(
        student, teachers=ensemble(draw), pool=soft_belief("probabilities", exponent=2.0), loss=class_mean_loss
    )
    return Method(cross_entropy(), average(), (step,))


def class_mean_loss(temperature: float) -> Objective:
    """KL(y || softmax(z / temperature)) as a mean over samples and classes: 1 / K of the usual."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        each = divergence(batch.y, output.logits, temperature)
        return weighted_mean(each / batch.y.shape[-1], batch.weight)

    return Objective(loss)


def direction_samples(candidate: Weights, round: Round, *, count: int, scale: float = 0.1) -> Weights:
    """A Gaussian over the directions of the clients' moves, tensor by tensor.

        d_k = (w_k - w) / ||w_k - w||,   w + mean_k ||w_k - w|| (mean d + scale sqrt(max(var d, 1e-5)) e),  e ~ N(0, I)

    A tensor that nobody moved stays as it was sent.
    """

    def draw(name: str, stacked: Tensor) -> Tensor:
        start = round.start.params[name]
        moves = (stacked - start).flatten(1)
        norms = moves.norm(dim=1)
        directions = moves / norms.clamp_min(torch.finfo(moves.dtype).tiny).unsqueeze(1)
        centre, variance = directions.mean(0), directions.var(0, correction=0).clamp_min(1e-5)
        noise = parameter_noise(centre, count, seed_for(round.seed, "direction", name))
        moved: Tensor = norms.mean() * (centre + scale * variance.sqrt() * noise)
        return start + moved.reshape(count, *start.shape)

    return sampled({name: draw(name, leaf) for name, leaf in round.uploads.weights.params.items()}, candidate, count)
