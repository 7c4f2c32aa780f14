"""Control flow around a server step: a period, a warm-up, a roll-back, a report, a memory of past models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedstill.compose.combine import run_step
from fedstill.compose.sealed import as_before
from fedstill.core.tree import interpolate
from fedstill.core.types import Round, ServerStep, Stage, Tree, Weights


def every(period: int, step: ServerStep) -> ServerStep:
    """Run `step` in rounds period, 2 period, ...; pass the candidate through in the others."""
    return _when(step, lambda number: number % period == 0)


def after(rounds: int, step: ServerStep) -> ServerStep:
    """Run `step` only from round `rounds` + 1 on (a warm-up of `rounds` rounds)."""
    return _when(step, lambda number: number > rounds)


def _when(step: ServerStep, active: Callable[[int], bool]) -> ServerStep:
    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        return run_step(step, candidate, state, round) if active(round.number) else (candidate, state)

    return replace(step, apply=as_before(step, apply))


def rollback(step: ServerStep, share: float) -> ServerStep:
    """share * (candidate before the step) + (1 - share) * (candidate after it); share 1 switches the step off."""

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        moved, state = run_step(step, candidate, state, round)
        return interpolate(candidate, moved, share), state

    return replace(step, apply=as_before(step, apply))


def report_only(step: ServerStep) -> ServerStep:
    """Run `step` for the sake of its model: that one is looked at and reported, and not sent to the clients."""

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        moved, slots = run_step(step, candidate, state, round)
        return candidate, {**slots, "reported": moved}

    return replace(step, apply=as_before(step, apply), stage=Stage.REPORT)


def send_only(step: ServerStep) -> ServerStep:
    """Run `step` for the sake of the clients: they get its model, and the one that it began with is reported.

    The accuracy of the model that is sent is logged beside, as `accuracy_sent`.
    """

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        moved, slots = run_step(step, candidate, state, round)
        round.models["sent"] = moved
        return moved, {**slots, "reported": candidate}

    return replace(step, apply=as_before(step, apply), stage=Stage.REPORT)


def remember(step: Callable[[list[Weights]], ServerStep], size: int) -> ServerStep:
    """Build `step` anew each round from the last `size` global models, newest last (FIFO).

    Before `size` rounds have passed the list is shorter. The models are kept in the slot "past", beside the slots of
    the built step. Objectives and learners are to be made outside of `step`: the engine keeps a program for each
    objective it has seen.
    """

    def init(weights: Weights) -> Tree:
        return {**empty.init(weights), "past": {}}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        kept = state.get("past", {})
        past = [Weights(kept[key]["params"], kept[key].get("buffers", {})) for key in sorted(kept, key=int)]
        candidate, slots = run_step(step(past), candidate, state, round)
        newest = [*past, candidate][-size:] if size else []
        return candidate, {**slots, "past": {str(i): model._asdict() for i, model in enumerate(newest)}}

    empty = step([])
    return replace(empty, apply=as_before(empty, apply), init=init)
