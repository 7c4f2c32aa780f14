"""What FedFTG's two players minimise: how far models are apart, and whether teachers recognise what was invented.

Shapes: student logits (B, K), teachers' logits (T, B, K), a teacher's share of each sample (T, B).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedstill.server.pools import full_precision, mix

Distance = Literal["l1", "mse", "forward_kl", "reverse_kl"]
ClassWeights = Literal["sample", "client"]


def apart(kind: Distance, student: Tensor, teachers: Tensor) -> Tensor:
    """(T, B) how far the student s is from teacher t_k on a sample; 0 where both say the same.

        l1:          mean_c |s_c - t_kc|
        mse:         mean_c (s_c - t_kc)^2
        forward_kl:  KL(softmax(t_k) || softmax(s))
        reverse_kl:  KL(softmax(s) || softmax(t_k))

    >>> s, t = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    >>> [round(float(value), 4) for value in apart("l1", s, t)]
    [0.6667, 1.0]
    """
    student, teachers = full_precision(student), full_precision(teachers)
    if kind in ("l1", "mse"):
        gap = student - teachers
        return (gap.abs() if kind == "l1" else gap.square()).mean(-1)
    log_student, log_teachers = torch.log_softmax(student, -1), torch.log_softmax(teachers, -1)
    if kind == "forward_kl":
        return (log_teachers.exp() * (log_teachers - log_student)).sum(-1)
    return (log_student.exp() * (log_student - log_teachers)).sum(-1)


def pooled(each: Tensor, share: Tensor) -> Tensor:
    """mean_i sum_k share_ki each_ki."""
    return (share * each).sum(0).mean()


def discrepancy(kind: Distance, student: Tensor, teachers: Tensor, share: Tensor) -> Tensor:
    """md = mean_i sum_k share_ki apart_ki."""
    return pooled(apart(kind, student, teachers), share)


def lesson_loss(kind: Distance, student: Tensor, teachers: Tensor, share: Tensor, *, per_class: bool) -> Tensor:
    """The discrepancy that the student learns to close; per_class: a KL counts 1 / K of itself, as in the code.

    There it is the mean over samples and classes of -log softmax(s) sum_k share_k softmax(t_k): the same gradient.
    """
    found = discrepancy(kind, student, teachers, share)
    return found / student.shape[-1] if per_class and kind.endswith("kl") else found


def recognition(teachers: Tensor, y: Tensor, share: Tensor, weights: ClassWeights = "sample") -> Tensor:
    """cls = sum_k mean_i share_ki CE(t_ki, y_i), every sample by its own share of the teacher.

    weights "client": sum_k mean_i share_ki mean_i CE(t_ki, y_i), the code's form, in which classes do not count.
    """
    log_teachers = torch.log_softmax(full_precision(teachers), -1)
    wrong = -log_teachers.gather(-1, y.expand(len(teachers), -1).unsqueeze(-1)).squeeze(-1)
    return pooled(wrong, share) if weights == "sample" else (wrong.mean(1) * share.mean(1)).sum()


def ensemble_names(teachers: Tensor, share: Tensor) -> Tensor:
    """(B,) the class that sum_k share_k softmax(t_k) holds for the most probable."""
    return mix(torch.softmax(full_precision(teachers), -1), share).argmax(-1)
