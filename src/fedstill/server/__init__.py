"""What the server does with a round: steps from a candidate model to a candidate model."""

from fedstill.server.aggregate import average, normalized_average
from fedstill.server.distill.step import distill
from fedstill.server.memory import dynamic_correction, sum_curvature, update_control
from fedstill.server.optimizers import adam, adaptive, sgd

__all__ = [
    "adam",
    "adaptive",
    "average",
    "distill",
    "dynamic_correction",
    "normalized_average",
    "sgd",
    "sum_curvature",
    "update_control",
]
