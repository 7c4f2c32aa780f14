"""Client batch: a whole chunk of the cohort is one stack under vmap."""

from __future__ import annotations

from fedstill.engine.graph import CapturedGroup
from fedstill.engine.group import Group, Inputs, columns_of
from fedstill.engine.plan import Plan
from fedstill.engine.program import Program
from fedstill.engine.results import Finished, Results
from fedstill.engine.stack import Stack, allocate_weights


class Batched:
    """Runs a cohort in chunks; on CUDA the steps are captured once and replayed."""

    def __init__(self, program: Program, *, chunk: int, graphs: bool) -> None:
        self.program, self.chunk, self.use_graphs = program, chunk, graphs
        self.captured: CapturedGroup | None = None

    def run(self, plan: Plan, inputs: Inputs, order: list[int]) -> Finished:
        """Train every column of the plan (longest first); row order[i] of the result is column i."""
        results = Results(self.program.moving, len(order), inputs.facts, self.program.layout)
        if self.use_graphs:
            results.fill(self.program.moving)
        for at in range(0, len(order), self.chunk):
            piece = slice(at, min(at + self.chunk, len(order)))
            part = plan.columns(list(range(piece.start, piece.stop)))
            if self.use_graphs:
                self._replay(part, inputs, piece, results)
            else:
                self._eager(part, columns_of(inputs, piece), piece, results)
        return results.ordered(order)

    def _eager(self, plan: Plan, inputs: Inputs, piece: slice, results: Results) -> None:
        stack = Stack(results.piece(piece), len(plan.steps), self.program.training)
        stack.reset(self.program.moving)
        for _ in Group(self.program, stack, stacked=True).run(plan, inputs):
            pass
        results.loss[piece] = stack.loss.to(results.loss.dtype)

    def _replay(self, plan: Plan, inputs: Inputs, piece: slice, results: Results) -> None:
        width = len(plan.steps)
        if self.captured is None or self.captured.stack.width < width:
            storage = allocate_weights(self.program.moving, width, self.program.layout)
            self.captured = CapturedGroup(self.program, Stack(storage, width, self.program.training), stacked=True)
        self.captured.stack.reset(self.program.moving)
        self.captured.load(inputs, piece)
        for _ in self.captured.run(plan, results, piece.start):
            pass
