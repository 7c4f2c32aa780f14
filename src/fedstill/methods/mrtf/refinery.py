"""MrTF's server step: teachers of one scale, rectified by the global models, refined by clusters, then distilled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.tree import full_precision
from fedstill.core.types import Need, Output, Round, ServerStep, Targets, Tree, Weights
from fedstill.server.distill.step import loss_of
from fedstill.server.distill.student import Student, divergence, learner
from fedstill.server.distill.targets import (
    agreement,
    capped,
    cluster_labels,
    confident_share,
    everything,
    keep_targets,
    mix,
    no_targets,
    pool_targets,
    standardised,
)
from fedstill.server.distill.teachers import report_teachers, teacher_outputs, unlabeled_data

RefineShare = Literal["disagreement", "all"]


@dataclass(frozen=True)
class Refinery:
    """How the targets are made; the options of `methods.mrtf` of the same names say what each does."""

    stabilise: bool = True
    rectify: bool = True
    refine: bool = True
    sharpness: float = 4.0
    refine_sharpness: float = 32.0
    refine_share: RefineShare = "disagreement"
    floor: float = 0.25
    bounded: bool = True
    largest_share: float | None = None
    warm_up: int = 5

    def refines(self, round: Round) -> bool:
        return self.refine and round.number > self.warm_up


def trust_in_clients(loss: Tensor | float, classes: int, *, floor: float = 0.25, bounded: bool = True) -> float:
    """Return u = floor + (1 - floor) loss / ln K, the weight of the clients' models; the global models get 1 - u.

    bounded: clipped to [floor, 1]; without it u passes 1 where the loss passes ln K, as the paper prints it.
    """
    u = floor + (1.0 - floor) * (float(loss) / math.log(classes))
    return min(1.0, max(floor, u)) if bounded else u


def stable(logits: Tensor, form: Refinery) -> Tensor:
    """Return the teachers' probabilities (T, M, K): softmax(sharpness z / std), or softmax(z) without `stabilise`."""
    return standardised(logits, form.sharpness) if form.stabilise else torch.softmax(full_precision(logits), dim=-1)


def rectified(clients: Tensor, known: Tensor, u: float, largest_share: float | None = None) -> Tensor:
    """u sum_k w_k q_k + (1 - u) mean of the global models, w = softmax_k(-entropy of q_k) for each sample (Eq. 10).

    clients: (T, M, K); known: (G, M, K), the model that was sent and the average. largest_share: see `capped`.
    """
    return u * mix(clients, capped(confident_share(clients), largest_share)) + (1.0 - u) * mix(known)


def share_of_clusters(logits: Tensor, belief: Tensor, form: Refinery) -> float:
    """Return the weight of the refinery in the targets: 1, or how often a client (T, M, K) contradicts the belief.

    Clients whose data are alike name the same classes. Their belief is then better than nearness to class centres.
    """
    return 1.0 if form.refine_share == "all" else 1.0 - agreement(logits, belief)


def make_targets(logits: Tensor, average: Output, u: float, round: Round, form: Refinery) -> Targets:
    """Make the targets of a round from the clients' logits (T, M, K) and the average's output."""
    if form.rectify:
        sent = round.trainer.outputs(round.start, unlabeled_data(round), features=False).logits
        clients = stable(logits, form)
        report_teachers(round, capped(confident_share(clients), form.largest_share))
        belief = rectified(clients, stable(torch.stack([sent, average.logits]), form), u, form.largest_share)
    else:
        belief = mix(stable(logits, form)) if form.stabilise else pool_targets(logits)
    if form.refines(round):
        share = share_of_clusters(logits, belief, form)
        round.metrics["refine_share"] = share
        belief = (1.0 - share) * belief + share * cluster_labels(belief, average.features, form.refine_sharpness)
    return everything(belief)


def rectified_distillation(student: Student, form: Refinery) -> ServerStep:
    """Train the candidate towards targets that its teachers, the global models and the clusters of features agree on.

    Teachers: the uploads, the model that was sent and the candidate; features are the candidate's, so memory is
    T M K + M F. Zero steps leave the candidate as it is. State: "targets".
    Reports: u, refine_share, teacher_agreement (of the uploads), distill_loss_before, distill_loss_after, and how
    much each upload counts among the uploads.
    """
    learn = learner(student)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if student.idle:
            return candidate, state
        logits = teacher_outputs(round, round.uploads.weights).logits
        average = round.trainer.outputs(candidate, unlabeled_data(round), features=form.refines(round))
        u = trust_in_clients(round.uploads.loss.mean(), logits.shape[-1], floor=form.floor, bounded=form.bounded)
        targets = make_targets(logits, average, u, round, form)
        learnt = learn(candidate, targets, round)
        if form.rectify:
            round.metrics["u"] = u
        round.metrics["teacher_agreement"] = agreement(logits, targets.probabilities)
        before = divergence(targets.probabilities, average.logits, student.temperature)
        round.metrics["distill_loss_before"] = float(before.mean())
        round.metrics["distill_loss_after"] = loss_of(learnt, targets, round, student.temperature)
        round.models.setdefault("aggregated", candidate)
        return learnt, keep_targets(state, targets)

    needs = student.needs | {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    needs |= {Need.FEATURES} if form.refine else set()
    return ServerStep("refinery", apply, no_targets, needs=needs)
