"""Features that the server's generator invents, as samples of the client's head (FedGen)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.compose import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for, to_signed, uniform
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Weights
from fedstill.local.distillation import masked_distillation_loss, target_mask
from fedstill.local.terms import full_precision

NoiseKind = Literal["uniform", "normal"]
_STREAM = to_signed(seed_for(0, "generated features"))  # a step's dropout draws from the same seed


def row_noise(seed: Tensor, rows: int, size: int, kind: NoiseKind) -> Tensor:
    """(rows, size) of U[0, 1) or N(0, 1); a row does not depend on how many follow it, so that padding does not."""
    if kind == "uniform":
        return uniform(seed, (rows, size))
    first, second = uniform(seed, (rows, 2, size)).unbind(1)
    return torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)


def labels_among(seed: Tensor, rows: int, known: Tensor) -> Tensor:
    """(rows,) classes, each as likely as any other that `known` (K,) has a 1 for; shapes do not depend on values."""
    below = known.cumsum(-1)
    place = uniform(seed, (rows, 1)).to(known.dtype) * below[..., -1:]
    return (place >= below).sum(-1).clamp_max(known.shape[-1] - 1)


def generated_logits(model: Model, inventor: Model, z: Tensor, y: Tensor, weight: Tensor, local: Local) -> Tensor:
    """(B, K) of the head for features that the received generator makes of z (B, d) for the classes y.

    Where the weight is 0 they are those of zero features: finite whatever the generator says.
    """
    assert model.head is not None  # declared as a need
    received = local.received["generator"]
    like = next(iter(received["params"].values()))
    asked = torch.cat([z.to(like), target_mask(y, local.received["labels"].shape[-1]).to(like)], dim=-1)
    said, _ = inventor.apply(Weights(received["params"], received.get("buffers", {})), asked, training=False)
    return full_precision(model.head(local.params, torch.where(weight > 0, said.logits, 0.0)))


def generated_features(
    generator: Callable[[Model], Model], *, noise: int, noise_kind: NoiseKind = "uniform",
    count: int = 32, ratio: float = 1.0, label_term: bool = True, match_term: bool = True,
) -> Objective:  # fmt: skip
    """r a CE(h(G(z, y')), y') + b KL(softmax h(G(z', y)) || softmax h(f(x))): invented features teach (FedGen).

    h is the model's head, f its extractor, G the received generator in eval mode, z noise, y' `count` labels drawn
    alike among the known ones, y those of the batch. The first part moves the head only: G's features pass no
    extractor. The target of the second gets no gradient. With weights a = b = 0, as before the generator has been
    trained, both are 0 to the last bit, whatever G says.

    ratio: r. label_term, match_term: whether the first and the second part are there.
    Slots: receives "generator" (params, buffers), "labels" ((K,) 1 for a known class), "label_weight" (a) and
    "match_weight" (b). It must be bound to a model: see Objective.bind.
    """
    needs = frozenset({Need.HEAD, Need.FEATURES})

    def bind(model: Model) -> Objective:
        inventor = generator(model)

        def label_loss(seed: Tensor, local: Local) -> Tensor:
            weight: Tensor = local.received["label_weight"]
            y, z = labels_among(seed, count, local.received["labels"]), row_noise(seed + 1, count, noise, noise_kind)
            logits = generated_logits(model, inventor, z, y, weight, local)
            return -ratio * weight * F.log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).mean()

        def match_loss(output: Output, batch: Batch, seed: Tensor, local: Local) -> Tensor:
            weight: Tensor = local.received["match_weight"]
            z = row_noise(seed + 2, len(batch.y), noise, noise_kind)
            target = generated_logits(model, inventor, z, batch.y, weight, local)
            return weight * weighted_mean(masked_distillation_loss(output.logits, target), batch.weight)

        def loss(output: Output, batch: Batch, local: Local) -> Tensor:
            seed = local.seed ^ _STREAM
            parts = [label_loss(seed, local)] if label_term else []
            parts += [match_loss(output, batch, seed, local)] if match_term else []
            return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

        return Objective(loss, needs=needs)

    return Objective(_unbound, needs=needs, bind=bind)


def _unbound(output: Output, batch: Batch, local: Local) -> NoReturn:
    raise FedstillError("this term calls the head of a model: bind it to one with core.compose.bound_to first")
