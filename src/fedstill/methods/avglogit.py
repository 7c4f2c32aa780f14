"""AvgLogit and AvgProb."""

from __future__ import annotations

from typing import Literal

from fedstill.core.types import Method, ServerStep, Training
from fedstill.local.terms import cross_entropy
from fedstill.methods.server_student import check_student
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Pool, TeacherWeighting, soft_belief, teacher_shares

Schedule = Literal["constant", "cosine"]


def avglogit(
    *,
    steps: int = 500,
    server_lr: float = 1e-3,
    lr_schedule: Schedule = "constant",
    batch_size: int = 128,
    clip: float | None = None,
    temperature: float = 1.0,
    teacher_weighting: TeacherWeighting = "uniform",
    weighting: Weighting = "size",
    buffers: BufferPolicy = "average",
) -> Method:
    """AvgLogit: plain distillation on the server, from the mean of the clients' logits.

        w_0 = sum_{k in S} p_k w_k,    p(x) = softmax(sum_k s_k z_k(x)),    s_k = 1 / |S|
        w <- Adam on mean_x KL(p(x) || softmax(z(x; w))) from w_0

    Args:
        steps: distillation steps on the server each round; 0 is FedAvg (of the same weighting) bit for bit.
        server_lr: Adam's learning rate.
        lr_schedule: "constant", or "cosine" (to 0, over the steps of a round).
        batch_size: unlabeled samples in a step.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        temperature: divides the logits of teachers and student.
        teacher_weighting: s_k: "uniform", "size" (n_k / sum_j n_j), "validation" or "drop_worst" (see feddf).
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: no paper of its own: FedDF without its schedule, clipping and early stopping, and the
        baseline of MrTF ("AvgLogi", AL) and FedAUX ("mean logits"). Models are weighted by n_k.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020.
    """
    training = Training(
        steps=steps, batch_size=batch_size, optimizer="adam", lr=server_lr, lr_schedule=lr_schedule, clip=clip
    )
    return _pooled("logits", training, temperature, teacher_weighting, average(weighting, buffers=buffers))


def avgprob(
    *,
    steps: int = 500,
    server_lr: float = 1e-3,
    lr_schedule: Schedule = "constant",
    batch_size: int = 128,
    clip: float | None = None,
    temperature: float = 1.0,
    teacher_weighting: TeacherWeighting = "uniform",
    weighting: Weighting = "size",
    buffers: BufferPolicy = "average",
) -> Method:
    """AvgProb: plain distillation on the server, from the mean of the clients' probabilities.

        w_0 = sum_{k in S} p_k w_k,    p(x) = sum_k s_k softmax(z_k(x)),    s_k = 1 / |S|
        w <- Adam on mean_x KL(p(x) || softmax(z(x; w))) from w_0

    Args:
        steps: distillation steps on the server each round; 0 is FedAvg (of the same weighting) bit for bit.
        server_lr: Adam's learning rate.
        lr_schedule: "constant", or "cosine" (to 0, over the steps of a round).
        batch_size: unlabeled samples in a step.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        temperature: divides the logits of every teacher and of the student.
        teacher_weighting: s_k: "uniform", "size" (n_k / sum_j n_j), "validation" or "drop_worst" (see feddf).
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset", "local" or "last" (see fedavg).

    Reveals: the trained model and the number of samples n_k; the server runs every client's model on its own, so
        secure aggregation is impossible.
    Differs from the paper: no paper of its own: MrTF's "AvgProb" and FedBE's "vanilla distillation", and, since the
        gradients are the same, the mean of losses that FedDF's code takes by default. FedDF's own branch for
        probabilities divides only the student's logits by the temperature; here every teacher's too.
    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020.
    """
    training = Training(
        steps=steps, batch_size=batch_size, optimizer="adam", lr=server_lr, lr_schedule=lr_schedule, clip=clip
    )
    return _pooled("probabilities", training, temperature, teacher_weighting, average(weighting, buffers=buffers))


def _pooled(
    pool: Pool, training: Training, temperature: float, teacher_weighting: TeacherWeighting, start: ServerStep
) -> Method:
    student = Student(training, temperature)
    check_student(student)
    believe = soft_belief(pool, temperature=temperature)
    step = distill(student, pool=believe, shares=teacher_shares(teacher_weighting))
    return Method(cross_entropy(), start, (step,))
