"""Linear evaluation: where clients train the head alone, a run leaves every bit of the extractor as it is."""

from __future__ import annotations

from dataclasses import replace

from fedstill.compose.groups import in_union
from fedstill.compose.sealed import as_before
from fedstill.core.types import Method, Model, PerClient, Round, Seed, ServerStep, Tree, Uploads, Weights


def head_names(model: Model) -> tuple[str, ...]:
    """The parameters of the head; of several architectures, those of each."""
    return tuple(in_union(group, name) for group, network in model.networks.items() for name in network.head_names)


def head_of(weights: Weights, names: tuple[str, ...]) -> Weights:
    """What a client that trained the head alone has to send."""
    return Weights({name: weights.params[name] for name in names}, {})


def heads_only(method: Method, model: Model) -> Method:
    """The same method for clients that train the head alone.

    Only heads are transmitted (clipped, with noise); everything else in an upload is what the server sent. The model
    that the server makes of the cohort's has the extractor it sent, to the last bit: a weighted sum of equal numbers
    need not be that number. Steps that move or refine the model go on from there: a move of zero stays zero, and a
    student has an option for the part that it trains.
    """
    names = head_names(model)
    way = tuple(replace(mechanism, per_client=_on_heads(mechanism.per_client, names)) for mechanism in method.way)
    return replace(method, aggregate=_with_extractor(method.aggregate, names), way=way)


def _with_extractor(step: ServerStep, names: tuple[str, ...]) -> ServerStep:
    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        made, state = step.apply(candidate, state, round)
        return Weights({**round.start.params, **head_of(made, names).params}, round.start.buffers), state

    return replace(step, apply=as_before(step, apply))


def _on_heads(change: PerClient | None, names: tuple[str, ...]) -> PerClient | None:
    if change is None:
        return None

    def change_heads(uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
        heads = uploads._replace(weights=head_of(uploads.weights, names))
        sent = change(heads, head_of(start, names), seed)
        params = {**uploads.weights.params, **sent.weights.params}
        return sent._replace(weights=Weights(params, uploads.weights.buffers))

    return change_heads
