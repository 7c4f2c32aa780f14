"""FedDF, and its plain forms AvgLogit and AvgProb."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedstill.compose.wrappers import after, report_only
from fedstill.core.errors import FedstillError
from fedstill.core.limits import CountOrNone, NotNegative, PositiveShare, Temperature
from fedstill.core.types import Method
from fedstill.local.terms import cross_entropy
from fedstill.server.aggregate import average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import (
    Labels,
    Pool,
    Rule,
    TeacherWeighting,
    hard_belief,
    soft_belief,
    teacher_shares,
)


def feddf(
    *,
    student: Student = Student(),
    pool: Pool = "logits",
    exponent: Temperature = 1.0,
    labels: Labels = "soft",
    rule: Rule = "max",
    threshold: NotNegative = 0.75,
    teacher_weighting: TeacherWeighting = "uniform",
    distill_share: PositiveShare = 1.0,
    warm_up: CountOrNone = 0,
    feedback: bool = True,
) -> Method:
    """FedDF: the averaged model learns, on unlabeled data, the mean answer of the clients' models.

        w_0 = sum_{k in S} p_k w_k,    w <- Adam on mean_x KL(softmax(mean_k z_k(x)) || softmax(z(x; w))) from w_0
        p_k = 1 / |S|

    Clients with several architectures (model.name = "mixed"): each prototype starts at the average of its clients, or
    stays as it was when none of them takes part; the models of all clients teach every prototype the same.

    Args:
        student: how the average learns; with student.steps = 0 it is FedAvg (of the same weighting) bit for bit.
        pool: "logits" averages the teachers' logits, "probabilities" their softmax outputs. Of hostile teachers a
            minority cannot move: the "median" of the logits of each class, their "trimmed" mean without a fifth of the
            teachers at either end, and a "vote", in which each teacher names one class. They cost accuracy if clients
            differ; an aggregate that leaves uploads out as teachers too costs less (docs/attacks.md).
        exponent: power of the pooled probabilities, which are then normalised again; below 1 they get softer.
        labels: "soft", the pooled probabilities; "hard", one class a sample, where teachers are sure enough of it.
        rule: of hard labels: "max", the surest teacher decides; "mean", the mean of the teachers' probabilities does.
        threshold: probability from which a hard label is kept (tau).
        teacher_weighting: teachers count alike ("uniform"), by n_k ("size"), by their accuracy on the validation set
            ("validation"), or alike without the worst on it ("drop_worst").
        distill_share: part of the unlabeled rows that is distilled on, the same for all methods of a run; below 1 the
            others are left to FedAUX's clients, and here to nobody.
        warm_up: first rounds without distillation.
        feedback: the student is sent to the clients; false: it is reported, and clients get the average.

    Tries: student.lr = 0.0003, 0.001, 0.003; student.steps = 100, 500, 1000; pool = logits, probabilities.
    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: by default no labelled validation set on the server, hence no early stopping, and 500 steps
        where the paper allows 10,000 (student.steps = 10000 with student.patience = 1000 are the paper's).
        Targets are computed once a round, before augmentation; validation images are never augmented.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
        Algorithm 1.
    """
    hard = labels == "hard"
    if hard and teacher_weighting != "uniform":
        setting = f"method.teacher_weighting = '{teacher_weighting}'"
        raise FedstillError(f"{setting} has no use with labels = 'hard': set one of them back")
    believe = soft_belief(pool, temperature=student.temperature, exponent=exponent)
    step = distill(
        student,
        pool=hard_belief(rule, threshold=threshold) if hard else believe,
        shares=teacher_shares(teacher_weighting),
        distill_share=distill_share,
        hard=hard,
    )
    step = after(warm_up, step) if warm_up else step
    refine = step if feedback else report_only(step)
    return Method(cross_entropy(), average("uniform"), (refine,))


PLAIN: dict[str, Any] = {"lr_schedule": "constant", "clip": None}


def avglogit(*, student: Student = Student(**PLAIN), teacher_weighting: TeacherWeighting = "uniform") -> Method:
    """AvgLogit: plain distillation on the server, from the mean of the clients' logits.

        w_0 = sum_{k in S} p_k w_k,    p(x) = softmax(sum_k s_k z_k(x)),    s_k = 1 / |S|
        w <- Adam on mean_x KL(p(x) || softmax(z(x; w))) from w_0
        p_k = n_k / sum_{j in S} n_j

    Args:
        student: how the average learns; with student.steps = 0 it is FedAvg (of the same weighting) bit for bit.
        teacher_weighting: s_k: "uniform", "size" (n_k / sum_j n_j), "validation" or "drop_worst" (see feddf).

    Tries: student.lr = 0.0003, 0.001, 0.003; student.steps = 100, 500, 1000.
    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: no paper of its own: FedDF without its schedule, clipping and early stopping, and the
        baseline of MrTF ("AvgLogi", AL) and FedAUX ("mean logits"). Models are weighted by n_k.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020.
    """
    return replace(feddf(student=student, teacher_weighting=teacher_weighting), aggregate=average())


def avgprob(*, student: Student = Student(**PLAIN), teacher_weighting: TeacherWeighting = "uniform") -> Method:
    """AvgProb: plain distillation on the server, from the mean of the clients' probabilities.

        w_0 = sum_{k in S} p_k w_k,    p(x) = sum_k s_k softmax(z_k(x)),    s_k = 1 / |S|
        w <- Adam on mean_x KL(p(x) || softmax(z(x; w))) from w_0
        p_k = n_k / sum_{j in S} n_j

    Helps: not with skewed clients, because the mean of their probabilities names a wrong class more often than the mean
        of their logits does: choose avglogit or feddf. Without skew it is level with FedAvg.

    Args:
        student: how the average learns; with student.steps = 0 it is FedAvg (of the same weighting) bit for bit.
        teacher_weighting: s_k: "uniform", "size" (n_k / sum_j n_j), "validation" or "drop_worst" (see feddf).

    Tries: student.lr = 0.0003, 0.001, 0.003; student.steps = 100, 500, 1000.
    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: no paper of its own: MrTF's "AvgProb" and FedBE's "vanilla distillation", and, since the
        gradients are the same, the mean of losses that FedDF's code takes by default. FedDF's own branch for
        probabilities divides only the student's logits by the temperature; here every teacher's too.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020.
    """
    method = feddf(student=student, pool="probabilities", teacher_weighting=teacher_weighting)
    return replace(method, aggregate=average())
