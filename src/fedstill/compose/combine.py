"""`combine` sums local terms; `run_steps` and its like run the server steps of a method in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import Tensor

from fedstill.compose.sealed import OfSums
from fedstill.core.author_mistakes import model_and_state, one_number
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.setup import Preparation
from fedstill.core.types import (
    Aggregate,
    Batch,
    Local,
    Method,
    Model,
    Objective,
    Output,
    Round,
    Samples,
    SealedRound,
    Seed,
    ServerStep,
    Targets,
    Tree,
    Uploads,
    Weights,
    no_change,
    no_finish,
)

AnyRound = TypeVar("AnyRound", bound=Round | SealedRound)


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

    def implied(uploads: Uploads, start: Weights, received: Tree) -> Tree:
        return _merge("upload", [term.implied(uploads, start, received) for term in terms if term.implied is not None])

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
        implied=implied if any(term.implied is not None for term in terms) else None,
    )


def bound(objective: Objective, model: Model) -> Objective:
    """The objective for this model; itself where no term of it calls the model's head."""
    return objective if objective.bind is None else objective.bind(model)


def bound_to(method: Method, model: Model) -> Method:
    """The method for this model: see `bound`."""
    objective = bound(method.objective, model)
    return method if objective is method.objective else replace(method, objective=objective)


def run_step(step: ServerStep, candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
    """Return the candidate and the state that a server step makes; a step that returns anything else is named.

    In a sealed round only steps run that read sums; others are refused before the first round.
    """
    if isinstance(step.apply, OfSums):
        made = step.apply.function(candidate, state, round)
    elif isinstance(round, Round):
        made = step.apply(candidate, state, round)
    elif step.apply is no_change:
        made = candidate, state
    else:
        raise FedstillError(f"the server step '{step.name}' may read the uploads one by one, and this round is sealed")
    return model_and_state(step, candidate, made)


def first_state(method: Method, weights: Weights) -> Tree:
    """The server's state before round 1: {name of a step: its slots}."""
    return {step.name: step.init(weights) for step in method.steps}


def run_steps(method: Method, candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
    """Run the method's server steps in order; states of steps that the method does not have stay as they are."""
    after, round = dict(state), replace(round, weighting=weighting_of(method))
    for step in method.steps:
        candidate, after[step.name] = run_step(step, candidate, state.get(step.name, {}), round)
        round = handed_on(step, round)
    return candidate, after


def handed_on(step: ServerStep, round: AnyRound) -> AnyRound:
    """Return the round as the steps after `step` see it: an aggregate may leave uploads out, or shorten them."""
    if isinstance(step, Aggregate) and step.hands_on is not None and isinstance(round, Round):
        return replace(round, uploads=step.hands_on(round))
    return round


def weighting_of(method: Method) -> Literal["size", "uniform"]:
    """How much an upload counts for the method's server steps: as in its aggregate, else uniformly."""
    return method.aggregate.weighting if isinstance(method.aggregate, Aggregate) else "uniform"


def prepare_steps(method: Method, candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
    """Let every server step prepare, in order, before the method's first round."""
    after = dict(state)
    for step in method.steps:
        candidate, after[step.name] = step.prepare(candidate, state.get(step.name, {}), preparation)
    return candidate, after


def broadcast_of(method: Method, state: Tree) -> Tree:
    """The slots that all server steps send to the clients together."""
    return _merge("broadcast", [step.broadcast(state.get(step.name, {})) for step in method.steps])


def reported(method: Method, state: Tree) -> Weights | None:
    """The model that is looked at, where it is not the one sent."""
    kept: Weights | None = _newest(method, state, "reported")
    return kept


def targets(method: Method, state: Tree) -> Targets | None:
    """Return the targets that the server believes about its unlabeled data."""
    kept = _newest(method, state, "targets")
    return None if kept is None else Targets(kept["probabilities"], kept["kept"])


def samples(method: Method, state: Tree) -> Samples | None:
    """Return the samples that the server's generator invents now."""
    kept = _newest(method, state, "samples")
    return None if kept is None else Samples(kept["x"], kept["y"])


def _newest(method: Method, state: Tree, slot: str) -> Any:
    """The slot of the last step that has filled it."""
    slots = (state.get(step.name, {}).get(slot) for step in reversed(method.steps))
    return next((filled for filled in slots if filled), None)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Mean over the batch that padding provably cannot change: sum(w v) / max(sum w, 1)."""
    return (values * weight).sum() / weight.sum().clamp_min(1.0)


def on_the_way(method: Method, uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
    """The uploads as they reach the server, after every change that the method's clients make."""
    changes = method.per_client
    for number, change in enumerate(changes):
        uploads = change(uploads, start, seed if len(changes) == 1 else seed_for(seed, "in turn", number))
    return uploads
