"""Convolutions of many clients in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch


def is_batched(x: Tensor) -> bool:
    """Whether vmap sees several of it, and is the innermost transform: else its rule is not what is asked for."""
    if torch.compiler.is_dynamo_compiling() or not _functorch.is_batchedtensor(x):
        return False
    return bool(_functorch.maybe_get_level(x) == _functorch.maybe_current_level())


def is_wrapped(x: Tensor) -> bool:
    """Whether it is under vmap, torch.func.grad or another of them."""
    return not torch.compiler.is_dynamo_compiling() and _functorch.is_functorch_wrapped_tensor(x)
