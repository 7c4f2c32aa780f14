"""What clients minimise: terms that add up."""

from fedstill.local.distillation import (
    masked_distillation_loss,
    not_true_distillation,
    start_model,
    target_mask,
)
from fedstill.local.terms import control_variates, cross_entropy, dynamic_regularization, full_precision, proximal

__all__ = [
    "control_variates",
    "cross_entropy",
    "dynamic_regularization",
    "full_precision",
    "masked_distillation_loss",
    "not_true_distillation",
    "proximal",
    "start_model",
    "target_mask",
]
