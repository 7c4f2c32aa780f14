"""Server memory that corrects for clients who were away: SCAFFOLD's control, FedDyn's h."""

from __future__ import annotations

from fedstill.core.tree import add, zeros_like
from fedstill.core.types import Round, ServerStep, Stage, Tree, Weights
from fedstill.server.aggregate import Weighting, participation, shares, weighted_sum


def update_control(weighting: Weighting | None = None) -> ServerStep:
    """c <- c + (|S| / N) sum_k p_k (c_k+ - c_k); the model passes through (SCAFFOLD, Alg. 1).

    Under full participation c stays sum_k p_k c_k. p_k is that of the method's aggregate unless `weighting` says
    otherwise, because with other weights the corrections c - c_k no longer cancel over the cohort.

    Slots: reads the upload "control_delta", broadcasts "control".
    """

    def init(weights: Weights) -> Tree:
        return {"control": zeros_like(weights.params)}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        share = shares(round.uploads, weighting or round.weighting)
        delta = weighted_sum(round.uploads.extra["control_delta"], share)
        return candidate, {"control": add(state["control"], delta, participation(round))}

    def broadcast(state: Tree) -> Tree:
        return {"control": state["control"]}

    return ServerStep("control", apply, init, broadcast, stage=Stage.KEEP)


def dynamic_correction(alpha: float) -> ServerStep:
    """h <- h - alpha (|S| / N) sum_k p_k (w_k - w), then w = candidate - h / alpha (FedDyn).

    h stays the mean of all clients' g_k, whatever the candidate was made by; buffers are the candidate's. p_k is that
    of the method's aggregate.
    """

    def init(weights: Weights) -> Tree:
        return {"dyn_mean": zeros_like(weights.params)}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        moves = {name: now - round.start.params[name] for name, now in round.uploads.weights.params.items()}
        move = weighted_sum(moves, shares(round.uploads, round.weighting))
        mean = add(state["dyn_mean"], move, -alpha * participation(round))
        return candidate._replace(params=add(candidate.params, mean, -1.0 / alpha)), {"dyn_mean": mean}

    return ServerStep("dyn", apply, init, stage=Stage.MOVE)


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

    return ServerStep("curvature", apply, init, broadcast, stage=Stage.KEEP)
