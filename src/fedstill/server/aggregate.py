"""From a cohort of models to one: weighted averages, and what happens to BatchNorm statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.tree import clone, rows
from fedstill.core.types import Need, Params, Round, ServerStep, Stage, Tree, Uploads, Weights

Weighting = Literal["size", "uniform"]
BufferPolicy = Literal["average", "pooled", "reset", "local", "last"]


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise FedstillError(f"{key} '{value}' is unknown: {suggest(value, choices)}")


def shares(uploads: Uploads, weighting: Weighting) -> Tensor:
    """p_k (C,) in float64, summing to 1: n_k / sum n ("size") or 1 / |S| ("uniform"); 0 where n_k = 0."""
    size = uploads.size.double()
    mass = size if weighting == "size" else (size > 0).double()
    total = mass.sum()
    if not bool(total > 0):
        raise FedstillError("no client of this round has any sample: check the partition or enlarge the cohort")
    return mass / total


def participation(round: Round) -> float:
    """|S| / N: the share of the population that sent something this round."""
    return float((round.uploads.size > 0).sum()) / round.population


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


def merge_buffers(round: Round, share: Tensor, policy: BufferPolicy) -> Params:
    """BatchNorm statistics of the new model.

    average: mean_k p_k of means and of variances, as most code does.
    pooled:  var = sum_k p_k (var_k + mean_k^2) - mean^2, the variance of the union of the clients' data.
    reset:   the initial statistics (mean 0, variance 1, count 0).
    local:   the server keeps the ones it sent; clients' statistics are not used.
    last:    those of one client, the last of the cohort by its id (FedDF's released code); integer ones too.
    Other buffers are averaged, integer ones take the maximum.
    """
    if policy == "local":
        return clone(round.start.buffers)
    stacked = round.uploads.weights.buffers
    if policy == "last":
        ids = round.uploads.ids.to(share.device)
        return clone(rows(stacked, int(torch.where(share > 0, ids, -1).argmax())))
    merged = weighted_sum(stacked, share)
    for name, leaf in merged.items():
        if policy == "reset" and name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            merged[name] = torch.full_like(leaf, 1 if name.endswith("running_var") else 0)
        if policy == "pooled" and name.endswith("running_var"):
            mean = name.removesuffix("var") + "mean"
            raw = weighted_sum({name: stacked[name] + stacked[mean].square()}, share)[name]
            merged[name] = (raw - merged[mean].square()).clamp_min(0.0)
    return merged


def average(weighting: Weighting = "size", *, buffers: BufferPolicy = "average") -> ServerStep:
    """w = sum_k p_k w_k, with p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform"). One upload comes back as it is."""
    _check_choice("weighting", weighting, get_args(Weighting))
    _check_choice("buffers", buffers, get_args(BufferPolicy))

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        share = shares(round.uploads, weighting)
        params = weighted_sum(round.uploads.weights.params, share)
        return Weights(params, merge_buffers(round, share, buffers)), state

    needs = frozenset({Need.INDIVIDUAL_UPLOADS} if buffers == "last" else ())
    step = ServerStep("average", apply, needs=needs, stage=Stage.AGGREGATE)
    return _MADE.setdefault((weighting, buffers), step)


_MADE: dict[
    tuple[Weighting, BufferPolicy], ServerStep
] = {}  # averages of one kind are one step: joined methods compare


def normalized_average(weighting: Weighting = "size", *, buffers: BufferPolicy = "average") -> ServerStep:
    """FedNova's average: every client's move counts per unit of its travel a_k, then all take the mean travel.

        w - tau_eff sum_k p_k (w - w_k) / a_k,   tau_eff = sum_k p_k a_k

    computed as the plain average plus sum_k p_k (tau_eff / a_k - 1) (w_k - w), which is 0 to the last bit when all
    clients travel equally. Only ratios of a_k matter, so Uploads.travel (a_k times the learning rate) serves.
    """
    plain = average(weighting, buffers=buffers)

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
