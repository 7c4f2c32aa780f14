"""Fully connected networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.models.network import Network, classifier, dense, initialise


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (1024, 1024, 128),
    init: str = "paper",
    projection: int = 0,
) -> Network:
    """MrTF's MLPNet: input - 1024 - 1024 - 128 - classes, ReLU; features are the last hidden layer.

    `hidden` gives other widths; it may be empty (a linear classifier on the raw input).
    """
    if any(not isinstance(width, int) or width < 1 for width in hidden):
        raise FedstillError(f"model.hidden = {list(hidden)} must be a list of positive whole numbers")
    widths = [math.prod(input_shape), *hidden]
    return initialise(classifier([nn.Flatten(), *dense(*widths)], widths[-1], classes, projection), init)
