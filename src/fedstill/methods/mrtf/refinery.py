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
    cluster_labels,
    confident_share,
    entropy,
    everything,
    keep_targets,
    mix,
    no_targets,
    pool_targets,
    smooth_over_rounds,
    standardised,
    targets_of,
)
from fedstill.server.distill.teachers import teacher_outputs, unlabeled_data

TeacherMode = Literal["eval", "train"]
Mixture = Literal["rectified", "prior"]


@dataclass(frozen=True)
class Refinery:
    """How the targets are made; the options of `methods.mrtf` of the same names say what each does."""

    stabilise: bool = True
    rectify: bool = True
    refine: bool = True
    sharpness: float = 4.0
    refine_sharpness: float = 4.0
    floor: float = 0.25
    bounded: bool = True
    warm_up: int = 5
    mixture: Mixture = "rectified"
    std_batch: int = 0
    teacher_mode: TeacherMode = "eval"
    teacher_batch: int = 640
    loss_window: int = 0
    smooth: bool = False

    def refines(self, round: Round) -> bool:
        return self.refine and round.number > self.warm_up


def trust_in_clients(loss: Tensor | float, classes: int, *, floor: float = 0.25, bounded: bool = True) -> float:
    """u = floor + (1 - floor) loss / ln K: what the clients' models count, the global models get the rest.

    bounded: clipped to [floor, 1]; without it u passes 1 where the loss passes ln K, as the paper prints it.
    """
    u = floor + (1.0 - floor) * (float(loss) / math.log(classes))
    return min(1.0, max(floor, u)) if bounded else u


def stable(logits: Tensor, form: Refinery) -> Tensor:
    """Probabilities (T, M, K) of teachers: softmax(sharpness z / std), or plain softmax where that module is off."""
    if not form.stabilise:
        return torch.softmax(full_precision(logits), dim=-1)
    pieces = torch.split(logits, form.std_batch, dim=1) if form.std_batch else (logits,)
    return torch.cat([standardised(piece, form.sharpness) for piece in pieces], dim=1)


def rectified(clients: Tensor, known: Tensor, u: float) -> Tensor:
    """u sum_k w_k q_k + (1 - u) mean of the global models, w = softmax_k(-entropy of q_k) for each sample (Eq. 10).

    clients: (T, M, K); known: (G, M, K), the model that was sent and the average.
    """
    return u * mix(clients, confident_share(clients)) + (1.0 - u) * mix(known)


def prior_mixture(clients: Tensor, known: Tensor, u: float) -> Tensor:
    """The released code's sum_a p_a w_a q_a over all models: p = u / T for a client's, (1 - u) / G for a global one.

    w = softmax over all models of -entropy / K. Rows do not sum to 1: how sure the models are of a sample is its
    weight in the class centres of the refinery.
    """
    count, others = len(clients), len(known)
    doubt = torch.cat([entropy(clients), entropy(known)]) / clients.shape[-1]
    prior = doubt.new_tensor([u / count] * count + [(1.0 - u) / others] * others)
    share = prior.unsqueeze(1) * torch.softmax(-doubt, dim=0)
    return mix(clients, share[:count]) + mix(known, share[count:])


def _belief(logits: Tensor, known: list[Tensor], u: float, form: Refinery) -> Tensor:
    """(M, K) what the teachers say together, before the refinery. `known`: logits of the global models."""
    if form.rectify:
        blend = rectified if form.mixture == "rectified" else prior_mixture
        return blend(stable(logits, form), stable(torch.stack(known), form), u)
    if form.stabilise:
        return mix(stable(logits, form))
    return pool_targets(logits)


def _client_logits(round: Round, form: Refinery) -> Tensor:
    batch = form.teacher_batch if form.teacher_mode == "train" else None
    return teacher_outputs(round, round.uploads.weights, batch=batch).logits


def make_targets(
    logits: Tensor, average: Output, u: float, round: Round, form: Refinery, old: Targets | None = None
) -> Targets:
    """Targets from the clients' logits (T, M, K) and the average's output; `old` are the ones of the round before."""
    known = []
    if form.rectify:
        sent = round.trainer.outputs(round.start, unlabeled_data(round), features=False).logits
        known = [sent, average.logits]
    belief = _belief(logits, known, u, form)
    if form.refines(round):
        belief = cluster_labels(belief, average.features, form.refine_sharpness)
    elif form.mixture == "prior":
        belief = belief / belief.sum(dim=1, keepdim=True)
    if form.smooth:
        belief = smooth_over_rounds(belief, None if old is None else old.probabilities, 1.0 - u)
    return everything(belief)


def _loss_of_training(state: Tree, round: Round, classes: int, window: int) -> Tensor | float:
    """The clients' mean loss: of this round, or of the last ones that are on record (at first ln K)."""
    if not window:
        return round.uploads.loss.mean()
    count = int(state["logged"])
    return state["losses"][-min(count, window) :].mean() if count else math.log(classes)


def _log_loss(state: Tree, round: Round) -> Tree:
    newest = round.uploads.loss.mean().to(state["losses"]).reshape(1)
    return {**state, "losses": torch.cat([state["losses"][1:], newest]), "logged": state["logged"] + 1}


def rectified_distillation(student: Student, form: Refinery) -> ServerStep:
    """Train the candidate towards targets that its teachers, the global models and the clusters of features agree on.

    Teachers: the uploads, the model that was sent and the candidate; features are the candidate's, so memory is
    T M K + M F. Zero steps leave the candidate as it is.
    State: "targets"; with a loss window also "losses" (newest last) and "logged", how many there have been.
    Reports: u, teacher_agreement (of the uploads), distill_loss_before, distill_loss_after.
    """
    learn, window = learner(student), form.loss_window

    def init(weights: Weights) -> Tree:
        state = no_targets(weights)
        if window:
            device = next(iter(weights.params.values())).device
            state["losses"] = torch.zeros(window, device=device)
            state["logged"] = torch.zeros((), dtype=torch.int64, device=device)
        return state

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if student.idle:
            return candidate, state
        logits = _client_logits(round, form)
        average = round.trainer.outputs(candidate, unlabeled_data(round), features=form.refines(round))
        classes = logits.shape[-1]
        loss = _loss_of_training(state, round, classes, window)
        u = trust_in_clients(loss, classes, floor=form.floor, bounded=form.bounded)
        targets = make_targets(logits, average, u, round, form, targets_of(state))
        learnt = learn(candidate, targets, round)
        if form.rectify or form.smooth:
            round.metrics["u"] = u
        round.metrics["teacher_agreement"] = agreement(logits, targets.probabilities)
        round.metrics["distill_loss_before"] = float(divergence(targets.probabilities, average.logits).mean())
        round.metrics["distill_loss_after"] = loss_of(learnt, targets, round)
        round.models.setdefault("aggregated", candidate)
        return learnt, keep_targets(_log_loss(state, round) if window else state, targets)

    needs = student.needs | {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    return ServerStep("refinery", apply, init, needs=needs | ({Need.FEATURES} if form.refine else frozenset()))
