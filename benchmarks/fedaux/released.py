"""FedAUX and FedDF as FedAUX's public code runs them: teachers in train mode, and optimisers that go on."""

from __future__ import annotations

from fedstill.core.limits import OpenShare, Positive, PositiveShare
from fedstill.core.types import Mechanism, Method
from fedstill.local.terms import cross_entropy
from fedstill.methods.fedaux import protected, releases_of
from fedstill.methods.fedaux.certainty import Form, Scorer, Scoring, certainty_shares, question_of
from fedstill.server.aggregate import average, with_buffers
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import soft_belief

STUDENT = Student(steps=None, epochs=1, lr=5e-5, lr_schedule="constant", clip=None, keep_optimizer=True)
TEACHER_BATCH, DISTILL_SHARE = 128, 0.8


def feddf(*, student: Student = STUDENT, distill_share: PositiveShare = DISTILL_SHARE) -> Method:
    """FedDF as FedAUX's code has it.

    Args:
        student: how the average learns.
        distill_share: part of the unlabeled rows that is distilled on.
    """
    step = distill(student, pool=soft_belief(), teacher_batch=TEACHER_BATCH, distill_share=distill_share)
    return Method(cross_entropy(), with_buffers(average("uniform"), "local"), (step,))


def fedaux(
    *,
    student: Student = STUDENT,
    scorer: Scorer = "logistic",
    form: Form = "sum",
    lam: Positive = 0.01,
    intercept: bool = True,
    epsilon: Positive | None = None,
    delta: OpenShare = 1e-5,
) -> Method:
    """FedAUX's public code: an intercept, a norm bound from private data, noise that is made for the mean of losses.

    Args:
        student: how the average learns.
        scorer: see fedaux.
        form: see fedaux.
        lam: strength of the penalty.
        intercept: the classifier has one, without a penalty.
        epsilon: of the classic formula of the noise, which proves nothing here; none adds no noise.
        delta: of the same.
    """
    scoring = protected(Scoring(scorer, lam, form, intercept, gamma="both"), epsilon, delta, "classic")
    step = distill(
        student,
        pool=soft_belief(),
        shares=certainty_shares(scoring),
        teacher_batch=TEACHER_BATCH,
        distill_share=DISTILL_SHARE,
    )
    way = () if student.idle else (Mechanism(releases=releases_of(scoring), questions=(question_of(scoring),)),)
    return Method(cross_entropy(), with_buffers(average("uniform"), "local"), (step,), way=way)
