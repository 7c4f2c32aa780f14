"""What the server does with a round: steps from a candidate model to a candidate model."""

from fedstill.server.aggregate import (
    AGGREGATES,
    average,
    centred_clipping,
    geometric_median,
    krum,
    median,
    norm_bound,
    normalized_average,
    trimmed_mean,
)
from fedstill.server.distill.step import distill
from fedstill.server.optimizers import adam, adaptive, sgd

__all__ = [
    "AGGREGATES",
    "adam",
    "adaptive",
    "average",
    "centred_clipping",
    "distill",
    "geometric_median",
    "krum",
    "median",
    "norm_bound",
    "normalized_average",
    "sgd",
    "trimmed_mean",
]
