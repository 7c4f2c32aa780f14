"""What a server step has to show beside a model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Samples(NamedTuple):
    """What a generator on the server invents."""

    x: Tensor  # (M, ...) as the model reads it: normalised
    y: Tensor  # (M,) int64, the classes that it was asked for


class Targets(NamedTuple):
    """What the server believes about its unlabeled data, and the rows it learns from."""

    probabilities: Tensor  # (M, K), rows sum to 1
    kept: Tensor  # (M,) bool
