"""`combine` sums local terms, `chain` runs server steps in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from fedstill.core.author_mistakes import model_and_state, one_number
from fedstill.core.errors import FedstillError
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.types import (
    Batch,
    Local,
    Method,
    Model,
    Objective,
    Outlook,
    Output,
    Round,
    ServerStep,
    Tree,
    Weights,
    no_finish,
)

T = TypeVar("T")


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


def bound_to(method: Method, model: Model) -> Method:
    """The method for this model: see `bound`."""
    objective = bound(method.objective, model)
    return method if objective is method.objective else replace(method, objective=objective)


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


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Mean over the batch that padding provably cannot change: sum(w v) / max(sum w, 1)."""
    return (values * weight).sum() / weight.sum().clamp_min(1.0)
