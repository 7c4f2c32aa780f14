"""What code that runs for many clients at once must not do, told from PyTorch's messages."""

from __future__ import annotations

import re

# (pattern in PyTorch's message, what the code does, what to do instead)
_CAUSES = (
    (r"calling \.item\(\)", "calls .item(), float() or int() on a tensor", "keep it a tensor"),
    (
        r"functional\.one_hot",
        "calls F.one_hot without num_classes",
        "use fedstill.local.target_mask, or give it num_classes",
    ),
    (r"data-dependent control flow", "branches on the value of a tensor (if tensor)", "use torch.where"),
    (
        r"dynamic shape|boolean mask",
        "makes a shape that depends on values (boolean mask, nonzero, unique)",
        "use torch.where or masked_fill",
    ),
    (
        r"inplace arithmetic|match the broadcast shape",
        "writes one client's values into a tensor that all clients share",
        "write out of place (x = x + y) or into torch.zeros_like(x)",
    ),
    (r"data pointer|numpy", "leaves PyTorch (.numpy(), .tolist())", "stay in tensor operations"),
    (
        r"setup_context|vmap support",
        "uses a torch.autograd.Function without a vmap rule",
        "give the Function setup_context and generate_vmap_rule = True",
    ),
    (
        r"(?:Batching rule not implemented|derivative) for (aten::\w+)",
        "uses {} (PyTorch has no batched form of it)",
        "replace that operation",
    ),
)


def why_not_under_vmap(message: str) -> tuple[str, str] | None:
    """(what the code does, what to do instead), of an error of PyTorch's; None where no rule names it."""
    for pattern, does, instead in _CAUSES:
        found = re.search(pattern, message)
        if found:
            return does.format(*found.groups()), instead
    return None
