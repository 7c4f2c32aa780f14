"""Distillation on the client: the student learns from a frozen teacher over a chosen set of classes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.tree import full_precision
from fedstill.core.types import Batch, Local, Need, Objective, Output, Weights
from fedstill.local.labels import majority

Masked = Literal["nothing", "target", "target and majority"]


def start_model(local: Local) -> Weights:
    """Return the model that the client received this round; `frozen={"start": start_model}` makes it a teacher."""
    return local.start


def target_mask(labels: Tensor, classes: int) -> Tensor:
    """Return a mask (B, K) that is True at each sample's class; F.one_hot does not do, because vmap cannot run it."""
    if labels.is_floating_point():
        raise FedstillError("the labels are soft targets, which have no single class to mask: give class indices")
    return labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)


def masked_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    *,
    student_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Return tau^2 KL(p_teacher || p_student) for each sample, (B,); a class that is True in a mask has no mass.

        p_student = softmax(z / tau) over the classes not in student_mask
        p_teacher = softmax(z_teacher / tau) over the classes not in teacher_mask (uniform there without a teacher)

    teacher_mask must contain student_mask, otherwise the divergence is infinite. A sample whose classes are all
    masked in the teacher counts 0. No gradient reaches the teacher.

    >>> z, teacher = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0.5, 0.0, 1.0, 2.0]])
    >>> target = target_mask(torch.tensor([0]), 4)
    >>> loss = masked_distillation_loss(z, teacher, student_mask=target, teacher_mask=target)
    >>> round(loss.item(), 4)
    1.1504
    """
    logits = full_precision(student_logits)
    nothing_masked = torch.zeros_like(logits, dtype=torch.bool)
    hidden_student = nothing_masked if student_mask is None else student_mask
    hidden_teacher = nothing_masked if teacher_mask is None else teacher_mask

    log_student = torch.log_softmax((logits / tau).masked_fill(hidden_student, -torch.inf), dim=-1)
    teacher = _teacher_probabilities(logits, teacher_logits, hidden_teacher, tau)
    # 0 * -inf is NaN, in the gradient too, so the student's log is left out where the teacher has no mass
    log_ratio = torch.xlogy(teacher, teacher) - teacher * log_student.masked_fill(hidden_teacher, 0.0)
    return tau**2 * log_ratio.sum(-1)


def _teacher_probabilities(logits: Tensor, teacher_logits: Tensor | None, hidden: Tensor, tau: float) -> Tensor:
    scores = torch.zeros_like(logits) if teacher_logits is None else full_precision(teacher_logits.detach()) / tau
    probabilities = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return probabilities.masked_fill(hidden, 0.0)  # a row with every class hidden is NaN before this


def masked_distillation(beta: float, tau: float, *, teacher: bool, masked: Masked) -> Objective:
    """Return beta times the mean of `masked_distillation_loss`; `masked` names the classes that the teacher hides.

    The student hides the sample's class y only. The teacher hides y even where it is no majority class, because the
    student has no mass there.
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        target = None if masked == "nothing" else target_mask(batch.y, output.logits.shape[-1])
        hidden = target
        if target is not None and masked == "target and majority":
            hidden = target | majority(local.label_counts)
        logits = local.frozen["start"].logits if teacher else None
        losses = masked_distillation_loss(output.logits, logits, student_mask=target, teacher_mask=hidden, tau=tau)
        return beta * weighted_mean(losses, batch.weight)

    return Objective(
        loss,
        frozen={"start": start_model} if teacher else {},
        needs=frozenset({Need.LABEL_COUNTS}) if masked == "target and majority" else frozenset(),
    )


def plain_distillation(beta: float = 1.0, *, tau: float = 1.0) -> Objective:
    """beta tau^2 KL(teacher || student) over all classes; teacher: the start model."""
    return masked_distillation(beta, tau, teacher=True, masked="nothing")


def not_true_distillation(beta: float = 1.0, *, tau: float = 1.0, teacher: bool = True) -> Objective:
    """beta tau^2 KL(teacher || student) over the classes i != y; teacher: the start model, or uniform without it."""
    return masked_distillation(beta, tau, teacher=teacher, masked="target")


def label_masked_distillation(beta: float = 1.0, *, tau: float = 1.0, teacher: bool = True) -> Objective:
    """beta tau^2 KL(teacher || student), student over i != y, teacher over its classes of which the client has few.

        p_student = softmax(z / tau) over i != y
        p_teacher = softmax(z_start / tau) over i != y with n_k^i <= n_k / K, or uniform there without a teacher

    A class of which the client has many samples is pushed down in the student unless it is the sample's class. A sample
    for which the teacher hides all classes counts 0.
    """
    return masked_distillation(beta, tau, teacher=teacher, masked="target and majority")
