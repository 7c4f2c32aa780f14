"""Methods in turn: which one a round belongs to, and what goes over from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.core.types import Local, Method, Objective, Phase, Tree, Weights

NETWORKS = "networks"  # the step that runs the steps of several networks: its slot "each" holds their states by name


def phases_of(method: Method | Sequence[Phase]) -> tuple[Phase, ...]:
    """One method, or several in turn, as phases with at least one round each; the last one has no end."""
    if isinstance(method, Method):
        return (Phase(method),)
    phases, past = [], 0
    for number, phase in enumerate(method, 1):
        if phase.until is None and number < len(method):
            raise FedstillError(f"phase {number} has no end: say until which round, only the last phase needs none")
        if phase.until is not None and phase.until < past:
            raise FedstillError(f"phase {number} ends in round {phase.until}, before the phase ahead of it ({past})")
        if phase.until is None or phase.until > past or number == len(method):
            phases.append(phase)
        past = phase.until if phase.until is not None else past
    if not phases:
        raise FedstillError("no phase: give at least one method")
    return (*phases[:-1], phases[-1]._replace(until=None))


def method_at(phases: Sequence[Phase], round: int) -> Method:
    """The method of a round (from 1)."""
    return next(phase.method for phase in phases if phase.until is None or round <= phase.until)


def first_round(phases: Sequence[Phase], round: int) -> int:
    """The first round of the phase that a round belongs to."""
    return 1 + max((phase.until for phase in phases if phase.until is not None and phase.until < round), default=0)


def share_states(phases: Sequence[Phase], weights: Weights) -> tuple[Tree, tuple[Phase, ...]]:
    """(a client's first state, phases that keep all of it): every phase carries the slots of the others along.

    A slot that two phases know by the same name and form is one slot: SCAFFOLD's control survives a switch.
    """
    first: Tree = {}
    for phase in phases:
        for slot, value in phase.method.objective.init(weights).items():
            if slot in first and _form(first[slot]) != _form(value):
                raise FedstillError(f"two phases keep '{slot}' on a client in different forms: they cannot follow")
            first.setdefault(slot, value)
    if len(phases) == 1 or not first:
        return first, tuple(phases)
    kept = [
        phase._replace(method=replace(phase.method, objective=_keeping(phase.method.objective))) for phase in phases
    ]
    return first, tuple(kept)


def _keeping(objective: Objective) -> Objective:
    def finish(local: Local, measured: Tree) -> tuple[Tree, Tree]:
        state, extra = objective.finish(local, measured)
        return {**local.state, **state}, extra

    return replace(objective, finish=finish)


def carry_over(old: Tree, fresh: Tree) -> Tree:
    """The server's state at a switch of methods, from the state before and the new method's first state.

    A step that both methods have keeps a slot if the new slot has the same form or is empty (it is filled later).
    States of steps that the new method does not have stay for a later phase, because clients keep their slots through
    every phase: SCAFFOLD's c is the mean of all c_k, FedCurv's U the sum of all u_k. A reported model does not go over.
    """
    if NETWORKS in fresh:
        each = {name: carry_over(old[NETWORKS]["each"][name], steps) for name, steps in fresh[NETWORKS]["each"].items()}
        return {NETWORKS: {"each": each}}
    state = {name: {slot: value for slot, value in slots.items() if slot != "reported"} for name, slots in old.items()}
    for name, slots in fresh.items():
        before = state.get(name, {})
        state[name] = {
            slot: before[slot]
            if slot in before and (_is_empty(first) or _form(before[slot]) == _form(first))
            else first
            for slot, first in slots.items()
        }
    return state


def _is_empty(slot: Tree) -> bool:
    return isinstance(slot, dict) and not slot


def _form(tree: Tree) -> dict[str, object]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in flatten({"": tree}).items()}
