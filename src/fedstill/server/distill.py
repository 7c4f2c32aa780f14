"""Distillation on the server: the candidate learns, on unlabeled data, what the uploaded models say together."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedstill.core.compose import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.needs import CURES
from fedstill.core.seeds import seed_for
from fedstill.core.types import Batch, Local, Need, Objective, Output, Round, ServerStep, Training, Tree, Weights

Pool = Literal["logits", "probabilities"]


def _full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def unlabeled_data(round: Round) -> Tensor:
    if round.unlabeled is None:
        raise FedstillError(f"distillation on the server needs {Need.UNLABELED.value}: {CURES[Need.UNLABELED]}")
    return round.unlabeled


def teacher_logits(round: Round) -> Tensor:
    """Every uploaded model on every unlabeled sample, in eval mode: (T, M, K). Costs T * M forwards, once a round."""
    return round.trainer.outputs(round.uploads.weights, unlabeled_data(round), stacked=True).logits


def pool_targets(
    logits: Tensor, pool: Pool = "logits", *, temperature: float = 1.0, share: Tensor | None = None
) -> Tensor:
    """Soft targets (M, K) of an ensemble (T, M, K); `share` (T,) sums to 1, uniform by default.

        logits:        softmax(sum_t share_t z_t / temperature)      (AvgLogit)
        probabilities: sum_t share_t softmax(z_t / temperature)      (AvgProb)

    >>> ensemble = torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]])
    >>> [round(p, 4) for p in pool_targets(ensemble)[0].tolist()]
    [0.2689, 0.7311]
    >>> [round(p, 4) for p in pool_targets(ensemble, "probabilities")[0].tolist()]
    [0.4494, 0.5506]
    """
    scores = _full_precision(logits) / temperature
    count = scores.shape[0]
    weight = scores.new_full((count,), 1.0 / count) if share is None else share.to(scores)
    members = scores if pool == "logits" else torch.softmax(scores, dim=-1)
    pooled = (members * weight.reshape(-1, 1, 1)).sum(0)
    return torch.softmax(pooled, dim=-1) if pool == "logits" else pooled


def divergence(targets: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(targets || softmax(z / temperature)) for each sample."""
    log_student = torch.log_softmax(_full_precision(logits) / temperature, dim=-1)
    return (torch.xlogy(targets, targets) - targets * log_student).sum(-1)


def soft_target_loss(temperature: float = 1.0) -> Objective:
    """mean KL(y || softmax(z / temperature)) with soft targets y (B, K); no temperature^2 factor."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        return weighted_mean(divergence(batch.y, output.logits, temperature), batch.weight)

    return Objective(loss)


def agreement(logits: Tensor, targets: Tensor) -> float:
    """How often a teacher (T, M, K) names the ensemble's class: 1 when all agree."""
    return float((logits.argmax(-1) == targets.argmax(-1)).double().mean())


def distill(training: Training, *, pool: Pool = "logits", temperature: float = 1.0) -> ServerStep:
    """Train the candidate towards the pooled predictions of the uploaded models on unlabeled data.

    Zero steps leave the candidate as it is.
    Reports: teacher_agreement, distill_loss_before, distill_loss_after.
    """
    objective = soft_target_loss(temperature)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if training.steps == 0:
            return candidate, state
        x, logits = unlabeled_data(round), teacher_logits(round)
        targets = pool_targets(logits, pool, temperature=temperature)

        def loss_of(weights: Weights) -> float:
            return float(divergence(targets, round.trainer.outputs(weights, x).logits, temperature).mean())

        student = round.trainer.fit(objective, candidate, x, targets, training, seed_for(round.seed, "distill"))
        round.metrics["teacher_agreement"] = agreement(logits, targets)
        round.metrics["distill_loss_before"] = loss_of(candidate)
        round.metrics["distill_loss_after"] = loss_of(student)
        return student, state

    return ServerStep(apply, needs=frozenset({Need.UNLABELED, Need.INDIVIDUAL_UPLOADS}))
