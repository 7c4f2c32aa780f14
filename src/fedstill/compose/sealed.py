"""Sealed rounds: the server's steps get sums over the cohort, as secure aggregation would show them, and no upload.

A step that can do with sums says so with `of_sums`, and its function takes a `Round | SealedRound`. A `SealedRound` has
no `uploads`, so mypy refuses a function that reads them, and a step without `of_sums` never gets such a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.needs import needs_of
from fedstill.core.tree import flatten, tree_map
from fedstill.core.types import (
    Method,
    Need,
    Params,
    Round,
    SealedRound,
    ServerStep,
    Sum,
    Tree,
    Uploads,
    Weights,
    no_change,
)

Step = Callable[[Weights, Tree, Round], tuple[Weights, Tree]]


@dataclass(frozen=True)
class OfSums:
    """The function of a server step that reads sums over the cohort, and no upload."""

    function: Callable[[Weights, Tree, Round | SealedRound], tuple[Weights, Tree]]

    def __call__(self, candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        return self.function(candidate, state, round)


def of_sums(function: Callable[[Weights, Tree, Round | SealedRound], tuple[Weights, Tree]]) -> OfSums:
    """Mark the function of a server step that can do without single uploads; mypy holds it to that."""
    return OfSums(function)


def reads_sums(step: ServerStep) -> bool:
    return step.apply is no_change or isinstance(step.apply, OfSums)


def as_before(step: ServerStep, function: Callable[[Weights, Tree, Round], tuple[Weights, Tree]]) -> Step:
    """Return the function of a step around another one, which reads no more of a round than that one does."""
    return OfSums(function) if reads_sums(step) else function  # type: ignore[arg-type]


def why_not_sealed(method: Method, networks: int = 1) -> list[str]:
    """Say what of a method needs more than sums over the cohort; empty: it can run sealed.

    networks: how many architectures the clients have.
    """
    reasons = []
    for step in method.steps:
        if Need.INDIVIDUAL_UPLOADS in step.needs:
            reasons.append(f"the server step '{step.name}' looks at each client's model")
        elif not reads_sums(step):
            reasons.append(
                f"the server step '{step.name}' may read the uploads one by one (it is not marked with of_sums)"
            )
    if Need.LABEL_COUNTS_UPLOADED in needs_of(method):
        reasons.append("it needs each client's label counts")
    if method.questions:
        reasons.append(f"it asks each client for {', '.join(question.name for question in method.questions)}")
    if method.trusted is not None:
        reasons.append("its trusted party looks at each upload")
    if networks > 1:
        reasons.append("clients have several architectures")
    return reasons


def sums_of(uploads: Uploads, start: Weights) -> dict[Literal["size", "uniform"], Sum]:
    """Return what secure aggregation would show of a cohort: sums by the number of samples, and of all alike.

    Integer buffers are the server's own, because their maximum is no sum.
    """
    present = (uploads.size > 0).double()
    masses: dict[Literal["size", "uniform"], Tensor] = {"size": uploads.size.double(), "uniform": present}
    return {weighting: _sum(uploads, mass, start) for weighting, mass in masses.items()}


def _sum(uploads: Uploads, mass: Tensor, start: Weights) -> Sum:
    def total(leaf: Tensor) -> Tensor:
        wide = leaf.double() * mass.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
        return wide.sum(0)

    params, buffers = ({name: total(leaf) for name, leaf in part.items()} for part in uploads.weights)
    whole = {name for name, leaf in start.buffers.items() if not leaf.is_floating_point()}
    return Sum(
        Weights(params, {name: leaf for name, leaf in buffers.items() if name not in whole}),
        tree_map(total, uploads.extra),
        mass.sum(),
        int((uploads.size > 0).sum()),
    )


def mean_of(sums: Sum, start: Weights) -> Weights:
    """Return the weighted mean of the cohort's models, in the form of the one that was sent."""

    def mean(name: str, like: Tensor, kind: int) -> Tensor:
        if name not in sums.weights[kind]:
            return like.clone()
        return (sums.weights[kind][name] / sums.mass).to(like.dtype)

    return Weights(*({name: mean(name, like, kind) for name, like in part.items()} for kind, part in enumerate(start)))


def clipped(uploads: Uploads, start: Weights, bound: float | None, extra_bound: float | None) -> Uploads:
    """Return uploads as clients send them who cut their moves, and what they send beside, to norms; None: no bound."""
    if bound is not None:
        sent = uploads.weights.params
        moves = {name: leaf.double() - start.params[name].double() for name, leaf in sent.items()}
        share = _share(moves, bound)

        def shortened(name: str, leaf: Tensor) -> Tensor:
            shares = share.reshape(-1, *[1] * (leaf.dim() - 1))
            return torch.where(shares == 1.0, leaf, (start.params[name].double() + shares * moves[name]).to(leaf.dtype))

        params = {name: shortened(name, leaf) for name, leaf in sent.items()}
        uploads = uploads._replace(weights=uploads.weights._replace(params=params))
    if extra_bound is not None and uploads.extra:
        share = _share(flatten(uploads.extra), extra_bound)
        cut = tree_map(lambda leaf: (leaf * share.reshape(-1, *[1] * (leaf.dim() - 1))).to(leaf.dtype), uploads.extra)
        uploads = uploads._replace(extra=cut)
    return uploads


def _share(moves: Params, bound: float) -> Tensor:
    """Return min(1, bound / norm) of each client over all tensors together."""
    squares = torch.stack([move.double().reshape(len(move), -1).square().sum(1) for move in moves.values()])
    return bound / squares.sum(0).sqrt().clamp_min(bound)


def sealed_round(look: Round, uploads: Uploads) -> SealedRound:
    """Return the round as a sealed one: everything but the uploads, and sums over them."""
    return SealedRound(
        number=look.number, start=look.start, sums=sums_of(uploads, look.start), model=look.model,
        population=look.population, unlabeled=look.unlabeled, seed=look.seed, trainer=look.trainer,
        metrics=look.metrics, models=look.models, validation=look.validation, weighting=look.weighting,
    )  # fmt: skip
