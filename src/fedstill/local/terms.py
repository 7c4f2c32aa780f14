"""Local terms: each is one Objective, written for one client; `compose.combine.combine` adds them up."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.tree import dot, full_precision, squared_distance, subtract, zeros_like
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Params, Tree, Uploads, Weights, nothing

ControlOption = Literal["I", "II"]


def cross_entropy() -> Objective:
    """F_k(w) = mean over real samples of -sum_i y_i log softmax(z)_i; `y` is class indices or soft targets (B, K)."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        logits = full_precision(output.logits)
        if batch.y.is_floating_point():
            return weighted_mean(F.cross_entropy(logits, batch.y, reduction="none"), batch.weight)
        # F.cross_entropy gives the same, but under vmap torch rewrites it in Python at every call
        chosen = F.log_softmax(logits, -1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        return weighted_mean(-chosen, batch.weight)

    return Objective(loss, risk="cross_entropy")


def proximal(mu: float) -> Objective:
    """(mu / 2) ||w - w_start||^2 over parameters; buffers are free."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        return 0.5 * mu * squared_distance(local.params, local.start.params)

    return Objective(loss)


def control_variates(option: ControlOption = "II", *, risk: Objective | None = None) -> Objective:
    """<c - c_k, w>: its gradient turns the client's direction into the federation's (SCAFFOLD).

    After training the client renews its own control:

        I:  c_k+ = grad F_k(w_start), over all local data
        II: c_k+ = c_k - c + (w_start - w_k) / travel

    `travel` is sum_s lr_s b_s with b the momentum sum, so II recovers the mean gradient for any learning-rate
    schedule and momentum (plain SGD: steps * lr). A client that did not move keeps c_k.

    Slots: receives "control" (c), keeps "control" (c_k), uploads "control_delta" (c_k+ - c_k). By option II it follows
    from the move, so that the guard refuses another one.
    `risk` is the term that option I differentiates; cross-entropy by default.
    """
    differentiated = risk if risk is not None else cross_entropy()

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        return dot(subtract(local.received["control"], local.state["control"]), local.params)

    def init(weights: Weights) -> Tree:
        return {"control": zeros_like(weights.params)}

    def gradient_at_start(model: Model, batch: Batch, local: Local) -> Tree:
        def risk_at(params: Params) -> Tensor:
            output, _ = model.apply(Weights(params, local.start.buffers), batch.x, training=False, weight=batch.weight)
            return differentiated.loss(output, batch, local._replace(params=params))

        return {"start_gradient": torch.func.grad(risk_at)(local.start.params)}

    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        control = measured["start_gradient"] if option == "I" else _control_from_move(local)
        return {"control": control}, {"control_delta": subtract(control, local.state["control"])}

    if option == "I":
        needs = frozenset({Need.CLIENT_STATE})
        return Objective(
            loss, {}, init, gradient_at_start, finish, needs, with_risk=lambda other: control_variates("I", risk=other)
        )
    needs = frozenset({Need.CLIENT_STATE, Need.PLAIN_SGD})
    return Objective(loss, {}, init, None, finish, needs, implied=_delta_from_moves)


def _delta_from_moves(uploads: Uploads, start: Weights, received: Tree) -> Tree:
    """Return the "control_delta" (C, ...) of option II: c_k+ - c_k = (w - w_k) / travel - c, and 0 without a move."""

    def delta(name: str, c: Tensor) -> Tensor:
        travel = uploads.travel.to(c).reshape(-1, *[1] * c.dim())
        moved = start.params[name] - uploads.weights.params[name] if name in uploads.weights.params else 0.0 * c
        return torch.where(travel > 0, moved / torch.where(travel > 0, travel, 1.0) - c, 0.0)

    return {"control_delta": {name: delta(name, c) for name, c in received["control"].items()}}


def _control_from_move(local: Local) -> Params:
    moved = local.travel > 0
    distance = torch.where(moved, local.travel, torch.ones_like(local.travel))
    c, c_k, start = local.received["control"], local.state["control"], local.start.params
    return {
        name: torch.where(moved, c_k[name] - c[name] + (start[name] - now) / distance, c_k[name])
        for name, now in local.params.items()
    }


def dynamic_regularization(alpha: float) -> Objective:
    """-<g_k, w> + (alpha / 2) ||w - w_start||^2, then g_k+ = g_k - alpha (w_k - w_start) (FedDyn).

    With an exact local solve g_k+ is grad F_k(w_k). Slot: keeps "dyn_gradient" (g_k); uploads nothing extra.
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        pull = 0.5 * alpha * squared_distance(local.params, local.start.params)
        return pull - dot(local.state["dyn_gradient"], local.params)

    def init(weights: Weights) -> Tree:
        return {"dyn_gradient": zeros_like(weights.params)}

    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        gradient = {
            name: past - alpha * (local.params[name] - local.start.params[name])
            for name, past in local.state["dyn_gradient"].items()
        }
        return {"dyn_gradient": gradient}, nothing()

    return Objective(loss, {}, init, None, finish, frozenset({Need.CLIENT_STATE}))
