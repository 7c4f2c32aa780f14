"""The part of a model that local training moves: nobody sends the other tensors, and a run keeps every bit of them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedstill.compose.groups import in_union
from fedstill.compose.sealed import as_before
from fedstill.core.types import (
    Method,
    Model,
    Params,
    PerClient,
    Round,
    SealedRound,
    Seed,
    ServerStep,
    Tree,
    Uploads,
    Weights,
)


def head_names(model: Model) -> tuple[str, ...]:
    """The parameters of the head; of several architectures, those of each."""
    return _names(model, "head_names")


def frozen_names(model: Model) -> frozenset[str]:
    """The tensors that no training moves, such as the base below adapters; of several architectures, those of each."""
    return frozenset(_names(model, "frozen_names"))


def _names(model: Model, kind: str) -> tuple[str, ...]:
    return tuple(in_union(group, name) for group, network in model.networks.items() for name in getattr(network, kind))


def head_of(weights: Weights, names: tuple[str, ...]) -> Weights:
    """The parameters of these names."""
    return Weights({name: weights.params[name] for name in names}, {})


def moves_all(model: Model, part: str) -> bool:
    """Whether training `part` of the model moves every tensor."""
    return part == "all" and not frozen_names(model)


def moving(weights: Weights, model: Model, part: str = "all") -> Weights:
    """The tensors that training `part` of the model may move, of those that `weights` holds."""
    if part == "head":
        return head_of(weights, tuple(name for name in head_names(model) if name in weights.params))
    frozen = frozen_names(model)
    return Weights(weights.params, {name: leaf for name, leaf in weights.buffers.items() if name not in frozen})


def with_rest(moved: Weights, start: Weights, *, width: int | None = None) -> Weights:
    """Weights with the start's own tensors beside the moved ones; `width` clients share them (no copies)."""

    def beside(tensors: Params, rest: Params) -> Params:
        return {name: tensors[name] if name in tensors else _shared(leaf, width) for name, leaf in rest.items()}

    return Weights(beside(moved.params, start.params), beside(moved.buffers, start.buffers))


def _shared(leaf: Tensor, width: int | None) -> Tensor:
    return leaf if width is None else leaf.expand(width, *leaf.shape)


def moving_only(method: Method, model: Model, part: str) -> Method:
    """The same method for clients that train a part of the model: the head, or all but what is frozen.

    Only that part is transmitted (clipped, with noise), and the aggregate sees nothing else. So the other tensors of
    its model are those that it sent, to the last bit: a weighted sum of equal numbers need not be that number. Steps
    that move or refine the model go on from there: a move of zero stays zero, and a student has an option for the part
    that it trains.
    """
    if moves_all(model, part):
        return method
    way = tuple(replace(stage, per_client=_on_part(stage.per_client, model, part)) for stage in method.way)
    return replace(method, aggregate=_of_part(method.aggregate, model, part), way=way)


def _of_part(step: ServerStep, model: Model, part: str) -> ServerStep:
    def init(weights: Weights) -> Tree:
        return step.init(moving(weights, model, part))

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        start, look = moving(round.start, model, part), round
        if isinstance(round, SealedRound):
            sums = {kind: of._replace(weights=moving(of.weights, model, part)) for kind, of in round.sums.items()}
            look = replace(round, start=start, sums=sums)
        else:
            uploads = round.uploads._replace(weights=moving(round.uploads.weights, model, part))
            look = replace(round, start=start, uploads=uploads)
        made, state = step.apply(moving(candidate, model, part), state, look)  # type: ignore[arg-type]
        return with_rest(made, round.start), state

    return replace(step, init=init, apply=as_before(step, apply))


def _on_part(change: PerClient | None, model: Model, part: str) -> PerClient | None:
    if change is None:
        return None

    def change_part(uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
        moved = uploads._replace(weights=moving(uploads.weights, model, part))
        sent = change(moved, moving(start, model, part), seed)
        params, buffers = uploads.weights
        return sent._replace(weights=Weights({**params, **sent.weights.params}, {**buffers, **sent.weights.buffers}))

    return change_part
