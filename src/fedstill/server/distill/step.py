"""Distillation on the server: teachers answer on unlabeled data, the answers are pooled, the candidate learns them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.tree import full_precision, leaves
from fedstill.core.types import Need, Round, Seed, ServerStep, Targets, Tree, Weights
from fedstill.server.distill.student import Loss, Student, divergence, keep_learning, shown, soft_target_loss
from fedstill.server.distill.targets import (
    PoolStep,
    Prepare,
    TeacherShares,
    agreement,
    everything,
    keep_targets,
    no_targets,
    pool_targets,
)
from fedstill.server.distill.teachers import Teachers, report_teachers, teacher_logits, unlabeled_data, uploads_teach


def distill(
    student: Student,
    *,
    teachers: Teachers = uploads_teach,
    pool: PoolStep = pool_targets,
    shares: TeacherShares | None = None,
    teacher_batch: int | None = None,
    distill_share: float = 1.0,
    hard: bool = False,
    loss: Loss = soft_target_loss,
) -> ServerStep:
    """Train the candidate towards what the teachers say together on the unlabeled data.

    shares: handed to the pool; without them it weighs all teachers alike. teacher_batch: see `teacher_outputs`.
    distill_share: below 1 so many of the unlabeled rows, see `split_rows`; teachers are not asked about the others.
    hard: the student learns the most probable class. loss: what it minimises, given its temperature.
    Zero steps leave the candidate as it is. State: "targets", what was taught last; with a distill_share below 1
    "distilled", the rows; with a kept optimiser "optimizer", what it remembers; and the slots of `shares`.
    Clients with several architectures: the uploads of all of them teach every prototype the same.
    Reports: teacher_agreement, distill_loss_before, distill_loss_after; with `shares` the weight of each teacher.
    """
    learn = keep_learning(student, hard=hard, loss=loss)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if student.idle:
            return candidate, state
        rows = rows_of(state) if distill_share < 1 else None
        logits = teacher_logits(candidate, round, teachers, batch=teacher_batch, rows=rows)
        share = None if shares is None else shares.of(round, state)
        if share is not None and teachers is uploads_teach:
            report_teachers(round, share)
        pooled = pool(logits) if share is None else pool(logits, share=share)
        answers = pooled if isinstance(pooled, Targets) else everything(pooled)
        targets = answers if rows is None else spread(answers, rows, len(unlabeled_data(round)))
        learnt, memory = learn(candidate, targets, round, state.get("optimizer", {}))
        state = {**state, "optimizer": memory} if memory else state
        taught = targets._replace(probabilities=shown(targets, hard=hard))
        round.metrics["teacher_agreement"] = agreement(logits, answers.probabilities)
        round.metrics["distill_loss_before"] = loss_of(candidate, taught, round, student.temperature, rows=rows)
        round.metrics["distill_loss_after"] = loss_of(learnt, taught, round, student.temperature, rows=rows)
        round.models.setdefault("aggregated", candidate)  # another refinement may have come before
        return learnt, keep_targets(state, targets if rows is None else filled(targets, rows, learnt, round))

    needs = {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS} | student.needs | (shares.needs if shares else frozenset())
    if teachers is not uploads_teach:  # made of the parameters of several uploads
        needs.add(Need.ONE_ARCHITECTURE)
    init, prepare = _first_state(student, shares, distill_share), _preparing(shares, distill_share)
    idle = no_preparation if student.idle else prepare
    return ServerStep("distill", apply, init, needs=frozenset(needs), prepare=idle)


def _first_state(student: Student, shares: TeacherShares | None, distill_share: float) -> Callable[[Weights], Tree]:
    def init(weights: Weights) -> Tree:
        rows: Tree = {"distilled": {}} if distill_share < 1 else {}
        memory: Tree = {"optimizer": {}} if student.keep_optimizer else {}
        return {**no_targets(weights), **rows, **memory, **(shares.init(weights) if shares else {})}

    return init


def _preparing(shares: TeacherShares | None, distill_share: float) -> Prepare:
    """Choose the rows, then whatever the shares prepare, which may look at the rows."""

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        if distill_share < 1:
            rows = distilled_rows(preparation, distill_share).to(next(leaves(candidate)).device)
            state = {**state, "distilled": rows}
        return shares.prepare(candidate, state, preparation) if shares else (candidate, state)

    nothing_to_do = distill_share == 1 and (shares is None or shares.prepare is no_preparation)
    return no_preparation if nothing_to_do else prepare


def rows_of(state: Tree) -> Tensor:
    """The unlabeled rows that are distilled on, ascending."""
    chosen = state.get("distilled")
    if not isinstance(chosen, Tensor):
        raise FedstillError("this server step was not prepared: call its `prepare` before its first round")
    return chosen.nonzero().flatten()


def spread(targets: Targets, rows: Tensor, count: int) -> Targets:
    """Targets of some rows among all `count`; the others are not kept, and say nothing (1 / K)."""
    some = targets.probabilities
    probabilities = some.new_full((count, some.shape[1]), 1.0 / some.shape[1])
    kept = torch.zeros(count, dtype=torch.bool, device=some.device)
    rows = rows.to(some.device)
    return Targets(probabilities.index_copy(0, rows, some), kept.index_copy(0, rows, targets.kept))


def filled(targets: Targets, rows: Tensor, student: Weights, round: Round) -> Targets:
    """Targets whose other rows, which nobody was asked about, say what the student says."""
    probabilities, x = targets.probabilities, unlabeled_data(round)
    others = torch.ones(len(x), dtype=torch.bool, device=rows.device).index_fill(0, rows, False).nonzero().flatten()
    answer = full_precision(round.trainer.outputs(student, x, features=False, rows=others).logits).softmax(1)
    return targets._replace(probabilities=probabilities.index_copy(0, others.to(answer.device), answer))


def loss_of(
    weights: Weights, targets: Targets, round: Round, temperature: float = 1.0, *, rows: Tensor | None = None
) -> float:
    """mean KL(targets || model) over the rows that are kept; `rows` are all that can be, if they are known."""
    some: dict[str, Any] = {} if rows is None else {"rows": rows}
    logits = round.trainer.outputs(weights, unlabeled_data(round), features=False, **some).logits
    if rows is not None:
        targets = Targets(*(part[rows.to(part.device)] for part in targets))
    each = divergence(targets.probabilities, logits, temperature)[targets.kept]
    return float(each.mean()) if len(each) else float("nan")


def split_rows(count: int, share: float, seed: Seed) -> Tensor:
    """(M,) bool: floor(share M) rows at random are distilled on; the others are FedAUX's negatives.

    One permutation, a function of the run's seed alone, so that every method and phase of a run has the same parts.

    >>> int(split_rows(13, 0.8, seed=1).sum())
    10
    """
    rows = numpy_generator(seed_for(seed, "auxiliary")).permutation(count)
    chosen = np.zeros(count, dtype=bool)
    chosen[rows[: math.floor(share * count + 1e-9)]] = True  # 0.29 of 100 are 29 rows, whatever 0.29 is in binary
    return torch.from_numpy(chosen)


def distilled_rows(preparation: Preparation, share: float) -> Tensor:
    """`split_rows` of the run's own unlabeled set; both parts hold at least one row."""
    assert preparation.unlabeled is not None  # declared as a need
    chosen = split_rows(len(preparation.unlabeled), share, preparation.run_seed)
    if not 0 < int(chosen.sum()) < len(chosen):
        raise FedstillError(
            f"method.distill_share = {share} leaves one part of the {len(chosen)} unlabeled rows empty: "
            "give more rows in data.unlabeled, or another share"
        )
    return chosen
