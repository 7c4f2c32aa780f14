"""FedCurv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedstill.compose.combine import combine
from fedstill.compose.sealed import of_sums
from fedstill.core.limits import NotNegative
from fedstill.core.tree import add, subtract, zeros_like
from fedstill.core.types import (
    Batch,
    Local,
    Method,
    Model,
    Need,
    Objective,
    Output,
    Params,
    Round,
    SealedRound,
    ServerStep,
    Stage,
    Tree,
    Weights,
)
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average, sum_slot

Fisher = Literal["per_batch", "per_sample"]
_ENTRIES = 1 << 24  # of gradients of single samples at once: 64 MiB a client


def curvature(lam: float, *, fisher: Fisher = "per_batch", risk: Objective | None = None) -> Objective:
    """lam sum_{j != k} (w - w_j)' diag(u_j) (w - w_j), but for a constant, over all clients ever seen (FedCurv).

        = lam (sum P w^2 - 2 sum Q w) + constant,    P = U - u_k,    Q = V - v_k,    U = sum_j u_j,    V = sum_j v_j

    After training u_k is the diagonal of the empirical Fisher matrix at the trained weights w_k and v_k = u_k w_k:

        per_batch:   u_k = mean over samples of (gradient of the mean loss of their batch)^2, batch size as in training
        per_sample:  u_k = mean over samples of (gradient of the sample's loss)^2

    in eval mode, with the true labels, over all local data. `risk` is the term that is differentiated; cross-entropy
    by default.

    Slots: receives "fisher" (U) and "fisher_weights" (V), keeps "fisher" (u_k) and "fisher_weights" (v_k), uploads
    "fisher_delta" and "fisher_weights_delta", the change of each: the server needs only the sums.
    """
    differentiated = risk if risk is not None else cross_entropy()

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        others, pull = (subtract(local.received[slot], local.state[slot]) for slot in ("fisher", "fisher_weights"))
        # a sum of changes drifts by its last bits, and a negative curvature would have no bottom
        parts = [(w * (others[name].clamp_min(0.0) * w - 2.0 * pull[name])).sum() for name, w in local.params.items()]
        return lam * torch.stack(parts).sum()

    def init(weights: Weights) -> Tree:
        return {"fisher": zeros_like(weights.params), "fisher_weights": zeros_like(weights.params)}

    def measure(model: Model, batch: Batch, local: Local) -> Tree:
        def gradient(some: Batch) -> Params:
            def risk_at(params: Params) -> Tensor:
                weights = Weights(params, local.buffers)
                output, _ = model.apply(weights, some.x, training=False, weight=some.weight)
                return differentiated.loss(output, some, local._replace(params=params))

            slope: Params = torch.func.grad(risk_at)(local.params)
            return slope

        if fisher == "per_batch":
            return {"fisher": {name: g.square() for name, g in gradient(batch).items()}}
        at_once = _ENTRIES // sum(leaf.numel() for leaf in local.params.values())
        return {"fisher": _mean_square(gradient, batch, 1 if model.traits.unbatchable else max(1, at_once))}

    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        fisher: Params = measured["fisher"]
        new = {"fisher": fisher, "fisher_weights": {name: u * local.params[name] for name, u in fisher.items()}}
        return new, {f"{slot}_delta": subtract(new[slot], local.state[slot]) for slot in new}

    needs = frozenset({Need.CLIENT_STATE})
    return Objective(
        loss, {}, init, measure, finish, needs, with_risk=lambda other: curvature(lam, fisher=fisher, risk=other)
    )


def _mean_square(gradient: Callable[[Batch], Params], batch: Batch, at_once: int) -> Params:
    """Return the mean over real samples of the squared gradient of one sample, `at_once` samples at a time."""

    def squares(x: Tensor, y: Tensor, counted: Tensor) -> Params:
        alone = Batch(x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(counted).unsqueeze(0))
        return {name: counted * g.square() for name, g in gradient(alone).items()}

    total: Params = {}
    for some in zip(*(torch.split(part, at_once) for part in batch), strict=True):
        if at_once == 1:
            squared = squares(*(part[0] for part in some))
        else:
            squared = {name: leaf.sum(0) for name, leaf in torch.func.vmap(squares)(*some).items()}
        total = add(total, squared) if total else squared
    return {name: leaf / batch.weight.sum().clamp_min(1.0) for name, leaf in total.items()}


def fedcurv(*, lam: NotNegative = 0.1, fisher: Fisher = "per_batch") -> Method:
    """FedCurv: a client holds each weight near the other clients' values, the more firmly the more it matters to them.

        client:  F_k(v) + lam sum_{j != k} (v - w_j)' diag(u_j) (v - w_j)
                 = F_k(v) + lam (sum P v^2 - 2 sum Q v) + const,    P = U - u_k,    Q = V - v_k
                 then u_k+ = diagonal of the Fisher matrix at w_k,    v_k+ = u_k+ w_k
        server:  w <- sum_{k in S} p_k w_k
                 U <- U + sum_{k in S} (u_k+ - u_k),    V <- V + sum_{k in S} (v_k+ - v_k)
        p_k = n_k / sum_{j in S} n_j

    Args:
        lam: weight of the penalty (lambda); 0 is FedAvg bit for bit, and so is the first round.
        fisher: "per_batch" squares the mean gradient of a batch, as the released code of FedNTD and FedLMD does;
            "per_sample" squares the gradient of each sample, as the definition does. lam does not carry over.

    Tries: lam = 0.01, 0.1, 1.0.
    Reveals: the trained model, the number of samples n_k and the changes of u_k and v_k (mean squared gradients of its
        data; each as large as the model). Each client keeps its pair (u_k, v_k) between rounds.
    Differs from the paper: a client sends the change of its pair and the server keeps the two sums, which replaces the
        old pair by the new one as storing all pairs would, up to rounding. The Fisher matrix is the empirical one (true
        labels), in eval mode, over all local data without augmentation, and per batch by default. The constant is left
        out, so the training loss can be negative. lam is 1 in the released code of FedNTD and FedLMD; 0.1 is ours,
        because U grows with the clients, and at 1 some runs with 20 clients and a rate of 0.1 fail.
    Reference: Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, NeurIPS 2019 workshop on
        Federated Learning for Data Privacy and Confidentiality.
    """
    return Method(combine(cross_entropy(), curvature(lam, fisher=fisher)), average(), (sum_curvature(),))


_SLOTS = ("fisher", "fisher_weights")


def sum_curvature() -> ServerStep:
    """U <- U + sum_{k in S} (u_k+ - u_k), V <- V + sum_{k in S} (v_k+ - v_k); the model passes through (FedCurv).

    So U and V stay the sums of the latest pairs of all clients seen so far, absent clients included.

    Slots: reads the uploads "fisher_delta" and "fisher_weights_delta", broadcasts "fisher" (U) and "fisher_weights"
    (V).
    """

    def init(weights: Weights) -> Tree:
        return {slot: zeros_like(weights.params) for slot in _SLOTS}

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        changes = {slot: sum_slot(round, f"{slot}_delta") for slot in _SLOTS}
        return candidate, {slot: add(state[slot], changes[slot]) for slot in _SLOTS}

    def broadcast(state: Tree) -> Tree:
        return {slot: state[slot] for slot in _SLOTS}

    return ServerStep("curvature", of_sums(apply), init, broadcast, stage=Stage.KEEP)
