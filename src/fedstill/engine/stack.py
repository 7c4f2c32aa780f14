"""The weights of several clients side by side, and torch's own optimisers stepping them at once.

torch.optim is element-wise, so one optimiser over stacked tensors is one optimiser per client. A view of the
first clients shares storage with the whole stack: when the last clients finish, training goes on in a
narrower view and their rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedstill.core.tree import clone, rows, tree_map, zeros_like
from fedstill.core.types import Params, Training, Tree, Weights

Leaves = list[Tensor]  # one for each parameter
Layout = dict[str, tuple[int, ...]]  # a parameter's dimensions from slowest to fastest in memory


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions of one client's tensor from slowest to fastest, read off the strides of a stacked one."""
    return memory_order(tensor.stride()[1:])


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from slowest to fastest in memory."""
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

    def reset(self, start: Weights, starts: Weights | None = None) -> None:
        """Everybody starts at the received model with a fresh optimiser; the first clients at `starts`, if given."""
        for mine, received in ((self.params, start.params), (self.buffers, start.buffers)):
            if mine:
                torch._foreach_copy_(list(mine.values()), [received[name].expand_as(mine[name]) for name in mine])
        if starts is not None:
            for mine, given in ((self.params, starts.params), (self.buffers, starts.buffers)):
                for name, leaf in mine.items():
                    leaf[: len(given[name])].copy_(given[name])
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
        """Return a copy of the first client's optimiser state; empty if it keeps none."""
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
        # torch's fused SGD on a CPU copies a gradient that is not contiguous: most of the update of a small MLP
        self.orders = [memory_order(leaf.stride()) for leaf in self.leaves]
        self.as_contiguous = [
            self.in_memory_order([leaf.detach() for leaf in of]) for of in (self.leaves, *self.moments)
        ]

    def in_memory_order(self, tensors: Leaves) -> Leaves:
        """Return tensors that lie in memory as the parameters do, as contiguous ones, without a copy."""
        return [tensor.permute(order) for tensor, order in zip(tensors, self.orders, strict=True)]

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
            matched = clip(matched, training.clip, stacked=self.stacked)
        if isinstance(rate, Tensor) and rate.ndim == 1:
            step_by_row(training, self.leaves, matched, self.moments, self.stack.count, rate)
        else:
            leaves, *moments = self.as_contiguous
            step(training, leaves, self.in_memory_order(matched), moments, self.stack.count, rate)


class Finished(NamedTuple):
    """A trained cohort, stacked in its order."""

    weights: Weights
    loss: Tensor  # (C,) sums over steps
    optimizer: Tree  # what each client's remembers, where it is kept


class Results:
    """Rows in the order of the plan's columns; `weights` are handed out in the order of the cohort.

    optimizer: what each client's remembered before, if it is kept.
    """

    def __init__(
        self, start: Weights, cohort: int, like: Tensor, layout: Layout | None = None, optimizer: Tree | None = None
    ) -> None:
        self.stacked = allocate_weights(start, cohort, layout or {})
        self.loss = like.new_zeros(cohort)
        self.optimizer: Tree = clone(optimizer or {})

    def fill(self, start: Weights) -> None:
        """Everybody has the received model (a client without a step keeps it)."""
        tree_map(lambda leaf, value: leaf.copy_(value.expand_as(leaf)), self.stacked, start)

    def piece(self, rows: slice) -> Weights:
        """Some rows as storage: a stack trained there needs no copy.

        `data`: autograd counts the changes of each piece apart, so that another worker may change its own meanwhile.
        """
        return tree_map(lambda leaf: leaf[rows].data, self.stacked)

    def take(self, stack: Stack, source: slice, rows: slice) -> None:
        """Copy some clients of a stack to their rows."""
        finished = Weights(stack.params, stack.buffers)
        tree_map(lambda leaf, value: leaf[rows].copy_(value[source]), self.stacked, finished)
        self.loss[rows] = stack.loss[source].to(self.loss.dtype)
        if self.optimizer:
            mine = self.optimizer["moments"]
            tree_map(lambda value, leaf: leaf[rows].copy_(value[source]), stack.moments, mine)
            self.optimizer["count"][rows] = stack.count.to(self.optimizer["count"].dtype)

    def ordered(self, order: list[int]) -> Finished:
        """Row i goes to place order[i]."""
        finished = Finished(self.stacked, self.loss, self.optimizer)
        if order == list(range(len(order))):
            return finished
        places = torch.empty(len(order), dtype=torch.int64)
        places[torch.tensor(order)] = torch.arange(len(order))
        return rows(finished, places.to(self.loss.device))


def moment_names(training: Training) -> tuple[str, ...]:
    """The tensors an optimiser keeps beside each parameter; all start at zero."""
    if training.optimizer == "sgd":
        return ("momentum",) if training.momentum else ()
    return ("mean", "square")


def first_memory(training: Training, params: Params) -> Tree:
    """Return the state of a fresh optimiser for one model; empty if it keeps none."""
    moments = {moment: zeros_like(params) for moment in moment_names(training)}
    return {"moments": moments, "count": next(iter(params.values())).new_zeros(())} if moments else {}


def step(
    training: Training, params: Leaves, gradients: Leaves, moments: list[Leaves], count: Tensor, rate: float | Tensor
) -> None:
    """One step in place. `count` is Adam's step number before this step; `rate` a number or a device scalar.

    A zero momentum buffer makes torch's special first step (buffer = gradient) the ordinary one.
    """
    shared: dict[str, Any] = {"fused": True, "foreach": False, "maximize": False}
    shared |= {"lr": rate, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        buffers: list[Any] = moments[0] if moments else [None] * len(params)
        momentum, nesterov = training.momentum, training.nesterov
        sgd(params, gradients, buffers, momentum=momentum, dampening=0.0, nesterov=nesterov, **shared)
        return
    function = {"adam": adam, "adamw": adamw}[training.optimizer]
    counts = list(count.repeat(len(params)).unbind())  # the fused kernel advances one count a parameter
    shared |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
    function(params, gradients, moments[0], moments[1], [], counts, **shared)
    count.add_(1)


def step_by_row(
    training: Training, params: Leaves, gradients: Leaves, moments: list[Leaves], count: Tensor, rates: Tensor
) -> None:
    """A rate for each client (C,): every update here is linear in the rate, so w + lr_k (w(lr = 1) - w)."""
    before = [param.clone() for param in params]
    step(training, params, gradients, moments, count, 1.0)
    for param, old in zip(params, before, strict=True):
        param.copy_(torch.lerp(old, param, rates.to(param.dtype).reshape(-1, *[1] * (param.ndim - 1))))


def clip(gradients: Leaves, bound: float, *, stacked: bool) -> Leaves:
    """torch.nn.utils.clip_grad_norm_, client by client."""
    if stacked:
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    else:
        squares = torch.stack([g.square().sum() for g in gradients]).sum()
    scale = (bound / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return [g * (scale.reshape(-1, *[1] * (g.ndim - 1)) if stacked else scale) for g in gradients]
