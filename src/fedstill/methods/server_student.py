"""What methods whose server trains a student have in common: checks of their options, and when the step runs."""

from __future__ import annotations

from typing import Literal

from fedstill.compose.wrappers import after, report_only
from fedstill.core.errors import FedstillError
from fedstill.core.types import ServerStep
from fedstill.methods.options import decay_rate, not_negative, positive, temperature_of
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Labels, Pool, PoolStep, Rule, TeacherWeighting, hard_belief, soft_belief

Part = Literal["all", "head"]
Augment = Literal["none", "flip", "crop_flip"]
AUGMENTATIONS: dict[Augment, tuple[str, ...]] = {"none": (), "flip": ("flip",), "crop_flip": ("crop", "flip")}


def check_student(student: Student) -> None:
    """Refuse what a student cannot be trained with, naming the option."""
    training = student.training
    not_negative("steps", training.steps or 0)
    not_negative("epochs", training.epochs)
    for key, value in (("server_lr", training.lr), ("batch_size", training.batch_size)):
        positive(key, value)
    not_negative("weight_decay", training.weight_decay)
    positive("lr_epoch_decay", training.lr_epoch_decay)
    decay_rate("momentum", training.momentum)
    temperature_of("temperature", student.temperature)
    if training.clip is not None:
        positive("clip", training.clip)
    if student.patience is not None:
        positive("patience", student.patience)
    positive("look_every", student.look_every)
    if training.keep_optimizer and (student.patience is not None or student.average_after is not None):
        raise FedstillError("method.keep_optimizer has no use with patience or snapshots: set one of them back")
    positive("cycle", student.average_every)
    not_negative("swa_after", student.average_after or 0)
    not_negative("lr_low", training.lr_low)
    if training.lr_schedule == "cyclic" and training.lr_low > training.lr:
        told = f"method.lr_low = {training.lr_low!r} is impossible"
        raise FedstillError(f"{told}: it must be at most server_lr = {training.lr!r}, which falls to it")


def belief_of(
    labels: Labels, *, pool: Pool, temperature: float, exponent: float, rule: Rule, threshold: float
) -> PoolStep:
    """The targets that a method's options describe."""
    temperature_of("exponent", exponent)
    not_negative("threshold", threshold)
    if labels == "hard":
        return hard_belief(rule, threshold=threshold)
    return soft_belief(pool, temperature=temperature, exponent=exponent)


def check_voters(labels: Labels, weighting: TeacherWeighting) -> None:
    if labels == "hard" and weighting != "uniform":
        raise FedstillError(
            f"method.teacher_weighting = '{weighting}' has no use with labels = 'hard': set one of them back"
        )


def placed(step: ServerStep, *, warm_up: int, feedback: bool = True) -> ServerStep:
    """The step after so many rounds without it; its model is sent, or only reported."""
    not_negative("warm_up", warm_up)
    step = after(warm_up, step) if warm_up else step
    return step if feedback else report_only(step)
