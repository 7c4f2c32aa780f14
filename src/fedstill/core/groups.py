"""Clients with different architectures: one union of prototypes, taken apart and put together again.

The union is one set of weights that holds every prototype, its tensors named "<prototype>/<name>". So a run has one
model to keep, check, save and send, while a client trains and sends its own part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.message import select
from fedstill.core.tree import byte_size, tree_map
from fedstill.core.types import Federation, Groups, Model, Output, Params, Targets, Tree, Uploads, Weights


def only(weights: Weights, prototype: str) -> Weights:
    """One prototype of a union, under the names that it has there; nothing where it is not."""
    return Weights(*({n: leaf for n, leaf in part.items() if n.startswith(f"{prototype}/")} for part in weights))


def part_of(weights: Weights, prototype: str) -> Weights:
    """One prototype of a union, under its own names."""
    places = len(prototype) + 1
    return Weights(*({name[places:]: leaf for name, leaf in part.items()} for part in only(weights, prototype)))


def split(weights: Weights, groups: Groups) -> dict[str, Weights]:
    """The prototypes of a union by name."""
    return {prototype: part_of(weights, prototype) for prototype in groups.models}


def merge(parts: Mapping[str, Weights]) -> Weights:
    """One union of some prototypes: what `split` takes apart."""

    def named(kind: int) -> Params:
        return {f"{group}/{name}": leaf for group, part in parts.items() for name, leaf in part[kind].items()}

    return Weights(named(0), named(1))


def together(outputs: Mapping[str, Output], report: str) -> Output:
    """What prototypes say as one: that of the reported prototype, or else the mean of their logits.

    The features of an ensemble are those of its members, side by side.
    """
    if report in outputs or len(outputs) == 1:
        return outputs[report] if report in outputs else next(iter(outputs.values()))
    widths = {name: output.logits.shape[-1] for name, output in outputs.items()}
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise FedstillError(f"the prototypes tell different numbers of classes apart ({told}): give them one")
    logits = torch.stack([output.logits for output in outputs.values()]).mean(0)
    return Output(logits, torch.cat([output.features for output in outputs.values()], dim=-1))


def targets_together(found: Mapping[str, Targets], report: str) -> Targets | None:
    """Targets of prototypes as those of the model that is looked at.

    All were taught the same; about rows that were not each says its own, and together (like `together`) they say
    softmax(mean of ln p), which is the softmax of the mean of their logits.
    """
    if not found:
        return None
    one = found.get(report, next(iter(found.values())))
    if report in found or len(found) == 1:
        return one
    each = torch.stack([targets.probabilities for targets in found.values()])
    own = (each != each[0]).any(dim=0).any(dim=1) & ~one.kept
    logs = each.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    said = logs.mean(dim=0).softmax(dim=1).to(each.dtype)
    return one._replace(probabilities=torch.where(own.unsqueeze(1), said, one.probabilities))


def reported_name(groups: Groups) -> str:
    """Which model is looked at, in words."""
    return f"ensemble of {', '.join(groups.models)}" if groups.report not in groups.models else groups.report


def places_of(ids: Collection[int], groups: Groups) -> dict[str, Tensor]:
    """Where in a cohort the clients of each prototype stand, in the order of the cohort."""
    found: dict[str, list[int]] = {prototype: [] for prototype in groups.models}
    for place, client in enumerate(ids):
        found[groups.member[client]].append(place)
    return {prototype: torch.tensor(places, dtype=torch.int64) for prototype, places in found.items()}


def split_uploads(uploads: Uploads, groups: Groups) -> dict[str, Uploads]:
    """What the clients of each prototype sent, as if there were no others; nobody of a group: no rows."""
    parts: dict[str, Uploads] = {}
    for prototype, places in places_of(uploads.ids.tolist(), groups).items():
        own = uploads._replace(
            weights=part_of(uploads.weights, prototype), extra=uploads.extra.get(prototype, {}) if len(places) else {}
        )
        parts[prototype] = own if len(places) == len(uploads.ids) else select(own, places)
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


def own_upload(uploads: Uploads, place: int, groups: Groups) -> Uploads:
    """What one client of a cohort sends: its own prototype, and what stands beside it."""
    prototype = groups.member[int(uploads.ids[place])]
    own = uploads._replace(weights=part_of(uploads.weights, prototype), extra=uploads.extra.get(prototype, {}))
    return select(own, place)


def whole_upload(own: Uploads, prototype: str, start: Weights, like: Uploads) -> Uploads:
    """One client's row among the cohort's (`like`) from what it sent; the other prototypes are as they were sent."""
    weights = Weights(*({**sent, **new} for sent, new in zip(start, merge({prototype: own.weights}), strict=True)))
    others = {name: tree_map(lambda leaf: torch.zeros_like(leaf[0]), extra) for name, extra in like.extra.items()}
    return own._replace(weights=weights, extra={**others, **({prototype: own.extra} if own.extra else {})})


def _filled(leaf: Tensor, count: int) -> Tensor:
    return leaf.expand(count, *leaf.shape).clone(memory_format=torch.contiguous_format)


def bytes_sent(uploads: Uploads, groups: Groups) -> int:
    """Bytes of each client's own part and of what it tells beside it."""
    count, total = len(uploads.ids), 0
    for prototype, places in places_of(uploads.ids.tolist(), groups).items():
        own = byte_size((only(uploads.weights, prototype), uploads.extra.get(prototype, {})))
        total += own // count * len(places)
    told = (uploads.size, uploads.steps, uploads.travel, uploads.loss)
    return total + byte_size(told) + (0 if uploads.label_counts is None else byte_size(uploads.label_counts))


def bytes_received(start: Weights, received: Tree, ids: Collection[int], groups: Groups) -> int:
    return sum(
        len(places) * byte_size((only(start, prototype), received.get(prototype, {})))
        for prototype, places in places_of(ids, groups).items()
    )


def check_groups(groups: Groups, federation: Federation) -> None:
    """Every client has a prototype, and every prototype a client that holds data."""
    if len(groups.member) != federation.population:
        raise FedstillError(
            f"the model says which prototype each of {len(groups.member)} clients runs, and there are "
            f"{federation.population}: name one for each client"
        )
    sizes = federation.offsets.diff().tolist()
    for prototype in groups.models:
        if not any(size and own == prototype for size, own in zip(sizes, groups.member, strict=True)):
            raise FedstillError(f"no client that holds data runs the prototype '{prototype}': give it one, or leave it")


def check_fits(model: Model, classes: int, input_shape: tuple[int, ...]) -> None:
    """The model, and each of its prototypes, tells the federation's classes apart and can read its samples.

    Shapes may differ (a dense network flattens an image): what counts is that it runs. What is not known is not asked.
    """
    for name, one in {model.name: model}.items() if model.groups is None else model.groups.models.items():
        what = f"{'model' if model.groups is None else 'the prototype'} '{name}'"
        if 0 < one.classes < classes:
            raise FedstillError(
                f"{what} tells {one.classes} classes apart, and the federation has {classes}: "
                f"build it with classes={classes}"
            )
        if one.input_shape and one.input_shape != tuple(input_shape) and not _runs(one, input_shape):
            raise FedstillError(
                f"{what} reads samples of shape {one.input_shape}, and the federation's have {tuple(input_shape)}: "
                f"build it with input_shape={tuple(input_shape)}"
            )


def _runs(model: Model, input_shape: tuple[int, ...]) -> bool:
    """On numbers or, if it cannot, on ids."""
    weights = model.init(0)
    for dtype in (torch.float32, torch.int64):
        with suppress(Exception), torch.no_grad():
            model.apply(weights, torch.zeros(2, *input_shape, dtype=dtype))
            return True
    return False
