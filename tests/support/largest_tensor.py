"""How much memory the largest tensor of a computation takes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """`numbers` of the largest tensor that is made inside the block, also under vmap."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return made
