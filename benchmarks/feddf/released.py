"""FedDF's public code: the student starts with the BatchNorm statistics of the cohort's last client."""

from __future__ import annotations

from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import soft_belief

STUDENT = Student(steps=10_000, patience=1000, batch_size=64, augment=("crop", "flip"))


def feddf(*, student: Student = STUDENT, weighting: Weighting = "uniform", buffers: BufferPolicy = "last") -> Method:
    """FedDF's public code.

    Args:
        student: how the average learns.
        weighting: of the average.
        buffers: of the average.
    """
    step = distill(student, pool=soft_belief(temperature=student.temperature))
    return Method(cross_entropy(), average(weighting, buffers=buffers), (step,))
