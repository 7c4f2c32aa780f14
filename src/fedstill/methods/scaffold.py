"""SCAFFOLD."""

from __future__ import annotations

from fedstill.compose.combine import combine
from fedstill.compose.sealed import of_sums
from fedstill.core.limits import Positive
from fedstill.core.tree import add, zeros_like
from fedstill.core.types import Method, Round, SealedRound, ServerStep, Stage, Tree, Weights
from fedstill.local.terms import ControlOption, control_variates, cross_entropy
from fedstill.server.aggregate import Weighting, average, mean_slot, participation
from fedstill.server.optimizers import sgd


def update_control(weighting: Weighting | None = None) -> ServerStep:
    """c <- c + (|S| / N) sum_k p_k (c_k+ - c_k); the model passes through (SCAFFOLD, Alg. 1).

    Under full participation c stays sum_k p_k c_k. The method's aggregate sets p_k unless `weighting` is set, because
    with other weights the corrections c - c_k no longer cancel over the cohort.

    Slots: reads the upload "control_delta", broadcasts "control".
    """

    def init(weights: Weights) -> Tree:
        return {"control": zeros_like(weights.params)}

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        delta = mean_slot(round, "control_delta", weighting or round.weighting)
        return candidate, {"control": add(state["control"], delta, participation(round))}

    def broadcast(state: Tree) -> Tree:
        return {"control": state["control"]}

    return ServerStep("control", of_sums(apply), init, broadcast, stage=Stage.KEEP)


def scaffold(*, option: ControlOption = "II", global_lr: Positive = 1.0) -> Method:
    """SCAFFOLD: control variates turn each client's direction into the federation's, so that clients do not drift.

        client:  v <- v - lr (grad F_k(v) + c - c_k) from v = w, which gives w_k
                 option I:   c_k+ = grad F_k(w) over all local data (one more pass)
                 option II:  c_k+ = c_k - c + (w - w_k) / sum_s lr_s b_s,    b_s = momentum b_{s-1} + 1
        server:  w <- w + global_lr sum_{k in S} p_k (w_k - w)
                 c <- c + (|S| / N) sum_{k in S} p_k (c_k+ - c_k)
        p_k = 1 / |S|

    Args:
        option: how a client renews its control, "I" or "II".
        global_lr: the server's step size (eta_g).

    Tries: global_lr = 0.25, 0.5, 1.0; option = I, II.
    Reveals: the trained model, the number of samples n_k and the change of the client's control (a mean gradient of
        its data, the size of the model). Each client keeps its control between rounds.
    Differs from the paper: option II divides by the momentum-aware travel, with the learning rates really used;
        for plain SGD that is the paper's K lr. The control absorbs weight decay and clipping, which are part of the
        move. BatchNorm statistics are averaged and have no control.
    Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
        Algorithm 1.
    """
    step = [sgd(global_lr)] if global_lr != 1 else []  # at 1 it is the average itself
    server = (*step, update_control())
    return Method(combine(cross_entropy(), control_variates(option)), average("uniform"), server)
