"""Clients with different architectures: plain parts of a method run on each prototype's part of the union.

To a plain server step a round looks as if only the clients of one prototype existed; a step that learns from all
clients finds the others in `Round.groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fedstill.core.compose import chain, run_step
from fedstill.core.groups import merge, merge_uploads, places_of, split, split_uploads, targets_together
from fedstill.core.phases import carry_over, keep_waiting, share_states
from fedstill.core.types import (
    Algorithm,
    Answers,
    Ask,
    ClientData,
    Groups,
    Model,
    Phase,
    Preparation,
    Round,
    Samples,
    Seed,
    ServerStep,
    Stage,
    Targets,
    Transmit,
    Tree,
    Uploads,
    Weights,
    no_preparation,
    unchanged,
)

Question = Callable[[ClientData], Tree]


def rounds_of(round: Round, groups: Groups) -> dict[str, Round]:
    """The round of each prototype: its part of the model, its clients' uploads, its own population and engine.

    All of them name each other in `groups` and share one `shared`. The seed is that of the whole round, so that a
    group steps as it would alone.
    """
    rounds: dict[str, Round] = {}
    starts, uploads = split(round.start, groups), split_uploads(round.uploads, groups)
    for prototype, model in groups.models.items():
        rounds[prototype] = replace(
            round, start=starts[prototype], uploads=uploads[prototype], model=model,
            population=groups.member.count(prototype), trainer=round.trainer.lend(model), metrics={}, models={},
            groups=rounds, shared=round.shared,
        )  # fmt: skip
    return rounds


def preparations_of(
    preparation: Preparation, groups: Groups, candidates: Mapping[str, Weights]
) -> dict[str, Preparation]:
    """The preparation of each prototype: it asks its own clients; `candidates` show what the others are by now."""
    looks: dict[str, Preparation] = {}
    for prototype, model in groups.models.items():
        members = frozenset(client for client, own in enumerate(groups.member) if own == prototype)
        looks[prototype] = replace(
            preparation, model=model, population=len(members), trainer=preparation.trainer.lend(model),
            ask=_asking(preparation.ask, members), tell=_telling(preparation, prototype), metrics={},
            groups=looks, candidates=candidates, shared=preparation.shared,
        )  # fmt: skip
    return looks


def _asking(ask: Ask, members: frozenset[int]) -> Ask:
    def among_members(question: Question, /, among: Collection[int] | None = None, **how: Any) -> Answers:
        return ask(question, among=members if among is None else members & set(among), **how)

    return among_members


def _telling(preparation: Preparation, prototype: str) -> Callable[[str, float], None]:
    return lambda what, share: preparation.tell(f"{prototype}: {what}", share)


def per_group(step: ServerStep | Mapping[str, ServerStep], groups: Groups) -> ServerStep:
    """A plain step on each prototype's part; of a chain each step on all prototypes before the next one.

    step: the same for all, or one for each prototype.

    A prototype without an upload this round stays as it was sent; refinements (distillation) still reach it.
    State and broadcast: those of the step, under each prototype's name. Metrics are named "<prototype>/<metric>".
    The model is reported once every prototype has one to report; targets are those of the reported prototype or of all
    together (`targets_together`), samples those of the first that has some.
    """
    one_each = {name: step if isinstance(step, ServerStep) else step[name] for name in groups.models}
    chains = {name: chain(*(one.steps or (one,))) for name, one in one_each.items()}

    def init(weights: Weights) -> Tree:
        return {name: chains[name].init(part) for name, part in split(weights, groups).items()}

    def broadcast(state: Tree) -> Tree:
        return {name: chains[name].broadcast(own) for name, own in state.items()}

    def report(state: Tree) -> Weights | None:
        found = {name: chains[name].report(own) for name, own in state.items()}
        told = {name: weights for name, weights in found.items() if weights is not None}
        return merge(told) if len(told) == len(groups.models) else None

    def targets(state: Tree) -> Targets | None:
        found = {name: chains[name].targets(own) for name, own in state.items()}
        return targets_together({name: own for name, own in found.items() if own is not None}, groups.report)

    def samples(state: Tree, _: Model) -> Samples | None:
        each = (chains[name].samples(own, groups.models[name]) for name, own in state.items())
        return next((found for found in each if found is not None), None)

    idle = all(one.prepare is no_preparation for one in chains.values())
    return ServerStep(
        _apply(chains, groups),
        init,
        broadcast,
        frozenset().union(*(one.needs for one in chains.values())),
        report=report,
        targets=targets,
        samples=samples,
        prepare=no_preparation if idle else _prepare(chains, groups),
    )


def _in_step(chains: Mapping[str, ServerStep]) -> Iterator[tuple[str, str, ServerStep]]:
    """(place in the chain, prototype, step): the first step of every prototype, then the second one, ..."""
    for place, same in enumerate(zip(*(one.steps for one in chains.values()), strict=True)):
        for prototype, step in zip(chains, same, strict=True):
            yield str(place), prototype, step


def _apply(chains: Mapping[str, ServerStep], groups: Groups) -> Callable[[Weights, Tree, Round], tuple[Weights, Tree]]:
    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        parts, rounds = split(candidate, groups), rounds_of(round, groups)
        after = {prototype: dict(own) for prototype, own in state.items()}
        for place, prototype, step in _in_step(chains):
            look = rounds[prototype]
            if len(look.uploads.ids) or step.stage in (Stage.REFINE, Stage.REPORT):
                moved = run_step(step, parts[prototype], after[prototype].get(place, {}), look)
                parts[prototype], after[prototype][place] = moved
        _hand_up(round, rounds)
        return merge(parts), after

    return apply


def _prepare(
    chains: Mapping[str, ServerStep], groups: Groups
) -> Callable[[Weights, Tree, Preparation], tuple[Weights, Tree]]:
    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        parts = split(candidate, groups)
        looks = preparations_of(preparation, groups, parts)
        after = {prototype: dict(own) for prototype, own in state.items()}
        for place, prototype, step in _in_step(chains):
            made = step.prepare(parts[prototype], after[prototype].get(place, {}), looks[prototype])
            parts[prototype], after[prototype][place] = made
        for prototype, look in looks.items():
            preparation.metrics.update({f"{prototype}/{name}": value for name, value in look.metrics.items()})
        return merge(parts), after

    return prepare


def _hand_up(round: Round, rounds: Mapping[str, Round]) -> None:
    """What the steps of single prototypes noted and left to be looked at, in the round of all."""
    left: dict[str, dict[str, Weights]] = {}
    for prototype, look in rounds.items():
        round.metrics.update({f"{prototype}/{name}": value for name, value in look.metrics.items()})
        for name, weights in look.models.items():
            left.setdefault(name, {})[prototype] = weights
    round.models.update({name: merge(parts) for name, parts in left.items()})


def _transmit(transmit: Mapping[str, Transmit], groups: Groups) -> Transmit:
    """Each client's own part on its way; the rest of its row stays what it was sent."""
    if all(one is unchanged for one in transmit.values()):
        return unchanged

    def transmitted(uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
        parts, starts = split_uploads(uploads, groups), split(start, groups)
        sent = {name: transmit[name](part, starts[name], seed) for name, part in parts.items() if len(part.ids)}
        return merge_uploads(sent, start, places_of(uploads.ids.tolist(), groups))

    return transmitted


def as_it_is(algorithm: Algorithm, _: Model) -> Algorithm:
    return algorithm


def grouped(
    phases: tuple[Phase, ...], groups: Groups, suited: Callable[[Algorithm, Model], Algorithm] = as_it_is
) -> tuple[Phase, ...]:
    """The same methods for clients with different architectures, each group as a federation of its own, but for steps
    that look at the others (`Round.groups`).

    suited: what the method becomes for one prototype. Objectives stay as they are: a client trains one prototype.
    """
    made: dict[int, Algorithm] = {}
    for algorithm in (phase.algorithm for phase in phases):
        own = {name: suited(algorithm, model) for name, model in groups.models.items()}
        server = per_group({name: one.server for name, one in own.items()}, groups)
        transmit = _transmit({name: one.transmit for name, one in own.items()}, groups)
        made[id(algorithm)] = replace(algorithm, server=server, transmit=transmit)
    return tuple(phase._replace(algorithm=made[id(phase.algorithm)]) for phase in phases)


def share_states_of(
    phases: tuple[Phase, ...], weights: Weights, groups: Groups | None
) -> tuple[Tree, tuple[Phase, ...]]:
    """`share_states`, with a client's first state under each prototype's name where there are several."""
    if groups is None:
        return share_states(phases, weights)
    shared = {prototype: share_states(phases, part) for prototype, part in split(weights, groups).items()}
    kept = next(iter(shared.values()))[1]  # they differ by nothing: which slots are kept is up to the objectives
    return {prototype: first for prototype, (first, _) in shared.items()}, kept


def carry_over_of(old: Tree, fresh: Tree, groups: Groups | None) -> Tree:
    """`carry_over`, for each prototype where there are several."""
    if groups is None:
        return carry_over(old, fresh)
    return {prototype: carry_over(old[prototype], fresh[prototype]) for prototype in groups.models}


def keep_waiting_of(old: Tree, new: Tree, groups: Groups | None) -> Tree:
    """`keep_waiting`, for each prototype where there are several."""
    if groups is None:
        return keep_waiting(old, new)
    return {prototype: keep_waiting(old[prototype], new[prototype]) for prototype in groups.models}
