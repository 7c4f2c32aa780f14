"""FedDyn."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.compose.sealed import of_sums
from fedstill.core.limits import Positive
from fedstill.core.tree import add, zeros_like
from fedstill.core.types import Method, Round, SealedRound, ServerStep, Stage, Tree, Weights
from fedstill.local.terms import cross_entropy, dynamic_regularization
from fedstill.server.aggregate import average, mean_move, participation


def dynamic_correction(alpha: float) -> ServerStep:
    """h <- h - alpha (|S| / N) sum_k p_k (w_k - w), then w = candidate - h / alpha (FedDyn).

    h stays the mean of all clients' g_k, however the candidate was made; buffers are the candidate's. The method's
    aggregate sets p_k.
    """

    def init(weights: Weights) -> Tree:
        return {"dyn_mean": zeros_like(weights.params)}

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        move = mean_move(round, round.weighting)
        mean = add(state["dyn_mean"], move, -alpha * participation(round))
        return candidate._replace(params=add(candidate.params, mean, -1.0 / alpha)), {"dyn_mean": mean}

    return ServerStep("dyn", of_sums(apply), init, stage=Stage.MOVE)


def feddyn(*, alpha: Positive = 0.01) -> Method:
    """FedDyn: each client's objective is bent until its own optimum is the federation's.

        client:  w_k ~ argmin_v F_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2,    g_k <- g_k - alpha (w_k - w)
        server:  h <- h - alpha (|S| / N) sum_{k in S} p_k (w_k - w),    w <- sum_{k in S} p_k w_k - h / alpha
        p_k = 1 / |S|

    Args:
        alpha: strength of the regularizer (alpha).

    Tries: alpha = 0.001, 0.01, 0.1.
    Reveals: the trained model and the number of samples n_k. Each client keeps g_k between rounds.
    Differs from the paper: alpha is the same for all clients; released code divides it by n_k N / n.
    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.
    """
    objective = combine(cross_entropy(), dynamic_regularization(alpha))
    return Method(objective, average("uniform"), (dynamic_correction(alpha),))
