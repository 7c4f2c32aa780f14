"""From a cohort of models to one: averages, robust aggregates, and what happens to BatchNorm statistics.

`AGGREGATES` names them for a text (fedlmd+median) and for [server] aggregate. Each is one tensor operation over the
cohort; uploads of weight 0 do not count. Broken uploads (NaN, Inf) never come here, because the guard holds them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedstill.compose.combine import run_step
from fedstill.compose.sealed import as_before, mean_of, of_sums
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.tree import clone, rows, select, subtract
from fedstill.core.types import Aggregate, Need, Params, Round, SealedRound, ServerStep, Tree, Uploads, Weights

Weighting = Literal["size", "uniform"]
BufferPolicy = Literal["average", "pooled", "reset", "local"]


def shares(uploads: Uploads, weighting: Weighting) -> Tensor:
    """p_k (C,) in float64, summing to 1: n_k / sum n ("size") or 1 / |S| ("uniform"); 0 where n_k = 0."""
    size = uploads.size.double()
    mass = size if weighting == "size" else (size > 0).double()
    total = mass.sum()
    if not bool(total > 0):
        raise FedstillError("no client of this round has any sample: check the partition or enlarge the cohort")
    return mass / total


def participation(round: Round | SealedRound) -> float:
    """|S| / N: the share of the population that sent something this round."""
    if isinstance(round, SealedRound):
        return round.sums["uniform"].clients / round.population
    return float((round.uploads.size > 0).sum()) / round.population


def mean_model(round: Round | SealedRound, weighting: Weighting) -> Weights:
    """Return sum_k p_k w_k, from uploads or from their sum."""
    if isinstance(round, SealedRound):
        return mean_of(round.sums[weighting], round.start)
    share = shares(round.uploads, weighting)
    return Weights(*(weighted_sum(part, share) for part in round.uploads.weights))


def mean_move(round: Round | SealedRound, weighting: Weighting) -> Params:
    """Return sum_k p_k (w_k - w), from uploads or from their sum."""
    if isinstance(round, SealedRound):
        return subtract(mean_of(round.sums[weighting], round.start).params, round.start.params)
    moves = {name: now - round.start.params[name] for name, now in round.uploads.weights.params.items()}
    return weighted_sum(moves, shares(round.uploads, weighting))


def mean_slot(round: Round | SealedRound, slot: str, weighting: Weighting) -> Params:
    """Return sum_k p_k of a slot that is sent beside the model, from uploads or from their sum."""
    if isinstance(round, SealedRound):
        sums = round.sums[weighting]
        return {name: (leaf / sums.mass).to(round.start.params[name].dtype) for name, leaf in sums.extra[slot].items()}
    return weighted_sum(round.uploads.extra[slot], shares(round.uploads, weighting))


def sum_slot(round: Round | SealedRound, slot: str) -> Params:
    """Return the sum over the cohort of a slot that is sent beside the model, from uploads or as it is."""
    if isinstance(round, SealedRound):
        sums = round.sums["uniform"].extra[slot]
        return {name: leaf.to(round.start.params[name].dtype) for name, leaf in sums.items()}
    return weighted_sum(round.uploads.extra[slot], (round.uploads.size > 0).double())


def weighted_sum(stacked: Params, weight: Tensor) -> Params:
    """sum_k weight_k x_k for each tensor (C, ...), in its own dtype; integers take the maximum over the cohort.

    Clients of weight 0 are left out before the sum, so not even a NaN of theirs gets through. Multiply and add,
    not a matrix product: TF32 would cost ten bits.
    """
    counted = weight != 0
    if not bool(counted.all()):
        stacked, weight = rows(stacked, counted), weight[counted]

    def total(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.amax(0)
        return (leaf * weight.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))).sum(0)

    return {name: total(leaf) for name, leaf in stacked.items()}


def average(weighting: Weighting = "size") -> ServerStep:
    """w = sum_k p_k w_k, with p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform"). One upload comes back as it is.

    BatchNorm statistics are averaged alike; integer buffers take the maximum. Two calls with the same weighting return
    the same step, because `join` asks whether two methods aggregate alike.
    """
    if weighting not in get_args(Weighting):
        raise FedstillError(f"weighting '{weighting}' is unknown: {suggest(weighting, get_args(Weighting))}")

    def apply(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        return mean_model(round, weighting), state

    return _AVERAGES.setdefault(weighting, Aggregate("average", of_sums(apply), weighting=weighting))


_AVERAGES: dict[Weighting, ServerStep] = {}


def normalized_average(weighting: Weighting = "size") -> ServerStep:
    """FedNova's average: every client's move counts per unit of its travel a_k, then all take the mean travel.

        w - tau_eff sum_k p_k (w - w_k) / a_k,   tau_eff = sum_k p_k a_k

    computed as the plain average plus sum_k p_k (tau_eff / a_k - 1) (w_k - w), which is 0 to the last bit when all
    clients travel equally. Only ratios of a_k matter, so Uploads.travel (a_k times the learning rate) serves.
    """
    plain = average(weighting)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        candidate, state = plain.apply(candidate, state, round)
        share, travel = shares(round.uploads, weighting), round.uploads.travel.double()
        relative = travel / torch.where(travel > 0, travel, 0.0).max().clamp_min(torch.finfo(travel.dtype).tiny)
        mean_travel = (share * relative).sum() / share.sum()
        stretch = torch.where(relative > 0, mean_travel / relative, 1.0)
        moves = {name: now - round.start.params[name] for name, now in round.uploads.weights.params.items()}
        correction = weighted_sum(moves, share * (stretch - 1.0))
        return candidate._replace(params={n: p + correction[n] for n, p in candidate.params.items()}), state

    return replace(plain, name="normalized_average", apply=apply, needs=plain.needs | {Need.PLAIN_SGD})


_ALONE = frozenset({Need.INDIVIDUAL_UPLOADS})


def median() -> ServerStep:
    """w = the median over the cohort, coordinate by coordinate; of an even number the mean of the middle two.

    Fewer than half of the clients cannot move it beyond the others' values.

    Reference: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        params, buffers = map(middle, _counted(round.uploads).weights)
        return Weights(params, buffers), state

    return Aggregate("median", apply, needs=_ALONE)


def middle(stacked: Params) -> Params:
    """The median of each number over the cohort; of an even number the mean of the middle two."""

    def of(leaf: Tensor) -> Tensor:
        low, high = (len(leaf) - 1) // 2, len(leaf) // 2
        ordered = leaf.sort(dim=0).values
        return ordered[low] if low == high or not leaf.is_floating_point() else ordered[low : high + 1].mean(0)

    return {name: of(leaf) for name, leaf in stacked.items()}


def trimmed_mean(share: float = 0.1) -> ServerStep:
    """w = the mean over the cohort without the largest and the smallest values, coordinate by coordinate.

    Args:
        share: of the cohort that is left out at either end, rounded down; 0 is the uniform average.

    Reference: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """
    if not 0 <= share < 0.5:
        raise FedstillError(f"trimmed_mean(share={share!r}): use a number from 0 to below 0.5")

    def trimmed(stacked: Params) -> Params:
        def of(leaf: Tensor) -> Tensor:
            cut = int(share * len(leaf) + 1e-9)  # 0.29 of 100 are 29, whatever 0.29 is in binary
            left = leaf.sort(dim=0).values[cut : len(leaf) - cut] if cut else leaf
            return left.mean(0) if leaf.is_floating_point() else left.amax(0)

        return {name: of(leaf) for name, leaf in stacked.items()}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        params, buffers = map(trimmed, _counted(round.uploads).weights)
        return Weights(params, buffers), state

    return Aggregate("trimmed_mean", apply, needs=_ALONE)


def geometric_median(iterations: int = 20, smoothing: float = 1e-6) -> ServerStep:
    """w = the point with the smallest sum of distances to the uploads (RFA).

    Weiszfeld's algorithm: w is a mean of the uploads with weights 1 / max(smoothing, distance to w), repeated.
    BatchNorm statistics get the same weights.

    Args:
        iterations: of Weiszfeld's algorithm.
        smoothing: the smallest distance that counts.

    Reference: Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022.
    """
    if iterations < 1 or not smoothing > 0:
        raise FedstillError(
            f"geometric_median({iterations!r}, {smoothing!r}): use at least 1 iteration and a positive number"
        )

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        uploads = _counted(round.uploads)
        squares = squared_distances(uploads.weights.params, round.start.params)
        share = torch.full_like(squares[0], 1.0 / len(squares))
        for _ in range(iterations):
            apart = squares @ share - 0.5 * (share @ squares @ share)  # ||w_k - sum_j share_j w_j||^2
            inverse = 1.0 / apart.clamp_min(0.0).sqrt().clamp_min(smoothing)
            share = inverse / inverse.sum()
        return Weights(*(weighted_sum(part, share) for part in uploads.weights)), state

    return Aggregate("geometric_median", apply, needs=_ALONE)


def krum(f: int = 1, m: int = 1, lengthen: bool = False) -> ServerStep:
    """w = the mean of the m uploads that are nearest to their neighbours (Multi-Krum).

    An upload's score is the sum of its squared distances to the |S| - f - 2 nearest others; a small one is good.

    Args:
        f: clients that may be hostile; at least one neighbour counts, however small the cohort is.
        m: uploads that are kept; the cohort's size or more is the uniform average.
        lengthen: judge a move that is shorter than the median as if it were as long. Short moves are near to all
            others, so without it a hostile client is kept if it sends a short one. The uploads stay as they are.

    Reference: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
    """
    if f < 0 or m < 1:
        raise FedstillError(f"krum(f={f!r}, m={m!r}): use f of at least 0 and m of at least 1")

    def kept(round: Round) -> Uploads:
        uploads = _counted(round.uploads)
        count = len(uploads.ids)
        squares = squared_distances(uploads.weights.params, round.start.params, lengthen=lengthen)
        near = squares.sort(dim=1).values[:, 1 : 1 + max(1, count - f - 2)].sum(1)  # the first is the upload itself
        by_id = uploads.ids.to(near.device).argsort()  # among equals the smallest id, whatever the cohort's order
        best = by_id[near[by_id].argsort(stable=True)[: min(m, count)]]
        return select(uploads, best.sort().values.cpu())

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        return plain_mean(kept(round)), state

    return Aggregate("krum", apply, needs=_ALONE, hands_on=kept)


def norm_bound(bound: float = 1.0) -> ServerStep:
    """w = start + the uniform mean of the clients' moves, none longer than `bound`. BatchNorm statistics are averaged.

    Args:
        bound: of the norm of a client's move over all parameters together.

    Reference: Sun et al., Can You Really Backdoor Federated Learning?, 2019.
    """
    if not bound > 0:
        raise FedstillError(f"norm_bound(bound={bound!r}): use a positive number")

    def shortened(round: Round) -> Uploads:
        return within(_counted(round.uploads), Weights(round.start.params, {}), lambda norm: bound)

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        uploads = _counted(round.uploads)
        start, share = round.start.params, shares(uploads, "uniform")
        moves = {name: leaf - start[name] for name, leaf in uploads.weights.params.items()}
        mean = weighted_sum(moves, share * (bound / lengths(moves).clamp_min(bound)))
        params = {name: leaf + mean[name] for name, leaf in start.items()}
        return Weights(params, weighted_sum(uploads.weights.buffers, share)), state

    return Aggregate("norm_bound", apply, needs=_ALONE, hands_on=shortened)


def centred_clipping(bound: float = 1.0, iterations: int = 3) -> ServerStep:
    """w = a centre that moves by the mean of the uploads' distances from it, none longer than a bound (CC).

        v = the median of the uploads,  then `iterations` times:  v <- v + mean_k (w_k - v) min(1, tau / ||w_k - v||)
        tau = bound times the median of ||w_k - v||

    BatchNorm statistics are averaged; an upload that is drawn nearer counts with the median of them.

    Args:
        bound: of an upload's distance from the centre, in medians of these distances.
        iterations: how often the centre moves.

    Reference: Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021.
    """
    if not bound > 0 or iterations < 1:
        raise FedstillError(f"centred_clipping({bound!r}, {iterations!r}): use a positive number and at least 1")

    def near_the_centre(round: Round) -> Uploads:
        uploads = _counted(round.uploads)
        share, centre = shares(uploads, "uniform"), Weights(*map(middle, uploads.weights))
        for _ in range(iterations - 1):
            near = within(uploads, centre, lambda norm: bound * float(norm.median()))
            centre = centre._replace(params=weighted_sum(near.weights.params, share))
        return within(uploads, centre, lambda norm: bound * float(norm.median()))

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        return plain_mean(near_the_centre(round)), state

    return Aggregate("centred_clipping", apply, needs=_ALONE, hands_on=near_the_centre)


def within(uploads: Uploads, centre: Weights, most: Callable[[Tensor], float]) -> Uploads:
    """Return the uploads with their parameters drawn towards a centre, none farther away than `most` of distances.

    An upload that was drawn nearer gets the buffers of the centre that have a name there.
    """
    away = {name: leaf - centre.params[name] for name, leaf in uploads.weights.params.items()}
    norm = lengths(away)
    bound = most(norm)
    near, part = norm <= bound, bound / norm.clamp_min(bound)
    if bool(near.all()):
        return uploads

    def drawn(leaf: Tensor, nearer: Tensor) -> Tensor:
        return torch.where(near.reshape(-1, *[1] * (leaf.dim() - 1)), leaf, nearer)

    def shortened(name: str) -> Tensor:
        move = away[name]
        return centre.params[name] + part.to(move).reshape(-1, *[1] * (move.dim() - 1)) * move

    params = {name: drawn(leaf, shortened(name)) for name, leaf in uploads.weights.params.items()}
    buffers = {name: drawn(leaf, centre.buffers.get(name, leaf)) for name, leaf in uploads.weights.buffers.items()}
    return uploads._replace(weights=Weights(params, buffers))


def lengths(moves: Params) -> Tensor:
    """(C,) the norm of each client's move over all parameters together, in float64."""
    squares = [move.reshape(len(move), -1).double().square().sum(1) for move in moves.values()]
    return torch.stack(squares).sum(0).sqrt()


def plain_mean(uploads: Uploads) -> Weights:
    """The uniform mean of the uploads."""
    share = shares(uploads, "uniform")
    return Weights(*(weighted_sum(part, share) for part in uploads.weights))


def squared_distances(params: Params, start: Params, *, lengthen: bool = False) -> Tensor:
    """(C, C) squared distances between the uploads over all parameters together, in float64.

    lengthen: moves that are shorter than the median are taken to be as long.
    """
    moves = ((leaf.double() - start[name].double()).flatten(1) for name, leaf in params.items())
    products = torch.stack([move @ move.T for move in moves]).sum(0)
    if lengthen:
        norm = products.diagonal().clamp_min(0.0).sqrt()
        factor = torch.where(norm > 0, norm.median() / norm, 1.0).clamp_min(1.0)
        products = factor.unsqueeze(1) * products * factor
    squares = products.diagonal()
    apart = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2.0 * products).clamp_min(0.0)
    return apart.fill_diagonal_(0.0)


def _counted(uploads: Uploads) -> Uploads:
    """The uploads of clients that hold samples."""
    counts = shares(uploads, "uniform") > 0
    return uploads if bool(counts.all()) else select(uploads, counts.nonzero().flatten().cpu())


def with_buffers(step: ServerStep, policy: BufferPolicy) -> ServerStep:
    """The same aggregate with another policy for BatchNorm statistics.

    average: as the aggregate makes the parameters, so means and variances alike.
    pooled:  var = (var_k + mean_k^2 made one) - mean^2, the variance of the union of the clients' data.
    reset:   the initial statistics (mean 0, variance 1, count 0).
    local:   the server keeps the ones it sent; clients' statistics are not used.
    """
    if policy == "average":
        return step

    def by_policy(candidate: Weights, state: Tree, round: Round | SealedRound) -> tuple[Weights, Tree]:
        made, state = run_step(step, candidate, state, round)
        return made._replace(buffers=_by_policy(policy, made.buffers, round.start)), state

    def pooled(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        sent = round.uploads.weights
        raw = {name: _raw_variance(name, sent.buffers) for name in sent.buffers}
        round = replace(round, uploads=round.uploads._replace(weights=sent._replace(buffers=raw)))
        return by_policy(candidate, state, round)

    return replace(step, apply=pooled if policy == "pooled" else as_before(step, by_policy))


def _raw_variance(name: str, buffers: Params) -> Tensor:
    if not name.endswith("running_var"):
        return buffers[name]
    return buffers[name] + buffers[name.removesuffix("var") + "mean"].square()


def _by_policy(policy: BufferPolicy, made: Params, start: Weights) -> Params:
    if policy == "local":
        return clone(start.buffers)
    buffers = dict(made)
    for name, leaf in made.items():
        if policy == "reset" and name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            buffers[name] = torch.full_like(leaf, 1 if name.endswith("running_var") else 0)
        if policy == "pooled" and name.endswith("running_var"):
            buffers[name] = (leaf - made[name.removesuffix("var") + "mean"].square()).clamp_min(0.0)
    return buffers


AGGREGATES: dict[str, Callable[..., ServerStep]] = {
    "average": average,
    "normalized_average": normalized_average,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "geometric_median": geometric_median,
    "krum": krum,
    "norm_bound": norm_bound,
    "centred_clipping": centred_clipping,
}
