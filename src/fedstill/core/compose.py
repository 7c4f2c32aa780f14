"""How parts become methods: `combine` sums local terms, `chain` runs server steps, wrappers add control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.mistakes import model_and_state, one_number
from fedstill.core.tree import interpolate
from fedstill.core.types import (
    Algorithm,
    Batch,
    Local,
    Model,
    Objective,
    Outlook,
    Output,
    Preparation,
    Round,
    ServerStep,
    Stage,
    Tree,
    Weights,
    no_finish,
    no_preparation,
)

T = TypeVar("T")
REPORTED = "reported"  # slot of the model that is looked at, where it is not the one sent


def _merge(kind: str, parts: list[Tree]) -> Tree:
    """Union of slots; two parts that claim one slot are a mistake, never a silent overwrite."""
    merged: Tree = {}
    for part in parts:
        for slot, value in part.items():
            if slot in merged:
                raise FedstillError(f"two parts of this method both write the {kind} slot '{slot}': use one of them")
            merged[slot] = value
    return merged


def combine(*terms: Objective) -> Objective:
    """The sum of local terms. A frozen model named by several terms runs once."""
    measures = [term.measure for term in terms if term.measure is not None]
    frozen: dict[str, Callable[[Local], Weights]] = {}
    for term in terms:
        for name, teacher in term.frozen.items():
            if frozen.setdefault(name, teacher) is not teacher:
                raise FedstillError(f"two terms name a frozen model '{name}' but mean different weights")

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        total = one_number(terms[0], terms[0].loss(output, batch, local))
        for term in terms[1:]:
            total = total + one_number(term, term.loss(output, batch, local))
        return total

    def init(weights: Weights) -> Tree:
        return _merge("client state", [term.init(weights) for term in terms])

    def measure(model: Model, batch: Batch, local: Local) -> Tree:
        return _merge("measure", [look(model, batch, local) for look in measures])

    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        pairs = [term.finish(local, measured) for term in terms]
        return _merge("client state", [state for state, _ in pairs]), _merge("upload", [extra for _, extra in pairs])

    needs = frozenset().union(*(term.needs for term in terms))
    parts = tuple(part for term in terms for part in term.terms or (term,))
    finishes = any(term.finish is not no_finish for term in terms)
    binds = any(term.bind is not None for term in terms)
    return Objective(
        loss,
        frozen,
        init,
        measure if measures else None,
        finish if finishes else no_finish,
        needs,
        terms=parts,
        bind=(lambda model: combine(*(bound(term, model) for term in terms))) if binds else None,
    )


def bound(objective: Objective, model: Model) -> Objective:
    """The objective for this model; itself where no term of it calls the model's head."""
    return objective if objective.bind is None else objective.bind(model)


def bound_to(algorithm: Algorithm, model: Model) -> Algorithm:
    """The method for this model: see `bound`."""
    objective = bound(algorithm.objective, model)
    return algorithm if objective is algorithm.objective else replace(algorithm, objective=objective)


def run_step(step: ServerStep, candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
    """What a server step makes of a candidate; one that returns something else is named."""
    return model_and_state(step, step.apply(candidate, state, round))


def chain(*steps: ServerStep) -> ServerStep:
    """Run server steps in order; the state is the states of the steps, by position."""

    def init(weights: Weights) -> Tree:
        return {str(i): step.init(weights) for i, step in enumerate(steps)}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        after: Tree = {}
        for i, step in enumerate(steps):
            candidate, after[str(i)] = run_step(step, candidate, state.get(str(i), {}), round)
        return candidate, after

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        after: Tree = {}
        for i, step in enumerate(steps):
            candidate, after[str(i)] = step.prepare(candidate, state.get(str(i), {}), preparation)
        return candidate, {**state, **after}

    def broadcast(state: Tree) -> Tree:
        return _merge("broadcast", [step.broadcast(state.get(str(i), {})) for i, step in enumerate(steps)])

    def newest(ask: Callable[[ServerStep, Tree], T | None]) -> Callable[[Tree], T | None]:
        return lambda state: _last_of(ask(step, state.get(str(i), {})) for i, step in enumerate(steps))

    return ServerStep(
        apply,
        init,
        broadcast,
        frozenset().union(*(step.needs for step in steps)),
        steps=tuple(part for step in steps for part in step.steps or (step,)),
        report=newest(lambda step, own: step.report(own)),
        targets=newest(lambda step, own: step.targets(own)),
        samples=lambda state, model: newest(lambda step, own: step.samples(own, model))(state),
        prepare=prepare if any(step.prepare is not no_preparation for step in steps) else no_preparation,
        check=_checks(steps),
    )


def _last_of(answers: Iterable[T | None]) -> T | None:
    return next((answer for answer in reversed(list(answers)) if answer is not None), None)


def _checks(steps: Sequence[ServerStep]) -> Callable[[Outlook], None]:
    def check(outlook: Outlook) -> None:
        for step in steps:
            step.check(outlook)

    return check


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


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Mean over the batch that padding provably cannot change: sum(w v) / max(sum w, 1)."""
    return (values * weight).sum() / weight.sum().clamp_min(1.0)
