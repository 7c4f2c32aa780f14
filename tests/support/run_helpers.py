"""A tiny federation, a linear model, plain FedAvg, and an engine that is a plain loop over clients."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
import toy

from fedstill.compose.combine import weighted_mean
from fedstill.core.seeds import numpy_generator, seed_for, torch_generator
from fedstill.core.trainer import Fitted, Trained
from fedstill.core.tree import rows, stack
from fedstill.core.types import Batch, Federation, Local, Method, Model, Objective, Output, ServerStep, Uploads, Weights

CLASSES, FEATURES = 3, 4


def gaussian_classes(count: int, seed: int) -> toy.Points:
    return toy.points(seed, "points", count=count, classes=CLASSES, features=FEATURES)


def toy_federation(sizes: list[int] | None = None, *, unlabeled: bool = False) -> Federation:
    sizes = [12] * 10 if sizes is None else sizes
    beside = gaussian_classes(9, 2)[0] if unlabeled else None
    return toy.federation_of(gaussian_classes(sum(sizes), 0), gaussian_classes(200, 1), sizes, unlabeled=beside)


def linear_model() -> Model:
    def init(seed: int) -> Weights:
        weight = 0.1 * torch.randn(CLASSES, FEATURES, generator=torch_generator(seed))
        buffers = {"seen": torch.tensor(0), "scale": torch.ones(())}
        return Weights({"weight": weight, "bias": torch.zeros(CLASSES)}, buffers)

    def apply(weights, x, *, training=False, weight=None, seed=None):
        logits = x @ weights.params["weight"].T + weights.params["bias"]
        seen = weights.buffers["seen"] + (1 if training else 0)
        return Output(logits, x), {**weights.buffers, "seen": seen}

    return Model("linear", init, apply)


def cross_entropy(output: Output, batch: Batch, local: Local) -> torch.Tensor:
    return weighted_mean(F.cross_entropy(output.logits, batch.y, reduction="none"), batch.weight)


def average(candidate, state, round):
    share = round.uploads.size / round.uploads.size.sum()

    def mean(leaf):
        if not leaf.is_floating_point():
            return leaf.amax(0)
        return torch.tensordot(share.to(leaf.dtype), leaf, dims=1)

    weights = round.uploads.weights
    params = {name: mean(leaf) for name, leaf in weights.params.items()}
    return Weights(params, {name: mean(leaf) for name, leaf in weights.buffers.items()}), state


def fedavg(**changes) -> Method:
    parts = {"objective": Objective(cross_entropy), "aggregate": ServerStep("average", average), **changes}
    return Method(**parts)


def counting_objective() -> Objective:
    """Each client counts its own rounds: a state whose right value is known without running anything."""
    return Objective(
        cross_entropy,
        init=lambda weights: {
            "count": torch.zeros((), dtype=torch.int64),
            "last": torch.zeros_like(weights.params["bias"]),
        },
        finish=lambda local, _: ({"count": local.state["count"] + 1, "last": local.params["bias"]}, {}),
    )


class LoopEngine:
    """One client after another, one shuffled pass in batches of `training.batch_size` per epoch."""

    name = "loop"
    device = torch.device("cpu")

    def __init__(self, model: Model, federation: Federation) -> None:
        self.model, self.federation = model, federation
        self.calls: list[dict] = []

    def train(self, work, ids, states):
        self.calls.append({"round": work.round, "ids": ids.tolist(), "received": work.received, "states": states})
        outcomes = [self._client(work, rows(states, i), int(client)) for i, client in enumerate(ids)]
        uploads = stack([tuple(row) for row, _ in outcomes])
        weights, size, steps, travel, loss, extra = uploads
        ids = torch.from_numpy(np.asarray(ids))
        return Trained(Uploads(weights, size, steps, travel, loss, extra, None, ids), stack([s for _, s in outcomes]))

    def outputs(self, weights, x, stacked=False, **how):
        return self.model.apply(weights, x)[0]

    def fit(self, lesson, start, seed, **how):
        return Fitted(start, {}, torch.tensor(0.0))

    def _client(self, work, state, client):
        objective, training, start = work.objective, work.training, work.start
        offsets, source = self.federation.offsets, self.federation.train
        own = self.federation.indices[offsets[client] : offsets[client + 1]]
        params, buffers, losses = start.params, start.buffers, []
        local = self._local(start, work.received, state, len(own), client)
        for epoch in range(training.epochs):
            order = numpy_generator(seed_for(work.seed, work.round, client, "batches", epoch)).permutation(len(own))
            for first in range(0, len(own), training.batch_size):
                picked = own[torch.from_numpy(order[first : first + training.batch_size])]
                batch = Batch(source.x[picked], source.y[picked], torch.ones(len(picked)))
                moving = {k: v.detach().requires_grad_() for k, v in params.items()}
                output, buffers = self.model.apply(Weights(moving, buffers), batch.x, training=True)
                loss = objective.loss(output, batch, local._replace(params=moving))
                gradients = torch.autograd.grad(loss, list(moving.values()))
                params = {
                    k: (v - training.lr * g).detach() for (k, v), g in zip(moving.items(), gradients, strict=True)
                }
                losses.append(loss.detach())
        steps = torch.tensor(float(len(losses)))
        new_state, extra = objective.finish(local._replace(params=params, steps=steps), {})
        row = (Weights(params, buffers), local.size, steps, steps * training.lr, torch.stack(losses).mean(), extra)
        return row, new_state

    def _local(self, start, received, state, size, client):
        nothing = torch.tensor(float("nan"))
        size = torch.tensor(float(size), dtype=torch.float64)
        return Local(
            params=start.params, buffers=start.buffers, start=start, received=received, state=state, frozen={},
            label_counts=torch.full((CLASSES,), float("nan")), size=size, steps=nothing, travel=nothing, lr=nothing,
            seed=torch.tensor(client),
        )  # fmt: skip


def toy_uploads(cohort: int = 4, *, label_counts: bool = False, extra: dict | None = None) -> tuple[Uploads, Weights]:
    """A stacked cohort near the model it started from."""
    start = linear_model().init(0)
    weight = start.params["weight"] + 0.01 * torch.randn(cohort, CLASSES, FEATURES, generator=torch_generator(1))
    params = {"weight": weight, "bias": start.params["bias"].repeat(cohort, 1)}
    buffers = {"seen": torch.ones(cohort, dtype=torch.int64), "scale": torch.ones(cohort)}
    uploads = Uploads(
        weights=Weights(params, buffers),
        size=torch.arange(1, cohort + 1, dtype=torch.float64),
        steps=torch.full((cohort,), 5.0),
        travel=torch.full((cohort,), 0.5),
        loss=torch.full((cohort,), 1.0),
        extra={"control": {"weight": torch.zeros(cohort, 2)}, "none": {}} if extra is None else extra,
        label_counts=torch.ones(cohort, CLASSES) if label_counts else None,
        ids=torch.arange(10, 10 + cohort),
    )
    return uploads, start


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
