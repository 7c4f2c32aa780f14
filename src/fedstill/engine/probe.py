"""One trial step before a program first runs: how much memory a client takes, how its gradients lie in memory."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fedstill.engine.group import Group, Inputs, local_view
from fedstill.engine.memory import free_memory
from fedstill.engine.program import Program
from fedstill.engine.stack import Stack, View, allocate_weights, layout_of

CPU_CHUNK_BYTES = 24 << 20  # near the caches: 250 clients of a 64-64-10 MLP (218 ms a round against 265 with 675)


def probe(program: Program, inputs: Inputs) -> None:
    """Run loss and gradient of a stack of one or two clients; nothing is kept but the two answers."""
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    width = min(2, inputs.index.shape[1])
    stack = Stack(allocate_weights(program.moving, width, {}), width, program.training)
    stack.reset(program.moving)
    view = View(stack, width, stacked=True)
    local = local_view(program, inputs, inputs.seeds[0], width)
    index, weight, bits = (part[0, :width] for part in (inputs.index, inputs.weight, inputs.bits))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses, _ = Group(program, stack, stacked=True).stacked_loss(view, local, index, weight, bits, full=False)
        gradients = torch.autograd.grad(losses.sum(), view.leaves, materialize_grads=True)
    # The fused optimisers need parameter and gradient laid out alike; matching them once saves a copy a step.
    program.layout = {name: layout_of(g) for name, g in zip(view.params, gradients, strict=True) if g.ndim > 1}
    weights = sum(p.numel() * p.element_size() for p in program.moving.params.values())
    program.memory = 4 * weights + 2 * saved // width


def chunk_budget(device: torch.device, program: Program) -> int:
    """Bytes a chunk may take: half of what is free on the GPU; on the CPU about what the caches hold."""
    if device.type == "cuda":
        return free_memory(device) // 2
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(CPU_CHUNK_BYTES, 8 * program.memory), physical // 4)
