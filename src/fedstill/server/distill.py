"""Distillation on the server: teachers answer on unlabeled data, the answers are pooled, the candidate learns them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.core.types import Need, Round, ServerStep, Targets, Tree, Weights
from fedstill.server.pools import pool_targets
from fedstill.server.student import Student, divergence, learner, lesson
from fedstill.server.teachers import Teachers, teacher_outputs, unlabeled_data, uploads_teach

PoolStep = Callable[..., Tensor | Targets]  # logits (T, M, K) (, share=) -> probabilities (M, K), or hard targets


@dataclass(frozen=True)
class TeacherShares:
    """How much each teacher counts, (T,) or (T, M), and what one must look at to know it."""

    of: Callable[[Round], Tensor]
    needs: frozenset[Need] = frozenset()


def agreement(logits: Tensor, targets: Tensor) -> float:
    """How often a teacher (T, M, K) names the ensemble's class: 1 when all agree."""
    return float((logits.argmax(-1) == targets.argmax(-1)).double().mean())


def everything(probabilities: Tensor) -> Targets:
    """Targets that keep every row."""
    return Targets(probabilities, torch.ones(len(probabilities), dtype=torch.bool, device=probabilities.device))


def targets_of(state: Tree) -> Targets | None:
    """The targets a step keeps in its state under "targets"."""
    kept = state.get("targets")
    return None if not kept else Targets(kept["probabilities"], kept["kept"])


def no_targets(_: Weights) -> Tree:
    """The first state of a step that keeps its targets: they come with its first round."""
    return {"targets": {}}


def keep_targets(state: Tree, targets: Targets) -> Tree:
    return {**state, "targets": targets._asdict()}


def distill(
    student: Student,
    *,
    teachers: Teachers = uploads_teach,
    pool: PoolStep = pool_targets,
    shares: TeacherShares | None = None,
    teacher_batch: int | None = None,
) -> ServerStep:
    """Train the candidate towards what the teachers say together on the unlabeled data.

    shares: handed to the pool; without them it weighs all teachers alike. teacher_batch: see `teacher_outputs`.
    Zero steps leave the candidate as it is. State: "targets", what was taught last.
    Reports: teacher_agreement, distill_loss_before, distill_loss_after.
    """
    learn = learner(student)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if student.idle:
            return candidate, state
        logits = teacher_outputs(round, teachers(candidate, round), batch=teacher_batch).logits
        pooled = pool(logits) if shares is None else pool(logits, share=shares.of(round))
        targets = pooled if isinstance(pooled, Targets) else everything(pooled)
        learnt = learn(candidate, targets, round)
        taught = targets._replace(probabilities=lesson(student, targets))
        round.metrics["teacher_agreement"] = agreement(logits, targets.probabilities)
        round.metrics["distill_loss_before"] = loss_of(candidate, taught, round, student.temperature)
        round.metrics["distill_loss_after"] = loss_of(learnt, taught, round, student.temperature)
        round.models["aggregated"] = candidate
        return learnt, keep_targets(state, targets)

    needs = {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS} | (shares.needs if shares else frozenset())
    if student.patience is not None:
        needs.add(Need.VALIDATION)
    return ServerStep(apply, no_targets, needs=frozenset(needs), targets=targets_of)


def loss_of(weights: Weights, targets: Targets, round: Round, temperature: float = 1.0) -> float:
    """mean KL(targets || model) over the rows that are kept."""
    logits = round.trainer.outputs(weights, unlabeled_data(round), features=False).logits
    each = divergence(targets.probabilities, logits, temperature)[targets.kept]
    return float(each.mean()) if len(each) else float("nan")
