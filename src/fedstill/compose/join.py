"""Joining methods: their local terms add up, their server steps line up by stage, and an error names a clash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from fedstill.compose.combine import combine
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.types import Aggregate, Method, Need, Objective, ServerStep, Stage, Weights

Named = Mapping[str, Method]
PLAIN_RISK = "cross_entropy"


def join(methods: Named, aggregate: ServerStep | None = None) -> Method:
    """One method from several, by the names that mistakes should mention.

    aggregate: the one that a run names; without it the method decides whose aggregate is not FedAvg's average by size.

        client:  one risk (cross-entropy, unless one method replaces it) + the terms of all
        server:  one aggregate -> at most one move -> whatever is kept -> refinements, in the order given -> one whose
                 model is only reported

    Two methods that replace the cross-entropy, aggregate differently, both decide the server's step, report two models
    or write one slot clash: that is an error. A single method comes back as it is.
    """
    if not methods:
        raise FedstillError("no method is named: give at least one")
    if len(methods) == 1:
        (only,) = methods.values()
        return only if aggregate is None else replace(only, aggregate=aggregate)
    _check_slots(methods)
    risk = _risk(methods)
    terms = [term for method in methods.values() for term in _terms(method.objective) if not term.risk]
    objective = combine(risk, *(term.with_risk(risk) if term.with_risk else term for term in terms))
    kept = [step for stage in (Stage.KEEP, Stage.REFINE, Stage.REPORT) for step in _steps_at(stage, methods)]
    _check_reports(kept, methods)
    server = (*_move(methods), *kept)
    trusted = [name for name, method in methods.items() if method.trusted is not None]
    if len(trusted) > 1:
        raise FedstillError(f"{' and '.join(trusted)} both stand between clients and server: use one of them")
    _check_names(server, methods)
    way = tuple(mechanism for method in methods.values() for mechanism in method.way)
    return Method(objective, aggregate or _aggregate(methods), server, way, _without_counts(methods))


def _terms(objective: Objective) -> tuple[Objective, ...]:
    return objective.terms or (objective,)


def _steps_at(stage: Stage, methods: Named) -> Iterable[ServerStep]:
    return (step for method in methods.values() for step in method.server if step.stage is stage)


def _check_reports(steps: Sequence[ServerStep], methods: Named) -> None:
    """A model that is reported must be that of the last step: what a later one makes of it, nobody would see."""
    for step, later in pairwise(steps):
        if step.stage is not Stage.REPORT:
            continue
        name, other = (_owner(each, methods) for each in (step, later))
        raise FedstillError(
            f"{name} reports a model before {other} works on it, and a run reports one: leave the report to {other} "
            f"({name} with feedback = true, or report = 'tuned' where it has that), or take one of them"
        )


def _owner(step: ServerStep, methods: Named) -> str:
    return next(name for name, method in methods.items() if any(step is each for each in method.server))


def _risk(methods: Named) -> Objective:
    risks = {name: [term for term in _terms(method.objective) if term.risk] for name, method in methods.items()}
    special = {name: term for name, terms in risks.items() for term in terms if term.risk != PLAIN_RISK}
    if len(special) > 1:
        replacing = " and ".join(f"{name} (by {term.risk})" for name, term in special.items())
        raise FedstillError(f"{replacing} both replace the cross-entropy: use one of them")
    plain = [term for terms in risks.values() for term in terms]
    if not plain:
        raise FedstillError(f"none of {', '.join(methods)} fits the labels: add a method that does, e.g. fedavg")
    return next(iter(special.values()), plain[0])


def _aggregate(methods: Named) -> ServerStep:
    """The aggregate of the mixture: another than FedAvg's average by size where a method has one."""
    owners: dict[ServerStep, str] = {}
    for name, method in methods.items():
        owners.setdefault(method.aggregate, name)
    chosen = {step: name for step, name in owners.items() if _in_words(step) != "average, size"} or owners
    if len(chosen) > 1:
        clash = " and ".join(f"{name} ({_in_words(step)})" for step, name in chosen.items())
        raise FedstillError(
            f"{clash} aggregate differently: choose one, e.g. {'+'.join(methods)}+average(weighting='uniform'), "
            "or for the whole run [server] aggregate = 'median'"
        )
    return next(iter(chosen))


def _in_words(step: ServerStep) -> str:
    return f"{step.name}, {step.weighting}" if isinstance(step, Aggregate) else step.name


def _check_names(steps: Sequence[ServerStep], methods: Named) -> None:
    """Two steps of one name would share their state."""
    owner: dict[str, str] = {}
    for step in steps:
        method = _owner(step, methods)
        if other := owner.get(step.name):
            raise FedstillError(f"{other} and {method} both run the server step '{step.name}': use one of them")
        owner[step.name] = method


def _move(methods: Named) -> list[ServerStep]:
    movers = {name: [step for step in method.server if step.stage is Stage.MOVE] for name, method in methods.items()}
    movers = {name: steps for name, steps in movers.items() if steps}
    if len(movers) > 1:
        raise FedstillError(f"{' and '.join(movers)} both decide the server's step: use one of them")
    return [step for steps in movers.values() for step in steps]


def _without_counts(methods: Named) -> str:
    """How to write all of them that need uploaded label counts so that none does; empty where one has no such form."""
    forms = [method.without_counts for method in methods.values() if Need.LABEL_COUNTS_UPLOADED in needs_of(method)]
    return " and ".join(forms) if all(forms) else ""


def _check_slots(methods: Named) -> None:
    """Two methods that keep a client state under one name would overwrite each other."""
    probe = Weights({"probe": torch.zeros(1)}, {})
    owner: dict[str, str] = {}
    for name, method in methods.items():
        for slot in method.objective.init(probe):
            if slot in owner:
                raise FedstillError(f"{owner[slot]} and {name} both keep '{slot}' on a client: use one of them")
            owner[slot] = name
