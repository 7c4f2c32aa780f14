"""Steps replayed as CUDA graphs: static tensors, a step counter on the device, no host work inside a round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fedstill.core.tree import tree_map
from fedstill.engine.group import PLANNED, Group, Inputs, row_at
from fedstill.engine.plan import Plan
from fedstill.engine.stack import Results, Stack, View
from fedstill.engine.step import Program

SHRINK = 0.7  # a captured width is kept until fewer than this share of its clients are left


def ladder(width: int) -> list[int]:
    """Captured widths, from all clients down to one: few graphs, little waste."""
    widths = [width]
    while widths[-1] > 1:
        widths.append(min(widths[-1] - 1, max(1, int(widths[-1] * SHRINK))))
    return widths


class CapturedGroup:
    """A Group whose steps are captured once for each (width, full, shared rate) and replayed ever after."""

    def __init__(self, program: Program, stack: Stack, *, stacked: bool) -> None:
        self.group = Group(program, stack, stacked=stacked)
        self.stack, self.stacked = stack, stacked
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.cursor = torch.zeros((), dtype=torch.int64, device=stack.loss.device)
        self.inputs: Inputs | None = None
        self.graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        self.views: list[View] = []

    def load(self, inputs: Inputs, columns: slice) -> None:
        """Copy a group's inputs into the static ones; longer plans than ever before cost a new capture."""
        steps, width = inputs.index.shape[0], self.stack.width
        if self.inputs is None or self.inputs.index.shape[0] < steps:
            self.graphs.clear()
            self.inputs = _static_inputs(inputs, capacity=1 << max(steps - 1, 1).bit_length(), width=width)
        static = self.inputs
        count = inputs.index[:1, columns].shape[1]
        for name in PLANNED:
            getattr(static, name)[:steps, :count].copy_(getattr(inputs, name)[:, columns], non_blocking=True)
        static.facts[:, :count].copy_(inputs.facts[:, columns])
        static.label_counts[:count].copy_(inputs.label_counts[columns])
        tree_map(lambda old, new: old[:count].copy_(new[columns]), static.state, inputs.state)
        self.cursor.zero_()

    def run(self, plan: Plan, results: Results, first: int) -> Iterator[None]:
        """Replay the loaded plan; a finished client is copied to its row (from `first` on) in `results`."""
        # the fused kernels read a rate on the device as float32
        full, shared_rate = plan.full, plan.shared_rate and self.stack.loss.dtype != torch.float64
        widths = ladder(self.stack.width)
        active = int((plan.steps > 0).sum())
        for step in range(len(plan.index)):
            width = min(w for w in widths if w >= active)
            self.graph(width, bool(full[step]), shared_rate).replay()
            left = int((plan.steps > step + 1).sum())
            if left < active:
                results.take(self.stack, slice(left, active), slice(first + left, first + active))
                active = left
            yield

    def graph(self, width: int, full: bool, shared_rate: bool) -> torch.cuda.CUDAGraph:
        key = (width, full or not self.group.program.model.traits.batch_statistics, shared_rate)
        if key not in self.graphs:
            self.graphs[key] = self._capture(*key)
        return self.graphs[key]

    def _capture(self, width: int, full: bool, shared_rate: bool) -> torch.cuda.CUDAGraph:
        view = View(self.stack, width, stacked=self.stacked)
        self.views.append(view)
        return capture(lambda: self._once(view, full, shared_rate), self.cursor, list(self.stack.tensors()))

    def _once(self, view: View, full: bool, shared_rate: bool) -> None:
        assert self.inputs is not None
        rates = row_at(self.inputs.lr, self.cursor)
        rate = rates[0].float() if shared_rate else rates[: view.width]
        self.group.step(view, self.inputs, self.cursor, rate=rate, full=full, real=None)
        self.cursor.add_(1)


def _static_inputs(inputs: Inputs, *, capacity: int, width: int) -> Inputs:
    planned = {name: getattr(inputs, name) for name in PLANNED}
    timed = {name: tensor.new_zeros(capacity, width, *tensor.shape[2:]) for name, tensor in planned.items()}
    zeros = tree_map(lambda tensor: tensor.new_zeros(width, *tensor.shape[1:]), (inputs.state, inputs.label_counts))
    facts = inputs.facts.new_zeros(len(inputs.facts), width)
    return Inputs(**timed, facts=facts, state=zeros[0], label_counts=zeros[1])


WARM_UPS = 2  # libraries set themselves up in the first run, and autograd in the second


def capture(once: Callable[[], None], cursor: Tensor, changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """`once` as a graph. It runs for warming up, then `changed`, which it writes to, is put back as it was.

    cursor: the number of the step on the device, which `once` reads and advances.
    """
    saved = [tensor.clone() for tensor in (*changed, cursor)]
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            cursor.zero_()
            once()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph, stream=side):
        once()
    for tensor, old in zip((*changed, cursor), saved, strict=True):
        tensor.copy_(old)
    return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """An old graph that the garbage collector frees during a capture breaks it (pytorch/pytorch#161037)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
