"""FedDF's public code: the student starts with the BatchNorm statistics of the cohort's last client."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedstill.core.tree import clone, rows
from fedstill.core.types import Method, Need, Round, ServerStep, Tree, Weights
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import soft_belief

STUDENT = Student(steps=10_000, patience=1000, batch_size=64, augment=("crop", "flip"))


def feddf(*, student: Student = STUDENT) -> Method:
    """FedDF's public code.

    Args:
        student: how the average learns.
    """
    step = distill(student, pool=soft_belief(temperature=student.temperature))
    return Method(cross_entropy(), with_last_statistics(average("uniform")), (step,))


def with_last_statistics(step: ServerStep) -> ServerStep:
    """The same aggregate, whose BatchNorm statistics are the ones of the client with the largest id in the cohort.

    A client without samples does not count. Integer statistics are this client's too.
    """

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        made, state = step.apply(candidate, state, round)
        sent = round.uploads
        last = int(torch.where(sent.size > 0, sent.ids.to(sent.size.device), -1).argmax())
        return made._replace(buffers=clone(rows(sent.weights.buffers, last))), state

    return replace(step, apply=apply, needs=step.needs | {Need.INDIVIDUAL_UPLOADS})
