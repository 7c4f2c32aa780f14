"""Curvature on the client: weights that matter to the others are held where the others left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.tree import add, subtract, zeros_like
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Params, Tree, Weights
from fedstill.local.terms import cross_entropy

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
        own: Params = measured["fisher"]
        new = {"fisher": own, "fisher_weights": {name: u * local.params[name] for name, u in own.items()}}
        return new, {f"{slot}_delta": subtract(new[slot], local.state[slot]) for slot in new}

    needs = frozenset({Need.CLIENT_STATE})
    return Objective(
        loss, {}, init, measure, finish, needs, with_risk=lambda other: curvature(lam, fisher=fisher, risk=other)
    )


def _mean_square(gradient: Callable[[Batch], Params], batch: Batch, at_once: int) -> Params:
    """Mean over real samples of the squared gradient of one sample; `at_once` samples side by side."""

    def squares(x: Tensor, y: Tensor, counted: Tensor) -> Params:
        alone = Batch(x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(counted).unsqueeze(0))
        return {name: counted * g.square() for name, g in gradient(alone).items()}

    total: Params = {}
    for some in zip(*(torch.split(part, at_once) for part in batch), strict=True):
        if at_once == 1:
            looked = squares(*(part[0] for part in some))
        else:
            looked = {name: leaf.sum(0) for name, leaf in torch.func.vmap(squares)(*some).items()}
        total = add(total, looked) if total else looked
    return {name: leaf / batch.weight.sum().clamp_min(1.0) for name, leaf in total.items()}
