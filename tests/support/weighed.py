"""Methods whose clients count in another way than by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedstill.core.types import Method
from fedstill.server.aggregate import average, normalized_average


def weighed(method: Method, weighting: Literal["size", "uniform"]) -> Method:
    """The method, in whose average clients count by size or alike.

    >>> from fedstill.methods import fedavg
    >>> weighed(fedavg(), "uniform").aggregate.weighting
    'uniform'
    """
    kind = normalized_average if method.aggregate.name == "normalized_average" else average
    return replace(method, aggregate=kind(weighting))
