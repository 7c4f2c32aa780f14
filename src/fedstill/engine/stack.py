"""The weights of several clients side by side, and torch's own optimisers stepping them at once.

torch.optim is element-wise, so one optimiser over stacked tensors is one optimiser per client. A view of the
first clients shares storage with the whole stack: when the last clients finish, training goes on in a
narrower view and their rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedstill.core.tree import clone, rows, tree_map
from fedstill.core.types import Params, Training, Tree, Weights
from fedstill.engine import optim
from fedstill.engine.optim import moment_names

Layout = dict[str, tuple[int, ...]]  # a parameter's dimensions from slowest to fastest in memory


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions of one client's tensor from slowest to fastest, read off the strides of a stacked one."""
    strides = tensor.stride()[1:]
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def allocate(tensor: Tensor, width: int, order: tuple[int, ...] | None = None) -> Tensor:
    """(width, *tensor.shape), uninitialised, each client's tensor laid out in memory by `order`."""
    if order is None or order == tuple(range(tensor.ndim)):
        return tensor.new_empty(width, *tensor.shape)
    inverse = [order.index(d) + 1 for d in range(tensor.ndim)]
    return tensor.new_empty(width, *(tensor.shape[d] for d in order)).permute(0, *inverse)


def allocate_weights(start: Weights, width: int, layout: Layout) -> Weights:
    return Weights(
        {name: allocate(p, width, layout.get(name)) for name, p in start.params.items()},
        {name: allocate(b, width) for name, b in start.buffers.items()},
    )


class Stack:
    """Parameters, buffers, optimiser state and loss sums of the clients in `storage` (stacked weights)."""

    def __init__(self, storage: Weights, width: int, training: Training) -> None:
        self.width, self.training = width, training
        self.params, self.buffers = storage
        self.moments = {
            moment: {name: torch.empty_like(p) for name, p in self.params.items()} for moment in moment_names(training)
        }
        first = next(iter(self.params.values()))
        self.count = torch.zeros((), device=first.device)  # Adam's step number: the same for all clients in the stack
        self.loss = first.new_zeros(width)

    def reset(self, start: Weights) -> None:
        """Everybody starts at the received model with a fresh optimiser."""
        for mine, received in ((self.params, start.params), (self.buffers, start.buffers)):
            if mine:
                torch._foreach_copy_(list(mine.values()), [received[name].expand_as(mine[name]) for name in mine])
        for moments in self.moments.values():
            torch._foreach_zero_(list(moments.values()))
        self.count.zero_()
        self.loss.zero_()

    def go_on(self, optimizer: Tree) -> None:
        """Take what an optimiser remembered (see `optimizer`); everybody goes on with the same. Empty: nothing."""
        if optimizer:
            tree_map(lambda mine, old: mine.copy_(old.expand_as(mine)), self.moments, optimizer["moments"])
            self.count.copy_(optimizer["count"])

    def optimizer(self) -> Tree:
        """A copy of what the first client's optimiser remembers; empty if it remembers nothing."""
        return {"moments": clone(rows(self.moments, 0)), "count": self.count.clone()} if self.moments else {}

    def tensors(self) -> Iterable[Tensor]:
        yield from self.params.values()
        yield from self.buffers.values()
        for moments in self.moments.values():
            yield from moments.values()
        yield self.count
        yield self.loss


class View:
    """The first `width` clients of a stack as autograd leaves; not stacked: one client alone."""

    def __init__(self, stack: Stack, width: int, *, stacked: bool) -> None:
        self.stack, self.width, self.stacked = stack, width, stacked

        def cut(tensor: Tensor) -> Tensor:
            return (tensor[:width] if stacked else tensor[0]).detach()

        self.params: Params = {name: cut(p).requires_grad_() for name, p in stack.params.items()}
        self.buffers: Params = {name: cut(b) for name, b in stack.buffers.items()}
        self.loss = cut(stack.loss)
        self.leaves = list(self.params.values())
        self.moments = [[cut(m) for m in moments.values()] for moments in stack.moments.values()]

    @torch.no_grad()
    def keep(self, buffers: Params) -> None:
        """New buffers, all of a kind in one kernel: a BatchNorm net has three times as many as it has layers."""
        for kind in {buffer.dtype for buffer in buffers.values()}:
            names = [name for name, buffer in buffers.items() if buffer.dtype == kind]
            torch._foreach_copy_([self.buffers[name] for name in names], [buffers[name] for name in names])

    @torch.no_grad()
    def update(self, gradients: Iterable[Tensor], rate: float | Tensor) -> None:
        """One optimiser step; `rate` is a number, a device scalar, or one number per client (C,)."""
        training = self.stack.training
        matched = [  # the fused kernels walk parameter and gradient in memory order
            g if g.stride() == leaf.stride() else torch.empty_like(leaf).copy_(g)
            for leaf, g in zip(self.leaves, gradients, strict=True)
        ]
        if training.clip is not None:
            matched = optim.clip(matched, training.clip, stacked=self.stacked)
        by_row = isinstance(rate, Tensor) and rate.ndim == 1
        update = optim.step_by_row if by_row else optim.step
        update(training, self.leaves, matched, self.moments, self.stack.count, rate)  # type: ignore[arg-type]
