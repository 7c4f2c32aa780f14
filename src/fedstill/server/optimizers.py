"""Server optimisers: the move from the sent model to the candidate is a (negative) gradient.

D = candidate - start   (parameters only; buffers are the candidate's)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedstill.compose.sealed import of_sums
from fedstill.core.tree import zeros_like
from fedstill.core.types import Params, Round, SealedRound, ServerStep, Stage, Tree, Weights

AdaptiveRule = Literal["adagrad", "yogi", "adam"]


def sgd(lr: float = 1.0, *, momentum: float = 0.0) -> ServerStep:
    """v <- momentum v - D, w <- start - lr v (heavy ball, no damping).

    Computed from the candidate, w = candidate - (1 - lr) D - lr momentum v_old, so that lr 1 and momentum 0 return
    it bit for bit.
    """

    def init(weights: Weights) -> Tree:
        return {"velocity": zeros_like(weights.params)} if momentum else {}

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        moved: Params = {}
        velocity: Params = {}
        for name, now in candidate.params.items():
            gradient = round.start.params[name] - now
            moved[name] = now + (1.0 - lr) * gradient
            if momentum:
                past = state["velocity"][name]
                moved[name] = moved[name] - lr * momentum * past
                velocity[name] = momentum * past + gradient
        return candidate._replace(params=moved), {"velocity": velocity} if momentum else {}

    return ServerStep("optimizer", of_sums(apply), init, stage=Stage.MOVE)


def _second_moment(rule: AdaptiveRule, past: Tensor, square: Tensor, beta2: float) -> Tensor:
    if rule == "adagrad":
        return past + square
    if rule == "yogi":
        return past - (1.0 - beta2) * square * torch.sign(past - square)
    return beta2 * past + (1.0 - beta2) * square


def adaptive(
    rule: AdaptiveRule, *, lr: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> ServerStep:
    """w <- start + lr m / (sqrt(v) + tau), m <- beta1 m + (1 - beta1) D, v by rule (Reddi et al., Alg. 2).

        adagrad: v + D^2      yogi: v - (1 - beta2) D^2 sign(v - D^2)      adam: beta2 v + (1 - beta2) D^2

    v starts at tau^2; no bias correction.
    """

    def init(weights: Weights) -> Tree:
        second = {name: torch.full_like(leaf, tau**2) for name, leaf in weights.params.items()}
        return {"momentum": zeros_like(weights.params), "second": second}

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        moved: Params = {}
        first: Params = {}
        second: Params = {}
        for name, start in round.start.params.items():
            delta = candidate.params[name] - start
            first[name] = beta1 * state["momentum"][name] + (1.0 - beta1) * delta
            second[name] = _second_moment(rule, state["second"][name], delta.square(), beta2)
            moved[name] = start + lr * first[name] / (second[name].sqrt() + tau)
        return candidate._replace(params=moved), {"momentum": first, "second": second}

    return ServerStep("optimizer", of_sums(apply), init, stage=Stage.MOVE)


def adam(lr: float, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> ServerStep:
    """torch.optim.Adam on the gradient -D: with bias correction, so unlike `adaptive("adam")` the first step is lr."""

    def init(weights: Weights) -> Tree:
        moments = {"momentum": zeros_like(weights.params), "second": zeros_like(weights.params)}
        return {**moments, "count": torch.zeros((), dtype=torch.int64)}

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        count = int(state["count"]) + 1
        moved: Params = {}
        first: Params = {}
        second: Params = {}
        for name, start in round.start.params.items():
            delta = candidate.params[name] - start
            first[name] = beta1 * state["momentum"][name] + (1.0 - beta1) * delta
            second[name] = beta2 * state["second"][name] + (1.0 - beta2) * delta.square()
            size = (second[name] / (1.0 - beta2**count)).sqrt() + eps
            moved[name] = start + lr * first[name] / (1.0 - beta1**count) / size
        return candidate._replace(params=moved), {"momentum": first, "second": second, "count": state["count"] + 1}

    return ServerStep("optimizer", of_sums(apply), init, stage=Stage.MOVE)
