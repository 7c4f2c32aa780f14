"""How a model learns targets on the server: one call of the clients' own training loop, and what watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.limits import Count, CountOrNone, Positive, Rows, Temperature, check_limits
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import Lesson
from fedstill.core.tree import clone, full_precision, tree_map
from fedstill.core.types import Batch, Local, Need, Objective, Output, Round, Targets, Training, Tree, Weights
from fedstill.server.distill.teachers import unlabeled_data


def divergence(targets: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(targets || softmax(z / temperature)) for each sample."""
    log_student = torch.log_softmax(full_precision(logits) / temperature, dim=-1)
    return (torch.xlogy(targets, targets) - targets * log_student).sum(-1)


def soft_target_loss(temperature: float = 1.0) -> Objective:
    """mean KL(y || softmax(z / temperature)) with soft targets y (B, K); no temperature^2 factor."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        return weighted_mean(divergence(batch.y, output.logits, temperature), batch.weight)

    return Objective(loss)


@dataclass(frozen=True)
class Student(Training):
    """How a model learns targets on the server; zero steps (or epochs) leave it as it is.

    Args:
        epochs: passes over the rows that it learns from, each round; given without steps, they count instead of steps.
        steps: optimiser steps each round instead of epochs; 0 switches the student off.
        batch_size: rows in a step.
        optimizer: "sgd", "adam" or "adamw"; new every round unless keep_optimizer is true.
        lr: the learning rate at the start of a round.
        momentum: of "sgd".
        nesterov: Nesterov's form of the momentum.
        weight_decay: of the student.
        clip: bound of the gradient norm; none switches it off.
        lr_decay: factor of the rate from one round to the next.
        lr_epoch_decay: factor of the rate from one pass over the rows to the next.
        lr_schedule: "constant", "cosine" (to 0, over the steps of a round) or "cyclic" (from lr down to lr_low along a
            line in each cycle).
        lr_cycle: steps of a cycle, and between two snapshots.
        lr_low: the rate at the end of a cycle.
        augment: of the batches, a list of "crop", "flip" and "cutout"; the targets are those of the plain images.
        part: what is trained: "all", or "head", the last layer (linear evaluation, with local.part = "head").
        keep_optimizer: what the optimiser remembers goes on from round to round.
        temperature: divides the logits of the student, and of its teachers where they are pooled.
        patience: stop when the best model on the validation set is so many steps old, and take that one; none: all
            steps, the last model, no validation set.
        look_every: steps between two looks at the validation set.
        average_after: the result is the mean of the snapshots after this step, one every lr_cycle steps (SWA); none:
            the last model.
        reestimate: BatchNorm statistics are taken anew on the unlabeled set at the end (not with part = "head").
    """

    epochs: CountOrNone = 1
    steps: CountOrNone | None = 500
    batch_size: Rows = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: Positive = 1e-3
    lr_schedule: Literal["constant", "cosine", "cyclic"] = "cosine"
    clip: Positive | None = 5.0
    temperature: Temperature = 1.0
    patience: Count | None = None
    look_every: Count = 100
    average_after: CountOrNone | None = None
    reestimate: bool = False

    @property
    def training(self) -> Training:
        """The part that an engine reads."""
        return Training(**{field.name: getattr(self, field.name) for field in fields(Training)})

    @property
    def idle(self) -> bool:
        return (self.epochs if self.steps is None else self.steps) == 0

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of a step that trains this student."""
        looks = {Need.VALIDATION} if self.patience is not None else set()
        return frozenset(looks | ({Need.FEATURES, Need.HEAD} if self.part == "head" else set()))

    def check(self) -> None:
        """Refuse settings outside their limits, and settings that exclude each other."""
        check_limits("method.student", self)
        if self.keep_optimizer and (self.patience is not None or self.average_after is not None):
            problem = "method.student.keep_optimizer has no use with patience or average_after"
            raise FedstillError(f"{problem}: set one of them back")
        if self.lr_schedule == "cyclic" and self.lr_low > self.lr:
            problem = f"method.student.lr_low = {self.lr_low!r} is above method.student.lr = {self.lr!r}"
            raise FedstillError(f"{problem}: the rate falls from lr to lr_low in each cycle, set a lower lr_low")


Learn = Callable[[Weights, Targets, Round], Weights]
Loss = Callable[[float], Objective]  # temperature -> a term that compares logits with soft targets
KeepLearning = Callable[[Weights, Targets, Round, Tree], tuple[Weights, Tree]]


def shown(targets: Targets, *, hard: bool) -> Tensor:
    """(M, K) what the student is shown: the probabilities, or (`hard`) 1 for the most probable class."""
    soft = targets.probabilities
    return torch.zeros_like(soft).scatter(1, soft.argmax(1, keepdim=True), 1.0) if hard else soft


def learner(student: Student, *, hard: bool = False) -> Learn:
    """(candidate, targets, round) -> the model that has learnt them, with a fresh optimiser."""
    if student.keep_optimizer:
        raise FedstillError("method.student.keep_optimizer = true has no use here: every round starts a new student")
    learn = keep_learning(student, hard=hard)
    return lambda candidate, targets, round: learn(candidate, targets, round, {})[0]


def keep_learning(student: Student, *, hard: bool = False, loss: Loss = soft_target_loss) -> KeepLearning:
    """(candidate, targets, round, memory) -> the model that has learnt them, and what its optimiser remembers.

    The memory stays empty unless the training keeps its optimiser. The objective is made once, for the engine.
    """
    if not isinstance(student, Student):
        raise FedstillError(
            f"the server's student is a {type(student).__name__}: give a Student, e.g. Student(steps=500)"
        )
    student.check()
    objective, usual = loss(student.temperature), student.training

    def learn(candidate: Weights, targets: Targets, round: Round, memory: Tree) -> tuple[Weights, Tree]:
        rows = None if bool(targets.kept.all()) else targets.kept.nonzero().flatten()
        if student.idle or (rows is not None and not len(rows)):
            return candidate, memory
        training = replace(usual, lr=student.lr * student.lr_decay ** (round.number - 1), lr_decay=1.0)
        lesson = Lesson(objective, unlabeled_data(round), shown(targets, hard=hard), training, rows)
        watcher = _watcher(student, round)
        watch = None if watcher is None else lambda done, now: done % watcher.every == 0 and watcher.see(done, now)
        fitted = round.trainer.fit(lesson, candidate, seed_for(round.seed, "distill"), optimizer=memory, watch=watch)
        last = fitted.weights
        if student.keep_optimizer:
            memory = fitted.optimizer
        learnt = last if watcher is None else watcher.result(last)
        if student.reestimate and student.part == "all":
            learnt = learnt._replace(buffers=round.trainer.batch_statistics(learnt, lesson.x))
        return learnt, memory

    return learn


class Snapshots:
    """Stochastic weight averaging: the running mean of the iterates after a step, every so many steps.

    >>> [len(range(525, 1581, 25))]  # snapshots after step 500 of 1580, every 25
    [43]
    """

    def __init__(self, after: int, every: int) -> None:
        self.after, self.every, self.count = after, every, 0
        self.mean: Weights | None = None

    def see(self, done: int, now: Weights) -> bool:
        if done > self.after:
            self.count += 1
            share = 1.0 / self.count

            def towards(mean: Tensor, new: Tensor) -> Tensor:
                return mean.lerp(new, share) if mean.is_floating_point() else new.clone()

            self.mean = clone(now) if self.mean is None else tree_map(towards, self.mean, now)
        return False

    def result(self, last: Weights) -> Weights:
        return last if self.mean is None else self.mean


class EarlyStop:
    """Keep the best model on the validation set; stop when it is `patience` steps old (FedDF)."""

    def __init__(self, student: Student, round: Round) -> None:
        assert round.validation is not None
        self.every, self.patience = student.look_every, student.patience or 0
        self.round, (self.x, self.y) = round, round.validation
        self.best: Weights | None = None
        self.score, self.best_step = -1.0, 0

    def see(self, done: int, now: Weights) -> bool:
        answer = self.round.trainer.outputs(now, self.x, features=False).logits.argmax(1)
        score = float((answer == self.y).double().mean())
        if score > self.score:
            self.best, self.score, self.best_step = clone(now), score, done
        return done - self.best_step >= self.patience

    def result(self, last: Weights) -> Weights:
        if self.best is None:  # fewer steps than the first look
            return last
        self.round.metrics["distill_steps_kept"] = float(self.best_step)
        self.round.metrics["validation_accuracy"] = self.score
        return self.best


def _watcher(student: Student, round: Round) -> Snapshots | EarlyStop | None:
    if student.patience is not None and round.validation is not None:
        return EarlyStop(student, round)
    if student.average_after is not None:
        return Snapshots(student.average_after, student.lr_cycle)
    return None
