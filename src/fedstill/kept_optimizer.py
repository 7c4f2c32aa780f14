"""Optimisers that go on from round to round: what a client's remembers is one more slot of its state."""

from __future__ import annotations

from dataclasses import replace

from fedstill.core.types import Objective, Phase, Training, Tree, Weights
from fedstill.engine.engine import OPTIMIZER
from fedstill.engine.optim import first_memory


def keep_optimizers(phases: tuple[Phase, ...], training: Training) -> tuple[Phase, ...]:
    """The same methods, whose clients keep their optimiser's moments and step count; through every phase, too."""

    def kept(objective: Objective) -> Objective:
        def init(weights: Weights) -> Tree:
            memory = first_memory(training, weights.params)
            return {**objective.init(weights), **({OPTIMIZER: memory} if memory else {})}

        return replace(objective, init=init)

    return tuple(
        phase._replace(algorithm=replace(phase.algorithm, objective=kept(phase.algorithm.objective)))
        for phase in phases
    )
