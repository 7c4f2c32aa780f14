"""What hostile clients may do, one function a kind.

A hostile client may poison the rows that it trains on, send another move than the one it trained, or lie in answer to a
question. It knows what every other client of its cohort sends, which is more than a real one would know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core.data import Dataset, Federation
from fedstill.core.errors import FedstillError
from fedstill.core.limits import Count, CountOrNone, Positive, PositiveShare
from fedstill.core.seeds import numpy_generator, seed_for, torch_generator
from fedstill.core.types import Params, Seed, Tree

TOP = 0.99  # the quantile of honest lengths that an adaptive attack does not pass


class Cohort(NamedTuple):
    """The facts that hostile clients know when they send."""

    moves: Params  # (C, ...) of every client, as its training made them
    hostile: Tensor  # (C,) bool
    seed: Seed


Poison = Callable[[Dataset, Tensor, Tensor, Seed], tuple[Tensor, Tensor]]  # (train, x, y, seed) -> as many (x, y)
Send = Callable[[Cohort], Params]  # -> moves (C, ...), of of which only the rows of hostile clients count
Lie = Callable[[Tree, Any], Tree]  # (the honest answer, what the client was sent) -> the answer
Trigger = Callable[[Dataset, Tensor], Tensor]  # (train, x) -> x with the pattern that opens the backdoor


@dataclass(frozen=True)
class Kind:
    """One kind of attack, or several at once. Hostile clients do honestly what has no function here."""

    poison: Poison | None = None
    send: Send | None = None
    lie: Lie | None = None
    trigger: Trigger | None = None
    target: int = 0  # the class that a sample with the trigger shall get


@dataclass(frozen=True)
class Attack:
    """The acts of a run's hostile clients, and their share of the clients that hold data."""

    kind: Kind
    share: float = 0.2

    def hostile(self, clients: Iterable[int], seed: Seed) -> list[int]:
        """Return the ids of the hostile ones among `clients`, at least one; the run's seed chooses them."""
        ids = sorted(clients)
        order = numpy_generator(seed_for(seed, "hostile clients")).permutation(len(ids))
        return sorted(ids[place] for place in order[: max(1, round(self.share * len(ids)))])

    def poisoned(self, federation: Federation, hostile: Iterable[int], seed: Seed) -> Federation:
        """Return the federation in which hostile clients hold poisoned copies of their rows."""
        poison, train = self.kind.poison, federation.train
        if poison is None:
            return federation
        indices, x, y, count = federation.indices.clone(), [train.x], [train.y], len(train.y)
        for client in hostile:
            first, last = federation.offsets[client : client + 2].tolist()
            rows = federation.indices[first:last]
            mine = poison(train, train.x[rows], train.y[rows], seed_for(seed, "poison", client))
            indices[first:last] = torch.arange(count, count + len(rows))
            count += len(rows)
            x.append(mine[0])
            y.append(mine[1])
        return replace(federation, train=replace(train, x=torch.cat(x), y=torch.cat(y)), indices=indices)


def sign(factor: Positive = 4.0) -> Kind:
    """Send one's own move backwards, `factor` times as far: w - factor (w_k - w).

    Args:
        factor: how many times as far.
    """
    return Kind(send=lambda cohort: times(cohort.moves, -factor))


def scale(factor: Positive = 20.0) -> Kind:
    """Send one's own move, `factor` times as far, to outweigh the others: w + factor (w_k - w).

    Args:
        factor: how many times as far.
    """
    return Kind(send=lambda cohort: times(cohort.moves, factor))


def gaussian(factor: Positive = 4.0) -> Kind:
    """Send noise instead of one's own move: N(0, 1) in every number, scaled to `factor` times the move's length.

    Args:
        factor: length of the noise, in lengths of one's own move.
    """

    def send(cohort: Cohort) -> Params:
        noise = {
            name: torch.randn(
                leaf.shape,
                generator=torch_generator(seed_for(cohort.seed, name), leaf.device),
                device=leaf.device,
                dtype=leaf.dtype,
            )
            for name, leaf in cohort.moves.items()
        }
        return times(noise, factor * lengths(cohort.moves) / lengths(noise))

    return Kind(send=send)


def label_flip() -> Kind:
    """Train on wrong labels, class K - 1 - c in place of c, and send the resulting move."""

    def poison(train: Dataset, x: Tensor, y: Tensor, seed: Seed) -> tuple[Tensor, Tensor]:
        return x, len(train.classes) - 1 - y

    return Kind(poison=poison)


def adaptive(quantile: PositiveShare = TOP) -> Kind:
    """Send the same move from every hostile client: against the mean honest move, and no longer than honest ones.

    No rule about sizes tells such an upload from an honest one, and no two hostile uploads cancel.

    Args:
        quantile: of the honest moves' lengths that the move is as long as.
    """

    def send(cohort: Cohort) -> Params:
        honest = ~cohort.hostile if bool((~cohort.hostile).any()) else cohort.hostile
        mean = {name: leaf[honest].mean(dim=0, keepdim=True).expand_as(leaf) for name, leaf in cohort.moves.items()}
        return as_long_as_honest(times(mean, -1.0), cohort, quantile)

    return Kind(send=send)


def backdoor(
    target: CountOrNone = 0, part: PositiveShare = 0.5, size: Count = 3, factor: Positive = 5.0, adaptive: bool = False
) -> Kind:
    """Put a pattern into some of the rows, label these rows as one class, and send the move `factor` times as far.

    The pattern is a bright square in a corner of an image, or the largest value in the last features of a table. The
    model is to name the target where it sees the pattern, and answer as before where it does not. The run then reports
    backdoor_success: how many test samples of other classes get the target once they carry the pattern.

    Args:
        target: the class, by its number.
        part: of a hostile client's rows that carry the pattern.
        size: width of the square in pixels, or number of features.
        factor: how many times as far the move goes (model replacement); 1 is the move as it was trained.
        adaptive: the move is as long as the 99th percentile of the honest moves, whatever the factor.
    """

    def trigger(train: Dataset, x: Tensor) -> Tensor:
        if train.text:
            raise FedstillError("attack.name = 'backdoor' has no pattern for texts: take another attack")
        marked, brightest = x.clone(), train.x.max()
        if x.ndim > 2:
            marked[..., -size:, -size:] = brightest
        else:
            marked[:, -size:] = brightest
        return marked

    def poison(train: Dataset, x: Tensor, y: Tensor, seed: Seed) -> tuple[Tensor, Tensor]:
        if target >= len(train.classes):
            raise FedstillError(f"attack.name: target = {target}, and classes go from 0 to {len(train.classes) - 1}")
        chosen = torch.from_numpy(numpy_generator(seed).permutation(len(y))[: max(1, round(part * len(y)))])
        x, y = x.clone(), y.clone()
        x[chosen], y[chosen] = trigger(train, x[chosen]), target
        return x, y

    def send(cohort: Cohort) -> Params:
        return as_long_as_honest(cohort.moves, cohort, TOP) if adaptive else times(cohort.moves, factor)

    return Kind(poison, send, trigger=trigger, target=target)


def sure(factor: Positive = 10.0) -> Kind:
    """Where a method asks how much samples resemble one's own data (FedAUX), say that all of them do.

    Of a classifier w the answer points to the mean of the public samples and is `factor` times as long; of scores all
    are the largest one, and log(factor) is added.

    Args:
        factor: how many times as sure as the client's own answer.
    """

    def lie(answer: Tree, sent: Any) -> Tree:
        lying = dict(answer)
        if "w" in lying:
            w, centre = lying["w"], sent["negatives"].mean(dim=0)
            lying["w"] = (factor * w.norm() * centre / centre.norm().clamp_min(1e-12)).to(w)
        if "log_scores" in lying:
            scores = lying["log_scores"]
            lying["log_scores"] = torch.full_like(scores, float(scores.max())) + torch.tensor(factor).log().to(scores)
        return lying

    return Kind(lie=lie)


def together(kinds: Iterable[Kind]) -> Kind:
    """Return one kind that does all of these, in their order; the last trigger counts."""
    whole = Kind()
    for kind in kinds:
        whole = Kind(
            _poisons(whole.poison, kind.poison),
            _sends(whole.send, kind.send),
            _lies(whole.lie, kind.lie),
            *((kind.trigger, kind.target) if kind.trigger is not None else (whole.trigger, whole.target)),
        )
    return whole


def _poisons(first: Poison | None, second: Poison | None) -> Poison | None:
    if first is None or second is None:
        return first or second
    return lambda train, x, y, seed: second(train, *first(train, x, y, seed), seed_for(seed, "then"))


def _sends(first: Send | None, second: Send | None) -> Send | None:
    if first is None or second is None:
        return first or second
    return lambda cohort: second(cohort._replace(moves=where_hostile(cohort, first(cohort))))


def _lies(first: Lie | None, second: Lie | None) -> Lie | None:
    if first is None or second is None:
        return first or second
    return lambda answer, sent: second(first(answer, sent), sent)


def where_hostile(cohort: Cohort, moves: Params) -> Params:
    """Return the moves of hostile clients among `moves`, and the moves that the others made."""
    return {
        name: torch.where(cohort.hostile.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, cohort.moves[name])
        for name, leaf in moves.items()
    }


def lengths(moves: Params) -> Tensor:
    """Return (C,) the norm of each client's move over all tensors together."""
    squares = [leaf.reshape(len(leaf), -1).double().square().sum(1) for leaf in moves.values()]
    return torch.stack(squares).sum(0).sqrt()


def times(moves: Params, factor: float | Tensor) -> Params:
    """Return the moves times one number, or times one for each client (C,)."""
    if not isinstance(factor, Tensor):
        return {name: factor * leaf for name, leaf in moves.items()}
    return {name: factor.to(leaf).reshape(-1, *[1] * (leaf.ndim - 1)) * leaf for name, leaf in moves.items()}


def as_long_as_honest(moves: Params, cohort: Cohort, quantile: float) -> Params:
    """Return the moves with a quantile of the honest moves' lengths; alone, a client keeps its own length."""
    known = lengths(cohort.moves)
    honest = known[~cohort.hostile] if bool((~cohort.hostile).any()) else known
    tiny = torch.finfo(honest.dtype).tiny
    return times(moves, honest.quantile(quantile) / lengths(moves).clamp_min(tiny))
