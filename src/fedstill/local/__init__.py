"""The losses that clients minimise: terms that add up."""

from fedstill.core.tree import full_precision
from fedstill.local.distillation import (
    label_masked_distillation,
    masked_distillation_loss,
    not_true_distillation,
    plain_distillation,
    start_model,
    target_mask,
)
from fedstill.local.labels import class_scales, majority, restricted_softmax, smoothed_cross_entropy
from fedstill.local.terms import control_variates, cross_entropy, dynamic_regularization, proximal

__all__ = [
    "class_scales",
    "control_variates",
    "cross_entropy",
    "dynamic_regularization",
    "full_precision",
    "label_masked_distillation",
    "majority",
    "masked_distillation_loss",
    "not_true_distillation",
    "plain_distillation",
    "proximal",
    "restricted_softmax",
    "smoothed_cross_entropy",
    "start_model",
    "target_mask",
]
