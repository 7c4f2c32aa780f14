"""Two ways to run a cohort: a whole chunk as one stack under vmap, or client by client."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fedstill.core.trainer import Fitted, Watch
from fedstill.core.tree import rows
from fedstill.core.types import Params, Tree, Weights
from fedstill.engine.cuda_graphs import CapturedGroup
from fedstill.engine.group import Group, Inputs, columns_of
from fedstill.engine.plan import Plan
from fedstill.engine.stack import Finished, Layout, Results, Stack, allocate_weights
from fedstill.engine.step import Program
from fedstill.engine.workers import Workers


class Batched:
    """Runs a cohort in chunks; on CUDA the steps are captured once and replayed."""

    def __init__(self, program: Program, workers: Workers, *, chunk: int, graphs: bool) -> None:
        self.program, self.workers, self.chunk, self.use_graphs = program, workers, chunk, graphs
        self.captured: CapturedGroup | None = None

    def run(self, plan: Plan, inputs: Inputs, order: list[int]) -> Finished:
        """Train every column of the plan (longest first); row order[i] of the result is column i."""
        results = Results(self.program.moving, len(order), inputs.facts, self.program.layout)
        if self.use_graphs:
            results.fill(self.program.moving)
        pieces = [slice(at, min(at + self.chunk, len(order))) for at in range(0, len(order), self.chunk)]
        if self.use_graphs:
            for piece in pieces:
                self._replay(_part_of(plan, piece), inputs, piece, results)
            return results.ordered(order)

        def work(worker: int, waiting: Iterator[slice]) -> None:
            for piece in waiting:
                part, here = _part_of(plan, piece), columns_of(inputs, piece)
                stack = Stack(results.piece(piece), len(part.steps), self.program.training)
                stack.reset(self.program.moving, here.starts)
                for _ in Group(self.program, stack, stacked=True).run(part, here):
                    pass
                results.loss[piece] = stack.loss.to(results.loss.dtype)

        self.workers.do(pieces, work)
        return results.ordered(order)

    def _replay(self, plan: Plan, inputs: Inputs, piece: slice, results: Results) -> None:
        width = len(plan.steps)
        if self.captured is None or self.captured.stack.width < width:
            storage = allocate_weights(self.program.moving, width, self.program.layout)
            self.captured = CapturedGroup(self.program, Stack(storage, width, self.program.training), stacked=True)
        self.captured.stack.reset(self.program.moving, columns_of(inputs, piece).starts)
        self.captured.load(inputs, piece)
        for _ in self.captured.run(plan, results, piece.start):
            pass


def _part_of(plan: Plan, piece: slice) -> Plan:
    return plan.columns(list(range(piece.start, piece.stop)))


CHANNELS_LAST = (0, 2, 3, 1)


class Looped:
    """Runs each client alone: on a CPU as many at a time as there are workers, on a GPU `lanes` on own streams.

    Each worker has a program, because a program keeps a frozen model's outputs for the rows of the present client.
    """

    def __init__(self, program: Program, workers: Workers, *, lanes: int, graphs: bool) -> None:
        self.program, self.workers, self.use_graphs = program, workers, graphs
        self.lane_count = lanes if graphs else 1
        self.lanes: list[CapturedGroup] = []
        self.others: dict[int, Program] = {}  # by worker

    def run_alone(self, plan: Plan, inputs: Inputs, watch: Watch | None, optimizer: Tree) -> Fitted:
        """Train the only column of the plan; `watch` sees the weights after every step and may end it.

        optimizer: what an earlier part of the same training left; empty: a fresh one.
        """
        results = Results(self.program.moving, 1, inputs.facts)
        results.fill(self.program.moving)
        stack, steps = self._steps_of_one(plan, inputs, results)
        stack.reset(self.program.moving)
        stack.go_on(optimizer)
        now = self.program.whole(rows(Weights(stack.params, stack.buffers), 0))  # views: every step writes into them
        done = 0
        for done, _ in enumerate(steps, 1):
            if watch is not None and watch(done, now):
                break
        if len(plan.index):
            results.take(stack, slice(0, 1), slice(0, 1))
        return Fitted(self.program.whole(rows(results.stacked, 0)), stack.optimizer(), results.loss[0] / max(done, 1))

    def _steps_of_one(self, plan: Plan, inputs: Inputs, results: Results) -> tuple[Stack, Iterator[None]]:
        if not self.use_graphs:
            stack = self._new_stack()
            return stack, Group(self.program, stack, stacked=False).run(plan, inputs)
        if not self.lanes:
            self.lanes.append(CapturedGroup(self.program, self._new_stack(), stacked=False))
        self.lanes[0].load(inputs, slice(0, 1))
        return self.lanes[0].stack, self.lanes[0].run(plan, results, 0)

    def run(self, plan: Plan, inputs: Inputs, order: list[int], before: Callable[[Program, int], None]) -> Finished:
        """Train every column of the plan (longest first); row order[i] of the result is column i.

        before: called with a program and the column that it trains next, to keep what the steps have in common.
        """
        results = Results(self.program.moving, len(order), inputs.facts, optimizer=inputs.optimizer)
        if self.use_graphs:
            for column in range(len(order)):
                before(self.program, column)
            results.fill(self.program.moving)
            self._run_lanes(plan, inputs, results)
            return results.ordered(order)

        def work(number: int, waiting: Iterator[int]) -> None:
            program = self._program_of(number)
            stack = self._new_stack()
            group = Group(program, stack, stacked=False)
            for column in waiting:
                here = slice(column, column + 1)
                alone = columns_of(inputs, here)
                before(program, column)
                stack.reset(program.moving, alone.starts)
                stack.go_on(rows(inputs.optimizer, column))
                for _ in group.run(plan.columns([column]), alone):
                    pass
                results.take(stack, slice(0, 1), here)

        self.workers.do(list(range(len(order))), work)
        return results.ordered(order)

    def _program_of(self, worker: int) -> Program:
        """Return the worker's program, with this round's model."""
        if not worker:
            return self.program
        if worker not in self.others:
            self.others[worker] = self.program.twin()
        self.others[worker].load(self.program.start, self.program.received)
        return self.others[worker]

    def _new_stack(self) -> Stack:
        convolutional = self.program.model.traits.convolutional
        layout = layout_alone(self.program.start.params, self.use_graphs) if convolutional else {}
        return Stack(allocate_weights(self.program.moving, 1, layout), 1, self.program.training)

    def _run_lanes(self, plan: Plan, inputs: Inputs, results: Results) -> None:
        """Every lane works through its own queue; the host only replays, round-robin."""
        while len(self.lanes) < min(self.lane_count, len(plan.steps)):
            self.lanes.append(CapturedGroup(self.program, self._new_stack(), stacked=False))
        queues = _balance(plan, len(self.lanes))
        main = torch.cuda.current_stream()
        workers = []
        for lane, queue in zip(self.lanes, queues, strict=True):
            lane.stream.wait_stream(main)
            workers.append((lane, self._work(lane, queue, plan, inputs, results)))
        while workers:
            running = []
            for lane, worker in workers:
                with torch.cuda.stream(lane.stream):
                    if next(worker, "done") is None:
                        running.append((lane, worker))
            workers = running
        for lane in self.lanes:
            main.wait_stream(lane.stream)

    def _work(
        self, lane: CapturedGroup, queue: list[int], plan: Plan, inputs: Inputs, results: Results
    ) -> Iterator[None]:
        for column in queue:
            here = slice(column, column + 1)
            lane.stack.reset(self.program.moving, columns_of(inputs, here).starts)
            lane.stack.go_on(rows(inputs.optimizer, column))
            lane.load(inputs, here)
            yield from lane.run(plan.columns([column]), results, column)


def layout_alone(params: Params, graphs: bool) -> Layout:
    """Channels last for a convolutional net that runs alone, where that is faster.

    On a CPU always (1.4x on `cnn`); on a GPU for wide nets (VGG8, ResNet-18 1.3x; ResNet-8 loses 1.2x).
    """
    filters = {name: len(p) for name, p in params.items() if p.ndim == 4}
    return dict.fromkeys(filters, CHANNELS_LAST) if not graphs or min(filters.values(), default=0) >= 64 else {}


def _balance(plan: Plan, lanes: int) -> list[list[int]]:
    """Longest first to the lane with the least work."""
    queues: list[list[int]] = [[] for _ in range(lanes)]
    load = [0] * lanes
    for column, steps in enumerate(plan.steps):
        lane = load.index(min(load))
        queues[lane].append(column)
        load[lane] += int(steps)
    return queues
