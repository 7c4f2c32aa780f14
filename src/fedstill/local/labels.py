"""Losses that use a client's label counts, and losses that take the place of the cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.tree import full_precision
from fedstill.core.types import Batch, Local, Need, Objective, Output
from fedstill.local.terms import cross_entropy


def majority(label_counts: Tensor) -> Tensor:
    """Return a mask (K,) that is True where n_k^y > n_k / K: the classes of which a client has more than an even share.

    The mean is over all K classes, absent ones included, and the comparison is strict: a client with equally many
    samples of each class has no majority class, and neither has a client without samples.

    >>> majority(torch.tensor([6.0, 3.0, 3.0, 0.0])).tolist()
    [True, False, False, False]
    """
    counts = label_counts.double()  # exact; a GPU divides by multiplying with 1 / K, which breaks ties at K = 47
    return counts * counts.shape[-1] > counts.sum(-1, keepdim=True)


def smoothed_cross_entropy(epsilon: float = 0.1) -> Objective:
    """Cross-entropy with the target (1 - epsilon) y + epsilon / K; `y` is class indices or soft targets (B, K)."""
    fit = cross_entropy()

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        fitted = fit.loss(output, batch, local)
        if epsilon == 0:  # not only cheaper: 0 times an overflowed mean would be NaN
            return fitted
        even = -F.log_softmax(full_precision(output.logits), -1).mean(-1)
        return (1.0 - epsilon) * fitted + epsilon * weighted_mean(even, batch.weight)

    return Objective(loss, risk="smoothed_cross_entropy")


def class_scales(label_counts: Tensor, alpha: float, *, proportional: bool = False) -> Tensor:
    """Return alpha_c (K,): 1 where the client has the class, else alpha; proportional: (1 - alpha) n_c / max n + alpha.

    >>> class_scales(torch.tensor([6.0, 3.0, 1.0, 0.0]), 0.5, proportional=True)
    tensor([1.0000, 0.7500, 0.5833, 0.5000])
    """
    if not proportional:
        return torch.full_like(label_counts, alpha).masked_fill(label_counts > 0, 1.0)
    most = label_counts.amax(-1, keepdim=True)
    return (1.0 - alpha) * label_counts / most.masked_fill(most == 0, 1.0) + alpha


def restricted_softmax(alpha: float = 0.5, *, proportional: bool = False) -> Objective:
    """Cross-entropy of softmax(alpha_c z_c), alpha_c below 1 for classes that the client lacks (or has few samples of).

    `class_scales` gives alpha_c. `y` is class indices or soft targets (B, K).
    """
    fit = cross_entropy()

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        logits = full_precision(output.logits)
        scales = class_scales(local.label_counts, alpha, proportional=proportional).to(logits.dtype)
        return fit.loss(output._replace(logits=logits * scales), batch, local)

    return Objective(loss, needs=frozenset({Need.LABEL_COUNTS}), risk="restricted_softmax")
