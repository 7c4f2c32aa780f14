"""Methods as the public code of FedNTD and FedLMD has them: FedLMD's tables depend on them, nothing else should.

fedstill run --method "benchmarks/fedlmd/released.py:scaffold"
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.compose.combine import combine
from fedstill.core.tree import dot, zeros_like
from fedstill.core.types import Batch, Local, Method, Need, Objective, Output, Tree, Weights, nothing
from fedstill.local.terms import control_variates, cross_entropy
from fedstill.methods.moon import Previous, model_contrast
from fedstill.methods.scaffold import update_control
from fedstill.server.aggregate import average, normalized_average


def scaffold() -> Method:
    """SCAFFOLD that averages models by size and controls evenly.

    Where the clients' sizes differ, the corrections c - c_k do not cancel over the cohort.
    """
    return Method(combine(cross_entropy(), control_variates("II")), average("size"), (update_control("uniform"),))


def moon(*, mu: float = 0.1, temperature: float = 0.5, previous: Previous = "init") -> Method:
    """MOON that contrasts a client's first visit with the very first global model.

    Args:
        mu: weight of the contrast.
        temperature: temperature of the contrast.
        previous: the model that stands for the client's last one at its first visit: the first global model ("init"),
            the received one ("start"), or none ("skip"), as fedstill's moon has it.
    """
    contrast = model_contrast(mu, temperature=temperature, previous=previous)
    return Method(combine(cross_entropy(), contrast), average())


def fednova() -> Method:
    """FedNova in which a client's gradient lacks the mean gradient of its last visit."""
    return Method(combine(cross_entropy(), against_own_past()), normalized_average())


def against_own_past() -> Objective:
    """-<d_k, w>: the client's gradient without its mean gradient of last time .

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
