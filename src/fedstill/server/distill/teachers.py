"""Who teaches: models for an ensemble, stacked along a first dimension T."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.needs import CURES
from fedstill.core.seeds import numpy_generator, seed_for, torch_generator
from fedstill.core.types import Need, Output, Params, Round, Weights
from fedstill.server.aggregate import shares

Teachers = Callable[[Weights, Round], Weights]  # (candidate, round) -> stacked weights


def unlabeled_data(round: Round) -> Tensor:
    if round.unlabeled is None:
        raise FedstillError(f"distillation on the server needs {Need.UNLABELED.value}: {CURES[Need.UNLABELED]}")
    return round.unlabeled


def teacher_outputs(
    round: Round, teachers: Weights, *, features: bool = False, batch: int | None = None, rows: Tensor | None = None
) -> Output:
    """Every teacher on every unlabeled sample, or on some `rows`, (T, M, K): T * M forwards, once a round.

    batch: teachers in train mode, so many rows at a time; None is eval mode.
    """
    how: dict[str, Any] = {} if batch is None else {"batch": batch, "seed": seed_for(round.seed, "teachers")}
    if rows is not None:
        how["rows"] = rows
    return round.trainer.outputs(teachers, unlabeled_data(round), stacked=True, features=features, **how)


def uploads_teach(candidate: Weights, round: Round) -> Weights:
    """The uploaded models."""
    return round.uploads.weights


def teaching(round: Round) -> tuple[Round, ...]:
    """The rounds whose uploads teach: with several architectures those of all groups, in the order of the groups."""
    return tuple(part for part in round.groups.values() if len(part.uploads.ids)) or (round,)


def teacher_ids(round: Round) -> Tensor:
    """(T,) whose models `uploads_teach` are, in their order: group by group, and in a group as in the cohort."""
    return torch.cat([part.uploads.ids for part in teaching(round)])


def report_teachers(round: Round, share: Tensor) -> None:
    """Note how much each client counts as a teacher: its share (T,), or its mean share (T, M) over the rows."""
    mean = share.double().reshape(len(share), -1).mean(dim=1)
    round.teachers.update(zip(teacher_ids(round).tolist(), mean.tolist(), strict=True))


def teacher_logits(
    candidate: Weights, round: Round, teachers: Teachers, *, batch: int | None = None, rows: Tensor | None = None
) -> Tensor:
    """(T, M, K) of `teachers`; see `teacher_outputs`.

    Uploads of several architectures answer each with its own network, once a round for the students of all groups.
    """
    if teachers is not uploads_teach or not round.groups:
        return teacher_outputs(round, teachers(candidate, round), batch=batch, rows=rows).logits
    for asked_batch, asked_rows, known in round.shared.get("teachers", ()):
        if asked_batch == batch and (asked_rows is rows or (rows is not None and torch.equal(asked_rows, rows))):
            return torch.as_tensor(known)
    each = [teacher_outputs(part, part.uploads.weights, batch=batch, rows=rows).logits for part in teaching(round)]
    logits = torch.cat(each)
    round.shared.setdefault("teachers", []).append((batch, rows, logits))
    return logits


def parameter_noise(like: Tensor, count: int, seed: int) -> Tensor:
    """(count, ...) of N(0, 1), drawn where the models are: a GPU draws other numbers than a CPU."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    generator = torch_generator(seed, like.device)
    return torch.randn(count, *like.shape, generator=generator, device=like.device, dtype=dtype).to(like)


def gaussian_samples(candidate: Weights, round: Round, *, count: int) -> Weights:
    """`count` models w ~ N(mu, diag v), mu = sum_k p_k w_k, v = sum_k p_k (w_k - mu)^2; buffers are the candidate's."""
    share = shares(round.uploads, round.weighting)

    def draw(name: str, stacked: Tensor) -> Tensor:
        weight = share.to(stacked).reshape(-1, *[1] * (stacked.dim() - 1))
        mean = (weight * stacked).sum(0)
        spread = (weight * (stacked - mean).square()).sum(0).sqrt()
        return mean + spread * parameter_noise(mean, count, seed_for(round.seed, "gaussian", name))

    return sampled({name: draw(name, leaf) for name, leaf in round.uploads.weights.params.items()}, candidate, count)


def dirichlet_samples(candidate: Weights, round: Round, *, count: int, alpha: float = 1.0) -> Weights:
    """`count` models sum_k g_k p_k w_k / sum_j g_j p_j with g ~ Dir(alpha 1); buffers are the candidate's."""
    share = shares(round.uploads, round.weighting)
    generator, shape = numpy_generator(seed_for(round.seed, "dirichlet")), (count, len(share))
    # ln Gamma(alpha) = ln Gamma(alpha + 1) + ln U / alpha: a small alpha's own draws are all 0 in floating point
    logs = np.log(generator.standard_gamma(alpha + 1.0, shape)) + np.log1p(-generator.random(shape)) / alpha
    mix = torch.softmax(torch.from_numpy(logs).to(share) + share.log(), dim=1)

    def blend(stacked: Tensor) -> Tensor:
        blended: Tensor = torch.tensordot(mix.to(stacked), stacked, dims=1)
        return blended

    return sampled({name: blend(leaf) for name, leaf in round.uploads.weights.params.items()}, candidate, count)


def sampled(params: Params, candidate: Weights, count: int) -> Weights:
    """Drawn parameters (count, ...) as stacked models with the buffers of the candidate."""
    return Weights(params, {name: leaf.expand(count, *leaf.shape) for name, leaf in candidate.buffers.items()})
