"""Convolutions of many clients in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch


def is_batched(x: Tensor) -> bool:
    """Return whether vmap runs over a tensor and is the innermost transform, because only then its rules apply."""
    if torch.compiler.is_dynamo_compiling() or not _functorch.is_batchedtensor(x):
        return False
    return bool(_functorch.maybe_get_level(x) == _functorch.maybe_current_level())


def is_wrapped(x: Tensor) -> bool:
    """Return whether a tensor is inside vmap, torch.func.grad or another transform."""
    return not torch.compiler.is_dynamo_compiling() and _functorch.is_functorch_wrapped_tensor(x)
