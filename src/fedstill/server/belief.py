"""What teachers say together: how much each of them counts, and soft or hard targets from their outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.types import Need, Round, Targets, Tree
from fedstill.server.average import shares
from fedstill.server.distill import PoolStep, TeacherShares
from fedstill.server.migrate import Rule
from fedstill.server.pools import Pool, full_precision, maximum_rule, mean_rule, pool_targets
from fedstill.server.targets import sharpen
from fedstill.server.teachers import teaching

Labels = Literal["soft", "hard"]
TeacherWeighting = Literal["uniform", "size", "validation", "drop_worst"]
USEFUL = 1.2  # times the accuracy of guessing: a teacher below it is of no use (FedDF's released code)
OUTLIER = 1.5  # standard deviations below the mean of the others


def soft_belief(pool: Pool = "logits", *, temperature: float = 1.0, exponent: float = 1.0) -> PoolStep:
    """The teachers' outputs, pooled, and the pooled probabilities to a power: p_c^exponent / sum_j p_j^exponent."""
    pooled = partial(pool_targets, pool=pool, temperature=temperature)
    if exponent == 1.0:
        return pooled

    def believe(logits: Tensor, share: Tensor | None = None) -> Tensor:
        return sharpen(pooled(logits, share=share), 1.0 / exponent)

    return believe


def hard_belief(rule: Rule = "max", *, threshold: float = 0.75) -> PoolStep:
    """Labels of the surest teacher ("max") or of the mean of all ("mean"), where that is at least `threshold` sure."""
    decide = maximum_rule if rule == "max" else mean_rule

    def believe(logits: Tensor) -> Targets:
        return decide(torch.softmax(full_precision(logits), dim=-1), threshold)

    return believe


def teacher_shares(weighting: TeacherWeighting) -> TeacherShares | None:
    """How much each upload counts as a teacher; None is all alike.

    size: n_k / sum_j n_j. validation: by accuracy on the validation set, 0 for those no better than a guess.
    drop_worst: all alike, without those; if there are none, without outliers far below the others.
    """
    if weighting == "uniform":
        return None
    if weighting == "size":
        return TeacherShares(_by_size)
    judge = shares_by_accuracy if weighting == "validation" else shares_without_worst
    return TeacherShares(partial(_examined, judge), frozenset({Need.VALIDATION}))


def _by_size(round: Round, state: Tree) -> Tensor:
    return shares(round.uploads._replace(size=torch.cat([part.uploads.size for part in teaching(round)])), "size")


def _examined(judge: Callable[[Tensor, int], Tensor], round: Round, state: Tree) -> Tensor:
    assert round.validation is not None  # declared as a need
    x, y = round.validation
    said = [part.trainer.outputs(part.uploads.weights, x, stacked=True, features=False) for part in teaching(round)]
    logits = torch.cat([output.logits for output in said])
    share = judge((logits.argmax(-1) == y.to(logits.device)).double().mean(1), logits.shape[-1])
    round.metrics["teachers_kept"] = float((share > 0).sum())
    return share


def shares_by_accuracy(accuracy: Tensor, classes: int) -> Tensor:
    """accuracy_t / sum of those that are of use; all alike when none is.

    >>> [round(s, 3) for s in shares_by_accuracy(torch.tensor([0.6, 0.3, 0.05]), 10).tolist()]
    [0.667, 0.333, 0.0]
    """
    counted = torch.where(accuracy >= USEFUL / classes, accuracy, 0.0)
    return counted / counted.sum() if bool(counted.any()) else torch.full_like(accuracy, 1.0 / len(accuracy))


def shares_without_worst(accuracy: Tensor, classes: int) -> Tensor:
    """All alike, without teachers of no use; if there are none, without those below mean - 1.5 std of the others.

    The others are all but one of the best; the standard deviation is that of a population.

    >>> shares_without_worst(torch.tensor([0.5, 0.05, 0.25]), 10).tolist()
    [0.5, 0.0, 0.5]
    """
    kept = accuracy >= USEFUL / classes
    if bool(kept.all()) and len(accuracy) > 1:
        others = accuracy.sort().values[:-1]
        bound = others.mean() - OUTLIER * others.std(correction=0)
        kept = accuracy >= bound - 1e-9  # equals are no outliers, however their mean rounds
    if not bool(kept.any()):
        kept = torch.ones_like(kept)
    return kept.to(accuracy.dtype) / kept.sum()
