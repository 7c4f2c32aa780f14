"""What the server does with a round: steps from a candidate model to a candidate model."""

from fedstill.server.average import average, normalized_average
from fedstill.server.control import dynamic_correction, update_control
from fedstill.server.curvature import sum_curvature
from fedstill.server.distill import distill
from fedstill.server.migrate import migrate
from fedstill.server.optim import adam, adaptive, sgd

__all__ = [
    "adam",
    "adaptive",
    "average",
    "distill",
    "dynamic_correction",
    "migrate",
    "normalized_average",
    "sgd",
    "sum_curvature",
    "update_control",
]
