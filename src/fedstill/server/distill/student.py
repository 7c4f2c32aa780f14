"""How a model learns targets on the server: one call of the clients' own training loop, and what watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.seeds import seed_for
from fedstill.core.tree import clone, full_precision, tree_map
from fedstill.core.types import Batch, Local, Need, Objective, Output, Round, Targets, Training, Tree, Weights
from fedstill.server.distill.teachers import unlabeled_data


def divergence(targets: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(targets || softmax(z / temperature)) for each sample."""
    log_student = torch.log_softmax(full_precision(logits) / temperature, dim=-1)
    return (torch.xlogy(targets, targets) - targets * log_student).sum(-1)


def soft_target_loss(temperature: float = 1.0, *, per_class: bool = False) -> Objective:
    """mean KL(y || softmax(z / temperature)) with soft targets y (B, K); no temperature^2 factor.

    per_class: the mean over samples and classes, 1 / K of it (FedBE's released code).
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        each = divergence(batch.y, output.logits, temperature)
        return weighted_mean(each / batch.y.shape[-1] if per_class else each, batch.weight)

    return Objective(loss)


@dataclass(frozen=True)
class Student:
    """How the candidate learns. Zero steps (or epochs) leave it as it is.

    hard: learn the most probable class instead of the probabilities.
    average_after, average_every: the result is the mean of the snapshots taken after step `average_after`, every so
        many steps (SWA); without a snapshot it is the last iterate.
    patience, look_every: look at the validation set every so many steps, keep the best model, and stop when it is
        `patience` steps old.
    reestimate: take BatchNorm's statistics anew on the unlabeled set when all is done.
    """

    training: Training
    temperature: float = 1.0
    per_class: bool = False
    hard: bool = False
    average_after: int | None = None
    average_every: int = 25
    patience: int | None = None
    look_every: int = 100
    reestimate: bool = False

    @property
    def idle(self) -> bool:
        return (self.training.epochs if self.training.steps is None else self.training.steps) == 0

    @property
    def needs(self) -> frozenset[Need]:
        """What a step that trains this student must declare."""
        looks = {Need.VALIDATION} if self.patience is not None else set()
        return frozenset(looks | ({Need.FEATURES, Need.HEAD} if self.training.part == "head" else set()))


Learn = Callable[[Weights, Targets, Round], Weights]
KeepLearning = Callable[[Weights, Targets, Round, Tree], tuple[Weights, Tree]]


def lesson(student: Student, targets: Targets) -> Tensor:
    """(M, K) what the student is shown: the probabilities, or 1 for the most probable class."""
    soft = targets.probabilities
    return torch.zeros_like(soft).scatter(1, soft.argmax(1, keepdim=True), 1.0) if student.hard else soft


def learner(student: Student) -> Learn:
    """(candidate, targets, round) -> the model that has learnt them, with a fresh optimiser."""
    learn = keep_learning(student)
    return lambda candidate, targets, round: learn(candidate, targets, round, {})[0]


def keep_learning(student: Student) -> KeepLearning:
    """(candidate, targets, round, memory) -> the model that has learnt them, and what its optimiser remembers.

    The memory stays empty unless the training keeps its optimiser. The objective is made once, for the engine.
    """
    objective = soft_target_loss(student.temperature, per_class=student.per_class)

    def learn(candidate: Weights, targets: Targets, round: Round, memory: Tree) -> tuple[Weights, Tree]:
        rows = None if bool(targets.kept.all()) else targets.kept.nonzero().flatten()
        if student.idle or (rows is not None and not len(rows)):
            return candidate, memory
        x, y = unlabeled_data(round), lesson(student, targets)
        extra: dict[str, Any] = {} if rows is None else {"rows": rows}
        watcher = _watcher(student, round)
        if watcher is not None:
            extra["watch"] = lambda done, now: done % watcher.every == 0 and watcher.see(done, now)
        seed = seed_for(round.seed, "distill")
        if student.training.keep_optimizer:
            fitted = round.trainer.proceed(
                objective, candidate, x, y, student.training, seed, optimizer=memory, rows=rows
            )
            last, memory = fitted.weights, fitted.optimizer
        else:
            last = round.trainer.fit(objective, candidate, x, y, student.training, seed, **extra)
        found = last if watcher is None else watcher.result(last)
        if student.reestimate and student.training.part == "all":
            found = found._replace(buffers=round.trainer.batch_statistics(found, x))
        return found, memory

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
        return Snapshots(student.average_after, student.average_every)
    return None
