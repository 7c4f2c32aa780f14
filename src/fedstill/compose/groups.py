"""Clients with different architectures: one union of prototypes, taken apart and put together again.

The union is one set of weights that holds every prototype, its tensors named "<prototype>/<name>". So a run has one
model to keep, check, save and send, while a client trains and sends its own part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedstill.compose.combine import (
    broadcast_of,
    first_state,
    handed_on,
    reported,
    run_step,
    samples,
    targets,
    weighting_of,
)
from fedstill.compose.phases import NETWORKS
from fedstill.core.errors import FedstillError
from fedstill.core.setup import AnyQuestion, Preparation, no_preparation
from fedstill.core.tree import byte_size, select, tree_map
from fedstill.core.types import (
    Answers,
    Ask,
    Groups,
    Method,
    Model,
    Output,
    Params,
    PerClient,
    Phase,
    Round,
    Seed,
    ServerStep,
    Stage,
    Targets,
    Tree,
    Uploads,
    Weights,
)


def in_union(prototype: str, name: str = "") -> str:
    """The name in the union of a prototype's tensor; a prototype without a name is alone, and its names stay."""
    return f"{prototype}/{name}" if prototype else name


def only(weights: Weights, prototype: str) -> Weights:
    """One prototype of a union, under the names that it has there; nothing where it is not."""
    return Weights(*({n: leaf for n, leaf in part.items() if n.startswith(in_union(prototype))} for part in weights))


def part_of(weights: Weights, prototype: str) -> Weights:
    """One prototype of a union, under its own names."""
    places = len(in_union(prototype))
    return Weights(*({name[places:]: leaf for name, leaf in part.items()} for part in only(weights, prototype)))


def slots_of(tree: Tree, prototype: str) -> Tree:
    """The slots of one prototype, which stand under its name where it has one."""
    return tree.get(prototype, {}) if prototype else tree


def split(weights: Weights, networks: Collection[str]) -> dict[str, Weights]:
    """The prototypes of a union by name."""
    return {prototype: part_of(weights, prototype) for prototype in networks}


def merge(parts: Mapping[str, Weights]) -> Weights:
    """One union of some prototypes: what `split` takes apart."""

    def named(kind: int) -> Params:
        return {in_union(group, name): leaf for group, part in parts.items() for name, leaf in part[kind].items()}

    return Weights(named(0), named(1))


def together(outputs: Mapping[str, Output], report: str) -> Output:
    """Return one output of all prototypes: the reported prototype's, or else the mean of their logits.

    The features of an ensemble are its members' features, side by side.
    """
    if report in outputs or len(outputs) == 1:
        return outputs[report] if report in outputs else next(iter(outputs.values()))
    widths = {name: output.logits.shape[-1] for name, output in outputs.items()}
    if len(set(widths.values())) > 1:
        widths_by_name = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise FedstillError(f"the prototypes tell different numbers of classes apart ({widths_by_name}): give them one")
    logits = torch.stack([output.logits for output in outputs.values()]).mean(0)
    return Output(logits, torch.cat([output.features for output in outputs.values()], dim=-1))


def targets_together(beliefs: Mapping[str, Targets], report: str) -> Targets | None:
    """Return the targets of the model that is looked at, from the targets of prototypes.

    All were taught the same. A row that was not taught has an answer of each. Together (like `together`) these are
    softmax(mean of ln p), which is the softmax of the mean of their logits.
    """
    if not beliefs:
        return None
    shown = beliefs.get(report, next(iter(beliefs.values())))
    if report in beliefs or len(beliefs) == 1:
        return shown
    each = torch.stack([targets.probabilities for targets in beliefs.values()])
    apart = (each != each[0]).any(dim=0).any(dim=1) & ~shown.kept
    logs = each.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    pooled = logs.mean(dim=0).softmax(dim=1).to(each.dtype)
    return shown._replace(probabilities=torch.where(apart.unsqueeze(1), pooled, shown.probabilities))


def reported_name(groups: Groups) -> str:
    """Which model is looked at, in words."""
    return f"ensemble of {', '.join(groups.models)}" if groups.report not in groups.models else groups.report


def places_of(ids: Collection[int], groups: Groups) -> dict[str, Tensor]:
    """Where in a cohort the clients of each prototype stand, in the order of the cohort."""
    by_prototype: dict[str, list[int]] = {prototype: [] for prototype in groups.models}
    for place, client in enumerate(ids):
        by_prototype[groups.member[client]].append(place)
    return {prototype: torch.tensor(places, dtype=torch.int64) for prototype, places in by_prototype.items()}


def split_uploads(uploads: Uploads, groups: Groups) -> dict[str, Uploads]:
    """Return the uploads of each prototype's clients, as if there were no others; without clients: no rows."""
    parts: dict[str, Uploads] = {}
    for prototype, places in places_of(uploads.ids.tolist(), groups).items():
        part = uploads._replace(
            weights=part_of(uploads.weights, prototype), extra=uploads.extra.get(prototype, {}) if len(places) else {}
        )
        parts[prototype] = part if len(places) == len(uploads.ids) else select(part, places)
    return parts


def merge_uploads(parts: Mapping[str, Uploads], start: Weights, places: Mapping[str, Tensor]) -> Uploads:
    """The whole cohort's uploads from those of groups; in a client's row the other prototypes are as they were sent.

    Extra uploads stand under the prototype's name and are 0 in the rows of other groups' clients.
    """
    count, first = sum(map(len, places.values())), next(iter(parts.values()))

    def full(prototype: str, rows: Tensor, like: Tensor) -> Tensor:
        here = places[prototype].to(rows.device)
        return rows if len(here) == count else _filled(like, count).index_copy_(0, here, rows)

    def stacked(kind: int) -> Params:
        merged: Params = {}
        for prototype in places:
            for name, sent in part_of(start, prototype)[kind].items():
                rows = parts[prototype].weights[kind][name] if prototype in parts else None
                merged[f"{prototype}/{name}"] = _filled(sent, count) if rows is None else full(prototype, rows, sent)
        return merged

    def column(name: str) -> Tensor:
        whole: Tensor = torch.cat([getattr(part, name) for part in parts.values()])
        order = torch.cat([places[prototype] for prototype in parts])
        return torch.empty_like(whole).index_copy_(0, order.to(whole.device), whole)

    extra = {
        prototype: tree_map(lambda rows, at=prototype: full(at, rows, torch.zeros_like(rows[0])), part.extra)
        for prototype, part in parts.items()
        if part.extra
    }
    facts = {name: column(name) for name in ("size", "steps", "travel", "loss", "ids")}
    counts = None if first.label_counts is None else column("label_counts")
    return Uploads(weights=Weights(stacked(0), stacked(1)), extra=extra, label_counts=counts, **facts)


def _filled(leaf: Tensor, count: int) -> Tensor:
    return leaf.expand(count, *leaf.shape).clone(memory_format=torch.contiguous_format)


def bytes_sent(uploads: Uploads, model: Model) -> int:
    """Bytes of each client's own part of the model, and of all that it sends beside it."""
    clients, total = Counter(map(model.network_of, uploads.ids.tolist())), 0
    for prototype, count in clients.items():
        part = byte_size((only(uploads.weights, prototype), slots_of(uploads.extra, prototype)))
        total += part // len(uploads.ids) * count
    numbers = (uploads.size, uploads.steps, uploads.travel, uploads.loss)
    return total + byte_size(numbers) + (0 if uploads.label_counts is None else byte_size(uploads.label_counts))


def bytes_received(start: Weights, received: Tree, ids: Collection[int], model: Model) -> int:
    """Bytes of each client's own part of the model, and of the slots that the server broadcasts to it."""
    return sum(
        count * byte_size((only(start, prototype), slots_of(received, prototype)))
        for prototype, count in Counter(map(model.network_of, ids)).items()
    )


def check_groups(groups: Groups, population: int, holders: Collection[int]) -> None:
    """Refuse a client without a prototype, and a prototype without a client among `holders`, who hold data."""
    if len(groups.member) != population:
        raise FedstillError(
            f"the model says which prototype each of {len(groups.member)} clients runs, and there are "
            f"{population}: name one for each client"
        )
    run = {groups.member[client] for client in holders}
    for prototype in groups.models:
        if prototype not in run:
            raise FedstillError(f"no client that holds data runs the prototype '{prototype}': give it one, or leave it")


def rounds_of(round: Round, groups: Groups) -> dict[str, Round]:
    """The round of each prototype: its part of the model, its clients' uploads, its own population and engine.

    All of them name each other in `groups` and share one `shared`. The seed is that of the whole round, so that a
    group steps as it would alone.
    """
    rounds: dict[str, Round] = {}
    starts, uploads = split(round.start, groups.models), split_uploads(round.uploads, groups)
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
        members = frozenset(client for client, of_client in enumerate(groups.member) if of_client == prototype)
        looks[prototype] = replace(
            preparation, model=model, population=len(members), trainer=preparation.trainer.lend(model),
            ask=_asking(preparation.ask, members), tell=_telling(preparation, prototype), metrics={},
            groups=looks, candidates=candidates, shared=preparation.shared,
        )  # fmt: skip
    return looks


def _asking(ask: Ask, members: frozenset[int]) -> Ask:
    def among_members(question: AnyQuestion, /, among: Collection[int] | None = None, **how: Any) -> Answers:
        return ask(question, among=members if among is None else members & set(among), **how)

    return among_members


def _telling(preparation: Preparation, prototype: str) -> Callable[[str, float], None]:
    return lambda line, share: preparation.tell(f"{prototype}: {line}", share)


def per_group(methods: Mapping[str, Method], groups: Groups) -> ServerStep:
    """Run the server steps of each prototype's method on its part; each step on all prototypes before the next one.

    A prototype without an upload this round stays as it was sent; refinements (distillation) still reach it.
    State: "each", the states of a prototype's steps under its name. Broadcast: the prototype's slots under its name.
    Metrics are named "<prototype>/<metric>". The model is reported once every prototype has one to report; targets are
    those of the reported prototype or of all together (`targets_together`), samples those of the first that has some.
    """
    # (prototype, step): the first step of every prototype, then the second one, ...
    in_step = [
        pair
        for same in zip(*(method.steps for method in methods.values()), strict=True)
        for pair in zip(methods, same, strict=True)
    ]

    def init(weights: Weights) -> Tree:
        return {
            "each": {name: first_state(methods[name], part) for name, part in split(weights, groups.models).items()}
        }

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        round = replace(round, weighting=weighting_of(next(iter(methods.values()))))
        parts, rounds = split(candidate, groups.models), rounds_of(round, groups)
        each = {prototype: dict(states) for prototype, states in state["each"].items()}
        for prototype, step in in_step:
            look = rounds[prototype]
            if len(look.uploads.ids) or step.stage in (Stage.REFINE, Stage.REPORT):
                moved = run_step(step, parts[prototype], each[prototype].get(step.name, {}), look)
                parts[prototype], each[prototype][step.name] = moved
                rounds[prototype] = handed_on(step, look)
        _hand_up(round, rounds)
        return merge(parts), {"each": each, **_slots(each)}

    def _slots(each: Mapping[str, Tree]) -> Tree:
        shown = {name: reported(methods[name], states) for name, states in each.items()}
        models = {name: weights for name, weights in shown.items() if weights is not None}
        beliefs = {name: targets(methods[name], states) for name, states in each.items()}
        together = targets_together(
            {name: belief for name, belief in beliefs.items() if belief is not None}, groups.report
        )
        invented = next(filter(None, (samples(methods[name], states) for name, states in each.items())), None)
        return {
            "reported": merge(models) if len(models) == len(methods) else {},
            "targets": {} if together is None else together._asdict(),
            "samples": {} if invented is None else invented._asdict(),
        }

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        parts = split(candidate, groups.models)
        looks = preparations_of(preparation, groups, parts)
        each = {prototype: dict(states) for prototype, states in state["each"].items()}
        for prototype, step in in_step:
            made = step.prepare(parts[prototype], each[prototype].get(step.name, {}), looks[prototype])
            parts[prototype], each[prototype][step.name] = made
        for prototype, look in looks.items():
            preparation.metrics.update({f"{prototype}/{name}": value for name, value in look.metrics.items()})
        return merge(parts), {**state, "each": each}

    def broadcast(state: Tree) -> Tree:
        return {name: broadcast_of(methods[name], states) for name, states in state["each"].items()}

    return ServerStep(
        NETWORKS,
        apply,
        init,
        broadcast,
        frozenset().union(*(step.needs for _, step in in_step)),
        stage=Stage.AGGREGATE,
        prepare=no_preparation if all(step.prepare is no_preparation for _, step in in_step) else prepare,
    )


def _hand_up(round: Round, rounds: Mapping[str, Round]) -> None:
    """Copy the metrics and models that the steps of single prototypes left into the round of all."""
    left: dict[str, dict[str, Weights]] = {}
    for prototype, look in rounds.items():
        round.metrics.update({f"{prototype}/{name}": value for name, value in look.metrics.items()})
        for name, weights in look.models.items():
            left.setdefault(name, {})[prototype] = weights
    round.models.update({name: merge(parts) for name, parts in left.items()})


def _in_groups(changes: Mapping[str, PerClient | None], groups: Groups) -> PerClient | None:
    """Each client's own part on its way; the other parts of its row stay as they were sent."""

    def change_parts(uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
        parts, starts = split_uploads(uploads, groups), split(start, groups.models)
        sent = {
            name: change(parts[name], starts[name], seed)
            for name, change in changes.items()
            if change is not None and len(parts[name].ids)
        }
        return merge_uploads(sent, start, places_of(uploads.ids.tolist(), groups))

    return change_parts if any(change is not None for change in changes.values()) else None


def as_it_is(method: Method, _: Model) -> Method:
    return method


def grouped(
    phases: tuple[Phase, ...], groups: Groups, suited: Callable[[Method, Model], Method] = as_it_is
) -> tuple[Phase, ...]:
    """The same methods for clients with different architectures, each group as a federation of its own, but for steps
    that look at the others (`Round.groups`).

    suited: what the method becomes for one prototype. Objectives stay as they are: a client trains one prototype.
    """
    made: dict[int, Method] = {}
    for method in (phase.method for phase in phases):
        forms = {name: suited(method, model) for name, model in groups.models.items()}
        way = tuple(
            replace(
                stage, per_client=_in_groups({name: form.way[place].per_client for name, form in forms.items()}, groups)
            )
            for place, stage in enumerate(method.way)
        )
        made[id(method)] = replace(method, aggregate=per_group(forms, groups), server=(), way=tuple(way))
    return tuple(phase._replace(method=made[id(phase.method)]) for phase in phases)
