"""A group of clients trained together: stacked under vmap, or one client alone; eager or as CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.author_mistakes import UndeclaredInput, tell_mistake
from fedstill.core.errors import FedstillError
from fedstill.core.tree import concatenate, leaves, tree_map
from fedstill.core.tree import rows as rows_of
from fedstill.core.types import Batch, Local, Params, Tree, Weights, no_finish
from fedstill.engine.device_data import free_memory
from fedstill.engine.plan import Plan, sweep_plan
from fedstill.engine.stack import Stack, View, allocate_weights, layout_of
from fedstill.engine.step import Program

PLANNED = ("index", "weight", "bits", "seeds", "lr")  # the inputs that have a row for each step


@dataclass
class Inputs:
    """The plan and the facts of the clients of a group, on the device: (S, C, ...) down to `facts`, then (C, ...)."""

    index: Tensor
    weight: Tensor
    bits: Tensor
    seeds: Tensor
    lr: Tensor
    facts: Tensor  # (4, C): size, steps, travel, lr of the first step
    state: Tree
    label_counts: Tensor  # (C, K)
    optimizer: Tree = field(default_factory=dict)  # (C, ...) what each client's remembers; empty: they are fresh
    starts: Weights | None = None  # (C, ...) where each client begins; None: all begin at the program's start


def make_inputs(
    plan: Plan, state: Tree, label_counts: Tensor, sizes: np.ndarray, dtype: torch.dtype, optimizer: Tree | None = None
) -> Inputs:
    """Move a plan (columns already in the group's order) to the device of `label_counts`."""
    first_lr = plan.lr[0] if len(plan.lr) else np.zeros(len(plan.steps))
    facts = np.stack([sizes, plan.steps, plan.travel, first_lr]).astype(np.float64)
    index, weight, bits, seeds, lr, moved = (
        torch.from_numpy(np.ascontiguousarray(array)).to(label_counts.device)
        for array in (plan.index, plan.weight, plan.bits, plan.seeds, plan.lr, facts)
    )
    weight, lr, moved = weight.to(dtype), lr.to(dtype), moved.to(dtype)
    return Inputs(index, weight, bits, seeds, lr, moved, state, label_counts, optimizer or {})


def columns_of(inputs: Inputs, piece: slice | Tensor) -> Inputs:
    """The inputs of some clients (as views, for a slice)."""
    columns = {name: getattr(inputs, name)[:, piece] for name in (*PLANNED, "facts")}
    of_clients = {name: rows_of(getattr(inputs, name), piece) for name in ("state", "label_counts", "optimizer")}
    starts = None if inputs.starts is None else rows_of(inputs.starts, piece)
    return Inputs(**columns, **of_clients, starts=starts)


def local_view(program: Program, inputs: Inputs, seed: Tensor, width: int) -> Local:
    """Return the Local of a group's clients, stacked; the step fills in `params` and `frozen`."""
    size, steps, travel, lr = (fact[:width] for fact in inputs.facts)
    state = tree_map(lambda leaf: leaf[:width], inputs.state)
    counts = inputs.label_counts[:width]
    return Local({}, {}, program.start, program.received, state, {}, counts, size, steps, travel, lr, seed[:width])


def of_clients(local: Local, piece: slice | int) -> Local:
    """The part of a stacked Local that is some clients' own, as views; an int drops the client dimension."""
    names = ("params", "buffers", "state", "label_counts", "size", "steps", "travel", "lr", "seed")
    return local._replace(**{name: rows_of(getattr(local, name), piece) for name in names})


def map_clients(function: Callable[..., Any], local: Local, *stacked: Any) -> Any:
    """vmap `function(local, *stacked)` over clients; `start` and `received` are shared, not copied."""
    shape: tuple[Any, ...] = (local._replace(start=(), received={}), *stacked)  # type: ignore[arg-type]

    def run(*flat: Tensor) -> Any:
        given = iter(flat)
        part, *rest = tree_map(lambda _: next(given), shape)
        return function(part._replace(start=local.start, received=local.received), *rest)

    try:
        return torch.func.vmap(run)(*leaves(shape))  # flat: torch's own tree code would take a tenth of a small step
    except (RuntimeError, FedstillError) as error:
        tell_mistake(error)
        raise


class Group:
    """Runs the steps of one plan over a stack. Clients are sorted by steps, the longest first."""

    def __init__(self, program: Program, stack: Stack, *, stacked: bool) -> None:
        self.program, self.stack, self.stacked = program, stack, stacked
        self.locals: tuple[Inputs | None, int, Local | None] = (None, 0, None)

    def local(self, inputs: Inputs, width: int) -> Local:
        """The part of Local that does not change from step to step."""
        if self.locals[0] is not inputs or self.locals[1] != width or self.locals[2] is None:
            self.locals = inputs, width, local_view(self.program, inputs, inputs.facts[1], width)
        assert self.locals[2] is not None
        return self.locals[2]

    def run(self, plan: Plan, inputs: Inputs) -> Iterator[None]:
        """Train; yields after every step, so that several groups can share a device."""
        steps, views = plan.steps, {}
        full, shared_rate = plan.full, plan.shared_rate
        rates = torch.from_numpy(plan.lr[:, 0]).to(inputs.lr.dtype).tolist()
        for step in range(len(plan.index)):
            width = int((steps > step).sum()) if self.stacked else 1
            if width not in views:
                views = {width: View(self.stack, width, stacked=self.stacked)}
            # a trace is of one shape: the few batches that are not full stay padded
            real = None if self.stacked or self.program.compiled else int(plan.weight[step].sum())
            rate = rates[step] if shared_rate else inputs.lr[step, :width]
            self.step(views[width], inputs, step, rate=rate, full=bool(full[step]) or real is not None, real=real)
            yield

    def step(
        self, view: View, inputs: Inputs, step: int | Tensor, *, rate: float | Tensor, full: bool, real: int | None
    ) -> None:
        """One optimiser step of every client in the view; `real` trims the batch of a client that runs alone."""
        width = view.width
        index, weight, bits, seed = (
            row_at(tensor, step)[:width] for tensor in (inputs.index, inputs.weight, inputs.bits, inputs.seeds)
        )
        if real is not None:
            index, weight, bits = index[:, :real], weight[:, :real], bits[:, :real]
        local = self.local(inputs, width)._replace(seed=seed)
        if self.stacked:
            losses, buffers = self.stacked_loss(view, local, index, weight, bits, full)
        else:
            (x, y), channels_last = self.program.batch(index[0], bits[0]), torch.channels_last
            if x.ndim == 4 and any(p.is_contiguous(memory_format=channels_last) for p in view.leaves if p.ndim == 4):
                x = x.contiguous(memory_format=channels_last)
            alone = of_clients(local, 0)._replace(frozen=self.program.cached(index[0]))
            try:
                losses, buffers = self.program.loss_alone(
                    view.params, view.buffers, Batch(x, y, weight[0]), alone, full
                )
            except UndeclaredInput as error:
                tell_mistake(error)
                raise
        gradients = torch.autograd.grad(losses.sum(), view.leaves, materialize_grads=True)
        with torch.no_grad():
            if isinstance(step, Tensor):  # a captured view may still hold clients that have finished
                still = step < local.steps
                losses = torch.where(still if self.stacked else still[0], losses.detach(), 0.0)
            view.loss.add_(losses.detach())
            view.keep(buffers)
            view.update(gradients, rate)

    def stacked_loss(
        self, view: View, local: Local, index: Tensor, weight: Tensor, bits: Tensor, full: bool
    ) -> tuple[Tensor, Params]:
        program, (x, y) = self.program, self.program.batch(index, bits)

        def loss(part: Local, params: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Params]:
            return program.client_loss(params, buffers, batch, part, full)

        local = local._replace(frozen=program.cached(index))
        result: tuple[Tensor, Params] = map_clients(loss, local, view.params, view.buffers, Batch(x, y, weight))
        return result


def row_at(tensor: Tensor, step: int | Tensor) -> Tensor:
    """Row `step`; a device scalar is looked up on the device (CUDA graphs)."""
    return tensor[step] if isinstance(step, int) else tensor.index_select(0, step.reshape(1))[0]


def finish_clients(
    program: Program, local: Local, rows: np.ndarray, sizes: np.ndarray, *, chunk: int | None
) -> tuple[Tree, Tree]:
    """(new states, extra uploads), stacked over the cohort; `chunk` clients at once under vmap, None: one by one."""
    finish = program.objective.finish
    if finish is no_finish:
        return {}, {}
    first = np.cumsum(sizes) - sizes
    pairs = []
    for at in range(0, len(sizes), chunk or 1):
        piece = slice(at, at + (chunk or 1))
        theirs = rows[first[at] : first[at] + sizes[piece].sum()]
        if chunk is None:
            alone = of_clients(local, at)
            measured = _measure_alone(program, alone, theirs)
            with torch.no_grad():
                pairs.append(tree_map(lambda leaf: leaf.unsqueeze(0), finish(alone, measured)))
        else:
            part = of_clients(local, piece)
            measured = _measure_stacked(program, part, theirs, sizes[piece])
            with torch.no_grad():
                pairs.append(map_clients(finish, part, measured))
    return pairs[0] if len(pairs) == 1 else concatenate(pairs)


def _measure_stacked(program: Program, local: Local, rows: np.ndarray, sizes: np.ndarray) -> Tree:
    """Mean over each client's batches, weighted by real samples; an epoch in order, nothing augmented."""
    measure = program.objective.measure
    if measure is None:
        return {}
    index, weight = (
        torch.from_numpy(part).to(program.feed.device) for part in sweep_plan(rows, sizes, program.training.batch_size)
    )
    weight = weight.to(local.size.dtype)
    total: Tree | None = None
    for step in range(len(index)):
        x, y = program.feed.batch(index[step], index[step], ())
        looked: Tree = map_clients(
            lambda part, batch: measure(program.model, batch, part), local, Batch(x, y, weight[step])
        )
        share = weight[step].sum(1) / local.size.clamp_min(1)
        looked = tree_map(lambda leaf, s=share: leaf * s.reshape(-1, *[1] * (leaf.ndim - 1)), looked)
        total = looked if total is None else tree_map(torch.add, total, looked)
    return total if total is not None else {}


def _measure_alone(program: Program, local: Local, rows: np.ndarray) -> Tree:
    measure = program.objective.measure
    if measure is None:
        return {}
    total: Tree = {}
    has_data = len(rows) > 0
    # Nobody's row stands in for no data: it counts nothing, but `finish` finds what it looks for.
    index = torch.from_numpy(rows if has_data else np.zeros(1, np.int64)).to(program.feed.device)
    for piece in torch.split(index, program.training.batch_size):
        x, y = program.feed.batch(piece, piece, ())
        weight = torch.full((len(piece),), float(has_data), device=x.device, dtype=local.size.dtype)
        share = len(piece) / len(rows) if has_data else 0.0
        looked = tree_map(lambda leaf, s=share: leaf * s, measure(program.model, Batch(x, y, weight), local))
        total = tree_map(torch.add, total, looked) if total else looked
    return total


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
