"""All server steps of a method as one, for tests that look at a whole round of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fedstill.compose.combine import broadcast_of, first_state, prepare_steps, run_steps
from fedstill.core.needs import needs_of
from fedstill.core.setup import no_preparation
from fedstill.core.types import Method, Round, ServerStep, Stage, Tree, Weights


def whole(method: Method) -> ServerStep:
    """One step that runs all of a method's; its state is {name of a step: its slots}."""
    prepares = any(step.prepare is not no_preparation for step in method.steps)
    return ServerStep(
        "whole",
        partial(run_steps, method),
        partial(first_state, method),
        partial(broadcast_of, method),
        needs=needs_of(method),
        stage=Stage.AGGREGATE,
        prepare=partial(prepare_steps, method) if prepares else no_preparation,
    )


def as_one(method: Method, **changes: Any) -> Method:
    """The method with its server steps as one, of which some functions are others."""
    return replace(method, aggregate=replace(whole(method), **changes), server=())


def watched(method: Method, look: Callable[[Weights, Tree, Round], None]) -> Method:
    """The method with a look at (candidate, {step: slots}, round) after the last step of every round."""
    after: Tree = {}

    def seen(step: ServerStep) -> ServerStep:
        def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
            candidate, after[step.name] = step.apply(candidate, state, round)
            if step is method.steps[-1]:
                look(candidate, dict(after), round)
            return candidate, after[step.name]

        return replace(step, apply=apply)

    return replace(method, aggregate=seen(method.aggregate), server=tuple(map(seen, method.server)))
