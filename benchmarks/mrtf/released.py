"""MrTF and FedDF as MrTF's public code runs them: train-mode teachers, old losses, targets mixed over rounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedstill.compose.wrappers import every as every_so_often
from fedstill.compose.wrappers import report_only
from fedstill.core.limits import Count
from fedstill.core.tree import full_precision
from fedstill.core.types import Method, Need, Round, ServerStep, Tree, Weights
from fedstill.local.terms import cross_entropy
from fedstill.methods.mrtf.refinery import trust_in_clients
from fedstill.server.aggregate import average
from fedstill.server.distill.step import distill, loss_of
from fedstill.server.distill.student import Student, divergence, learner
from fedstill.server.distill.targets import (
    agreement,
    cluster_labels,
    entropy,
    everything,
    keep_targets,
    mix,
    no_targets,
    pool_targets,
    soft_belief,
    standardised,
    targets_of,
)
from fedstill.server.distill.teachers import teacher_outputs, unlabeled_data

STUDENT = Student(batch_size=64, weight_decay=1e-6, clip=100.0)
SHARPNESS, REFINE_SHARPNESS, WINDOW = 1.0, 8.0, 5


def feddf(*, student: Student = STUDENT, teacher_batch: Count = 640) -> Method:
    """FedDF as MrTF's code has it: softer targets of teachers in train mode; the student is reported, never sent.

    Args:
        student: how the average learns.
        teacher_batch: rows at a time, by which the teachers' BatchNorm normalises.
    """
    step = distill(student, pool=soft_belief(exponent=0.75), teacher_batch=teacher_batch)
    return Method(cross_entropy(), average("uniform"), (report_only(step),))


def mrtf(
    *,
    student: Student = STUDENT,
    stabilise: bool = True,
    rectify: bool = True,
    refine: bool = True,
    every: Count = 1,
    teacher_batch: Count = 640,
) -> Method:
    """MrTF's public code. The refined model is reported, never sent.

    Args:
        student: how the average learns.
        stabilise: divide a teacher's logits by their standard deviation, over `teacher_batch` rows at a time.
        rectify: weigh all models, the clients' and the global ones, together.
        refine: replace the targets by nearness to class centres.
        every: refine in rounds `every`, 2 `every`, ... only.
        teacher_batch: rows at a time, by which the teachers' BatchNorm normalises.
    """
    step = refinement(student, stabilise=stabilise, rectify=rectify, refine=refine, batch=teacher_batch)
    step = every_so_often(every, step) if every > 1 else step
    return Method(cross_entropy(), average("uniform"), (report_only(step),))


def prior_mixture(clients: Tensor, known: Tensor, u: float) -> Tensor:
    """sum_a p_a w_a q_a over all models: p = u / T for a client's, (1 - u) / G for a global one.

    w = softmax over all models of -entropy / K. Rows do not sum to 1: how sure the models are of a sample is its
    weight in the class centres of the refinery.
    """
    count, others = len(clients), len(known)
    doubt = torch.cat([entropy(clients), entropy(known)]) / clients.shape[-1]
    prior = doubt.new_tensor([u / count] * count + [(1.0 - u) / others] * others)
    share = prior.unsqueeze(1) * torch.softmax(-doubt, dim=0)
    return mix(clients, share[:count]) + mix(known, share[count:])


def stable(logits: Tensor, *, stabilise: bool, batch: int) -> Tensor:
    """Probabilities (T, M, K) of teachers, whose deviation is taken over `batch` rows at a time."""
    if not stabilise:
        return torch.softmax(full_precision(logits), dim=-1)
    return torch.cat([standardised(piece, SHARPNESS) for piece in torch.split(logits, batch, dim=1)], dim=1)


def mean_loss(state: Tree, classes: int) -> Tensor | float:
    """The clients' mean loss over the last refined rounds before this one; at first ln K."""
    count = int(state["logged"])
    return state["losses"][-min(count, WINDOW) :].mean() if count else math.log(classes)


def refinement(student: Student, *, stabilise: bool, rectify: bool, refine: bool, batch: int) -> ServerStep:
    """The server step of the public code: targets are mixed with the last ones, which get the share 1 - u.

    State: "targets", "losses" (newest last) and "logged", how many there have been.
    """
    learn = learner(student)

    def init(weights: Weights) -> Tree:
        device = next(iter(weights.params.values())).device
        losses = torch.zeros(WINDOW, device=device)
        return {
            **no_targets(weights), "losses": losses, "logged": torch.zeros((), dtype=torch.int64, device=device)
        }  # fmt: skip

    def belief(logits: Tensor, candidate_logits: Tensor, u: float, round: Round) -> Tensor:
        if rectify:
            sent = round.trainer.outputs(round.start, unlabeled_data(round), features=False).logits
            known = torch.stack([sent, candidate_logits])
            how = {"stabilise": stabilise, "batch": batch}
            return prior_mixture(stable(logits, **how), stable(known, **how), u)
        return mix(stable(logits, stabilise=True, batch=batch)) if stabilise else pool_targets(logits)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if student.idle:
            return candidate, state
        logits = teacher_outputs(round, round.uploads.weights, batch=batch).logits
        now = round.trainer.outputs(candidate, unlabeled_data(round), features=refine)
        u = trust_in_clients(mean_loss(state, logits.shape[-1]), logits.shape[-1])
        mixed = belief(logits, now.logits, u, round)
        mixed = cluster_labels(mixed, now.features, REFINE_SHARPNESS) if refine else mixed / mixed.sum(1, keepdim=True)
        old = targets_of(state)
        share = 1.0 - u
        targets = everything(mixed if old is None else (1.0 - share) * mixed + share * old.probabilities.to(mixed))
        learnt = learn(candidate, targets, round)
        round.metrics["u"] = u
        round.metrics["teacher_agreement"] = agreement(logits, targets.probabilities)
        round.metrics["distill_loss_before"] = float(divergence(targets.probabilities, now.logits).mean())
        round.metrics["distill_loss_after"] = loss_of(learnt, targets, round)
        round.models.setdefault("aggregated", candidate)
        newest = round.uploads.loss.mean().to(state["losses"]).reshape(1)
        losses = torch.cat([state["losses"][1:], newest])
        return learnt, keep_targets({**state, "losses": losses, "logged": state["logged"] + 1}, targets)

    needs = student.needs | {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    needs |= {Need.FEATURES} if refine else set()
    return ServerStep("refinery", apply, init, needs=needs)
