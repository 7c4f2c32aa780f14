"""What the server does with a round: steps from a candidate model to a candidate model."""

from fedstill.server.aggregate import (
    AGGREGATES,
    average,
    geometric_median,
    krum,
    median,
    norm_bound,
    normalized_average,
    trimmed_mean,
)
from fedstill.server.distill.step import distill
from fedstill.server.memory import dynamic_correction, sum_curvature, update_control
from fedstill.server.optimizers import adam, adaptive, sgd

__all__ = [
    "AGGREGATES",
    "adam",
    "adaptive",
    "average",
    "distill",
    "dynamic_correction",
    "geometric_median",
    "krum",
    "median",
    "norm_bound",
    "normalized_average",
    "sgd",
    "sum_curvature",
    "trimmed_mean",
    "update_control",
]
