"""Terms that are in released code and in no paper: published tables depend on them, nothing else should."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.tree import dot, zeros_like
from fedstill.core.types import Batch, Local, Need, Objective, Output, Tree, Weights, nothing


def against_own_past() -> Objective:
    """-<d_k, w>: the client's gradient without its mean gradient of last time (FedNova's released correction only).

        d_k+ = (w_start - w_k) / travel, and 0 before the first visit

    FedNTD's and FedLMD's code mean to add d - d_k, with d the clients' mean direction, as SCAFFOLD does, but never
    compute d. d_k is the move itself, so it holds the correction of the visit before. A client that did not move keeps
    d_k. Slot: keeps "own_direction" (d_k).
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        return -dot(local.state["own_direction"], local.params)

    def init(weights: Weights) -> Tree:
        return {"own_direction": zeros_like(weights.params)}

    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        moved = local.travel > 0
        distance = torch.where(moved, local.travel, torch.ones_like(local.travel))
        direction = {
            name: torch.where(moved, (local.start.params[name] - now) / distance, local.state["own_direction"][name])
            for name, now in local.params.items()
        }
        return {"own_direction": direction}, nothing()

    return Objective(loss, {}, init, None, finish, frozenset({Need.CLIENT_STATE, Need.PLAIN_SGD}))
