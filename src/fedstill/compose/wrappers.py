"""Control flow around a server step: a period, a warm-up, a roll-back, a report, a memory of past models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedstill.compose.combine import _merge, run_step
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.tree import interpolate
from fedstill.core.types import (
    Round,
    ServerStep,
    Stage,
    Tree,
    Weights,
)

REPORTED = "reported"  # slot of the model that is looked at, where it is not the one sent


def _when(step: ServerStep, active: Callable[[int], bool]) -> ServerStep:
    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        return run_step(step, candidate, state, round) if active(round.number) else (candidate, state)

    return replace(step, apply=apply, name="", instead_of="", steps=())


def every(period: int, step: ServerStep) -> ServerStep:
    """Run `step` in rounds period, 2 period, ...; pass the candidate through in the others."""
    return _when(step, lambda number: number % period == 0)


def after(rounds: int, step: ServerStep) -> ServerStep:
    """Run `step` only from round `rounds` + 1 on (a warm-up of `rounds` rounds)."""
    return _when(step, lambda number: number > rounds)


def rollback(step: ServerStep, share: float) -> ServerStep:
    """share * (candidate before the step) + (1 - share) * (candidate after it); share 1 switches the step off."""

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        moved, state = run_step(step, candidate, state, round)
        return interpolate(candidate, moved, share), state

    return replace(step, apply=apply, name="", instead_of="", steps=())


def report_only(step: ServerStep) -> ServerStep:
    """Run `step` for the sake of its model: that one is looked at and reported, and not sent to the clients."""

    def apart(candidate: Weights, moved: Weights, _: Round) -> tuple[Weights, Weights]:
        return candidate, moved

    return replace(_with_two_models(step, apart), stage=Stage.REPORT)


def send_only(step: ServerStep) -> ServerStep:
    """Run `step` for the sake of the clients: they get its model, and the one that it began with is reported.

    The accuracy of the model that is sent is logged beside, as `accuracy_sent`.
    """

    def apart(candidate: Weights, moved: Weights, round: Round) -> tuple[Weights, Weights]:
        round.models["sent"] = moved
        return moved, candidate

    return _with_two_models(step, apart)


def _with_two_models(
    step: ServerStep, apart: Callable[[Weights, Weights, Round], tuple[Weights, Weights]]
) -> ServerStep:
    """apart: (the model before the step, after it, round) -> (the one that is sent, the one that is reported).

    State: REPORTED beside the step's own slots, so that each of them is found again when methods follow each other;
    before the first round there is none.
    """

    def own(state: Tree) -> Tree:
        return {name: value for name, value in state.items() if name != REPORTED}

    def init(weights: Weights) -> Tree:
        return _merge("server state", [step.init(weights), {REPORTED: {}}])

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        moved, after = run_step(step, candidate, own(state), round)
        sent, reported = apart(candidate, moved, round)
        return sent, {**after, REPORTED: reported}

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        candidate, after = step.prepare(candidate, own(state), preparation)
        return candidate, {**state, **after}

    def report(state: Tree) -> Weights | None:
        return state.get(REPORTED) or None

    return replace(
        step,
        apply=apply,
        prepare=prepare if step.prepare is not no_preparation else no_preparation,
        init=init,
        broadcast=lambda state: step.broadcast(own(state)),
        report=report,
        targets=lambda state: step.targets(own(state)),
        samples=lambda state, model: step.samples(own(state), model),
        name="",
        instead_of="",
        steps=(),
    )


def remember(step: Callable[[list[Weights]], ServerStep], size: int) -> ServerStep:
    """Build `step` anew each round from the last `size` global models, newest last (FIFO).

    Before `size` rounds have passed the list is shorter. The state of the built step is kept under "inner". Objectives
    and learners are to be made outside of `step`: the engine keeps a program for each objective it has seen.
    """

    def as_tree(weights: Weights) -> Tree:
        return {"params": weights.params, "buffers": weights.buffers}

    def past(state: Tree) -> list[Weights]:
        models = state.get("past", {})
        return [Weights(models[key]["params"], models[key].get("buffers", {})) for key in sorted(models, key=int)]

    def init(weights: Weights) -> Tree:
        return {"past": {}, "inner": step([]).init(weights)}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        models = past(state)
        candidate, inner = run_step(step(models), candidate, state.get("inner", {}), round)
        kept = [*models, candidate][-size:] if size else []
        return candidate, {"past": {str(i): as_tree(m) for i, m in enumerate(kept)}, "inner": inner}

    def broadcast(state: Tree) -> Tree:
        return step([]).broadcast(state.get("inner", {}))

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        candidate, inner = empty.prepare(candidate, state.get("inner", {}), preparation)
        return candidate, {**state, "inner": inner}

    empty = step([])
    return ServerStep(
        apply,
        init,
        broadcast,
        empty.needs,
        report=lambda state: empty.report(state.get("inner", {})),
        targets=lambda state: empty.targets(state.get("inner", {})),
        samples=lambda state, model: empty.samples(state.get("inner", {}), model),
        prepare=prepare if empty.prepare is not no_preparation else no_preparation,
        check=empty.check,
    )
