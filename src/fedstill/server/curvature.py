"""What the server keeps for FedCurv: the sums of all clients' curvatures."""

from __future__ import annotations

from fedstill.core.tree import add, zeros_like
from fedstill.core.types import Round, ServerStep, Stage, Tree, Weights
from fedstill.server.average import weighted_sum

_SLOTS = ("fisher", "fisher_weights")


def sum_curvature() -> ServerStep:
    """U <- U + sum_{k in S} (u_k+ - u_k), V <- V + sum_{k in S} (v_k+ - v_k); the model passes through (FedCurv).

    So U and V stay the sums over every client seen so far of its latest pair, those who are away included.

    Slots: reads the uploads "fisher_delta" and "fisher_weights_delta", broadcasts "fisher" (U) and "fisher_weights"
    (V).
    """

    def init(weights: Weights) -> Tree:
        return {slot: zeros_like(weights.params) for slot in _SLOTS}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        present = (round.uploads.size > 0).double()
        changes = {slot: weighted_sum(round.uploads.extra[f"{slot}_delta"], present) for slot in _SLOTS}
        return candidate, {slot: add(state[slot], changes[slot]) for slot in _SLOTS}

    def broadcast(state: Tree) -> Tree:
        return {slot: state[slot] for slot in _SLOTS}

    return ServerStep(apply, init, broadcast, stage=Stage.KEEP)
