"""How far local training carries clients apart, and their average from central training (MrTF, Fig. 3).

A one-shot probe, no method: from one start the clients of a federation and one central model train for the same steps,
the latter on the union of the clients' data.

    gradient variance  = (1 / K) sum_k ||w_k - w_agg||^2
    weight divergence  = ||w_agg - w_cen||^2 / ||w_cen||^2

over parameters, not BatchNorm statistics; w_agg is the plain mean of the w_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Lesson, LocalWork, Trainer
from fedstill.core.tree import to_device
from fedstill.core.types import Federation, Model, Objective, Params, Seed, Training, Weights
from fedstill.engine import Engine, build_engine
from fedstill.local.terms import cross_entropy
from fedstill.loop.evaluate import global_test, make_test_set
from fedstill.server.aggregate import weighted_sum


@dataclass(frozen=True)
class Divergence:
    """The models of one probe and what sets them apart; `local` is stacked, a row a client."""

    gradient_variance: float
    weight_divergence: float
    start: Weights
    central: Weights
    aggregated: Weights
    local: Weights
    accuracy: Mapping[str, float]  # on the test set: start, central, aggregated, local (the mean over clients)


def gradient_variance(local: Params, aggregated: Params) -> float:
    """(1 / K) sum_k ||w_k - w_agg||^2 of stacked parameters (K, ...).

    >>> gradient_variance({"w": torch.tensor([[1.0, 0.0], [3.0, 0.0]])}, {"w": torch.tensor([2.0, 0.0])})
    1.0
    """
    gaps = [
        (leaf.double() - aggregated[name].double()).square().reshape(len(leaf), -1).sum(1)
        for name, leaf in local.items()
    ]
    return float(torch.stack(gaps).sum(0).mean())


def weight_divergence(aggregated: Params, central: Params) -> float:
    """||w_agg - w_cen||^2 / ||w_cen||^2.

    >>> weight_divergence({"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([3.0, 4.0])})
    0.04
    """
    gap = sum(float((leaf.double() - central[name].double()).square().sum()) for name, leaf in aggregated.items())
    size = sum(float(leaf.double().square().sum()) for leaf in central.values())
    return gap / size if size else float("inf") if gap else 0.0


def train_centrally(
    engine: Engine, objective: Objective, start: Weights, federation: Federation, training: Training, seed: Seed
) -> Weights:
    """One model on the union of all clients' data (a row that several hold counts once)."""
    union = torch.unique(federation.indices)
    return engine.fit(
        Lesson(objective, federation.train.x[union], federation.train.y[union], training), start, seed
    ).weights


def measure_divergence(
    model: Model,
    federation: Federation,
    training: Training,
    *,
    pretrain: int | Weights = 0,
    objective: Objective | None = None,
    seed: Seed = 0,
    device: str = "auto",
    engine: str = "auto",
) -> Divergence:
    """Train all clients that hold data and one central model from the same start, and compare.

    training: of clients and central model alike, by `steps`, so that all take equally many.
    pretrain: central steps before the start (the paper's r_0), or the weights to start from.
    objective: what all of them minimise, of terms that keep and receive nothing; the cross-entropy by default.
    """
    if training.steps is None:
        raise FedstillError("a probe compares models after equally many steps: give Training(steps=50)")
    built = build_engine(engine, device, model=model, federation=federation)
    if not isinstance(built, Engine):
        raise FedstillError(f"{model.name}: divergence is measured for one network at a time")
    risk = cross_entropy() if objective is None else objective
    start = _start(built, risk, federation, training, pretrain, seed)
    ids = np.flatnonzero(federation.offsets.diff().cpu().numpy() > 0)
    work = LocalWork(risk, training, start, seed=seed_for(seed, "clients"))
    local = built.train(work, ids, {}).uploads.weights
    central = train_centrally(built, risk, start, federation, training, seed_for(seed, "central"))
    aggregated = _mean(local)
    return Divergence(
        gradient_variance(local.params, aggregated.params),
        weight_divergence(aggregated.params, central.params),
        start,
        central,
        aggregated,
        local,
        _accuracies(built, federation, {"start": start, "central": central, "aggregated": aggregated}, local),
    )


def _start(
    engine: Engine, risk: Objective, federation: Federation, training: Training, pretrain: int | Weights, seed: Seed
) -> Weights:
    if isinstance(pretrain, Weights):
        return to_device(pretrain, engine.device)
    first = to_device(engine.model.init(seed_for(seed, "model")), engine.device)
    if pretrain == 0:
        return first
    longer = replace(training, steps=pretrain)
    return train_centrally(engine, risk, first, federation, longer, seed_for(seed, "pretrain"))


def _mean(local: Weights) -> Weights:
    count = len(next(iter(local.params.values())))
    share = torch.full((count,), 1.0 / count, dtype=torch.float64)
    return Weights(weighted_sum(local.params, share), weighted_sum(local.buffers, share))


def _accuracies(
    engine: Engine, federation: Federation, models: Mapping[str, Weights], local: Weights
) -> dict[str, float]:
    test = make_test_set(federation, engine.device)
    answers = engine.outputs(local, test.x, stacked=True, features=False).logits.argmax(-1)
    accuracies = {name: global_test(weights, test, engine)["accuracy"] for name, weights in models.items()}
    return {**accuracies, "local": float((answers == test.y).double().mean())}


def features_in_plane(trainer: Trainer, models: Mapping[str, Weights], x: Tensor) -> dict[str, np.ndarray]:
    """Features (M, 2) of each model: the two principal components of all models' features together.

    One plane for all, so that pictures of models can be compared: what moved, moved.
    """
    features = {
        name: trainer.outputs(weights, x).features.flatten(1).double().cpu() for name, weights in models.items()
    }
    plane, centre = principal_plane(torch.cat(list(features.values())))
    return {name: ((points - centre) @ plane).numpy() for name, points in features.items()}


def principal_plane(points: Tensor) -> tuple[Tensor, Tensor]:
    """(F, 2) directions of largest variance and the centre (F,); the largest entry of a direction is positive."""
    centre = points.mean(0)
    _, _, directions = torch.linalg.svd(points - centre, full_matrices=False)
    plane = torch.zeros(points.shape[1], 2, dtype=points.dtype)
    leading = directions[:2].T
    plane[:, : leading.shape[1]] = leading
    largest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return plane * torch.where(largest < 0, -1.0, 1.0), centre
