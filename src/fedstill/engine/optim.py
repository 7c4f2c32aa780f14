"""torch's own optimisers in their functional, fused form: element-wise, so one call steps a whole stack."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedstill.core.tree import zeros_like
from fedstill.core.types import Params, Training, Tree


def moment_names(training: Training) -> tuple[str, ...]:
    """The tensors an optimiser keeps beside each parameter; all start at zero."""
    if training.optimizer == "sgd":
        return ("momentum",) if training.momentum else ()
    return ("mean", "square")


def first_memory(training: Training, params: Params) -> Tree:
    """What a fresh optimiser remembers of one model; empty if it never remembers anything."""
    moments = {moment: zeros_like(params) for moment in moment_names(training)}
    return {"moments": moments, "count": next(iter(params.values())).new_zeros(())} if moments else {}


def step(
    training: Training, params: list[Tensor], gradients: list[Tensor], moments: list[list[Tensor]],
    count: Tensor, rate: float | Tensor,
) -> None:  # fmt: skip
    """One step in place. `count` is Adam's step number before this step; `rate` a number or a device scalar.

    A zero momentum buffer makes torch's special first step (buffer = gradient) the ordinary one.
    """
    decay = training.weight_decay
    if training.optimizer == "sgd":
        buffers = moments[0] if moments else [None] * len(params)
        sgd(
            params, gradients, buffers, fused=True, foreach=False, weight_decay=decay,  # type: ignore[arg-type]
            momentum=training.momentum, lr=rate, dampening=0.0, nesterov=training.nesterov, maximize=False,  # type: ignore[arg-type]
        )  # fmt: skip
        return
    function = {"adam": adam, "adamw": adamw}[training.optimizer]
    counts = list(count.repeat(len(params)).unbind())  # the fused kernel advances one count a parameter
    function(
        params, gradients, moments[0], moments[1], [], counts, fused=True, foreach=False, amsgrad=False,
        beta1=0.9, beta2=0.999, lr=rate, weight_decay=decay, eps=1e-8, maximize=False,
    )  # fmt: skip
    count.add_(1)


def step_by_row(
    training: Training, params: list[Tensor], gradients: list[Tensor], moments: list[list[Tensor]],
    count: Tensor, rates: Tensor,
) -> None:  # fmt: skip
    """A rate for each client (C,): every update here is linear in the rate, so w + lr_k (w(lr = 1) - w)."""
    before = [param.clone() for param in params]
    step(training, params, gradients, moments, count, 1.0)
    for param, old in zip(params, before, strict=True):
        param.copy_(torch.lerp(old, param, rates.to(param.dtype).reshape(-1, *[1] * (param.ndim - 1))))


def clip(gradients: list[Tensor], bound: float, *, stacked: bool) -> list[Tensor]:
    """torch.nn.utils.clip_grad_norm_, client by client."""
    if stacked:
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    else:
        squares = torch.stack([g.square().sum() for g in gradients]).sum()
    scale = (bound / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return [g * (scale.reshape(-1, *[1] * (g.ndim - 1)) if stacked else scale) for g in gradients]
