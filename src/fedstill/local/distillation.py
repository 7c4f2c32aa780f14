"""Distillation on the client: the student learns from a frozen teacher over a chosen set of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.compose import weighted_mean
from fedstill.core.types import Batch, Local, Objective, Output, Weights
from fedstill.local.terms import full_precision


def start_model(local: Local) -> Weights:
    """The model received this round, as a frozen teacher: `frozen={"start": start_model}` in every term."""
    return local.start


def target_mask(labels: Tensor, classes: int) -> Tensor:
    """(B, K), True at each sample's own class; F.one_hot cannot run under vmap."""
    return labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)


def masked_distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    *,
    student_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """tau^2 KL(p_teacher || p_student) for each sample, (B,); a class that is True in a mask has no mass.

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
    # 0 * -inf is NaN, in the gradient too: where the teacher has no mass the student's log is left out
    log_ratio = torch.xlogy(teacher, teacher) - teacher * log_student.masked_fill(hidden_teacher, 0.0)
    return tau**2 * log_ratio.sum(-1)


def _teacher_probabilities(logits: Tensor, teacher_logits: Tensor | None, hidden: Tensor, tau: float) -> Tensor:
    scores = torch.zeros_like(logits) if teacher_logits is None else full_precision(teacher_logits.detach()) / tau
    probabilities = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return probabilities.masked_fill(hidden, 0.0)  # a row with every class hidden is NaN before this


def not_true_distillation(beta: float = 1.0, *, tau: float = 1.0) -> Objective:
    """beta tau^2 KL(teacher || student) over the classes that are not the sample's own; teacher: the start model."""

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        mask = target_mask(batch.y, output.logits.shape[-1])
        teacher = local.frozen["start"].logits
        losses = masked_distillation_loss(output.logits, teacher, student_mask=mask, teacher_mask=mask, tau=tau)
        return beta * weighted_mean(losses, batch.weight)

    return Objective(loss, frozen={"start": start_model})
