"""How teachers' outputs (T, M, K) become one belief (M, K), each way a small function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.tree import full_precision
from fedstill.core.types import Need, Round, Targets, Tree, Weights, nothing
from fedstill.server.aggregate import shares
from fedstill.server.distill.teachers import teaching

Pool = Literal["logits", "probabilities", "median", "trimmed", "vote"]
TRIM = 0.2  # of the teachers' weight that "trimmed" leaves out at either end


def pool_targets(
    logits: Tensor, pool: Pool = "logits", *, temperature: float = 1.0, share: Tensor | None = None
) -> Tensor:
    """Soft targets (M, K) of an ensemble (T, M, K); `share` (T,) or (T, M) sums to 1 over T, uniform by default.

        logits:        softmax(sum_t share_t z_t / temperature)      (AvgLogit)
        probabilities: sum_t share_t softmax(z_t / temperature)      (AvgProb)
        median:        softmax(median_t (z_t - mean_c z_tc) / temperature)
        trimmed:       the same, with the mean without a fifth of the teachers at either end in place of the median
        vote:          sum_t share_t [c is the class that t names]

    With the last three no minority of teachers, counted by share, can take a sample wherever it wants.

    >>> ensemble = torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]])
    >>> [round(p, 4) for p in pool_targets(ensemble)[0].tolist()]
    [0.2689, 0.7311]
    >>> [round(p, 4) for p in pool_targets(ensemble, "probabilities")[0].tolist()]
    [0.4494, 0.5506]
    """
    scores = full_precision(logits) / temperature
    if pool == "vote":
        return mix(torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0), share)
    if pool in ("median", "trimmed"):
        level = scores - scores.mean(dim=-1, keepdim=True)  # a teacher that adds a number to all logits says the same
        return torch.softmax(median(level, share) if pool == "median" else trimmed(level, share), dim=-1)
    members = scores if pool == "logits" else torch.softmax(scores, dim=-1)
    pooled = mix(members, share)
    return torch.softmax(pooled, dim=-1) if pool == "logits" else pooled


def mix(members: Tensor, share: Tensor | None = None) -> Tensor:
    """sum_t share_t members_t: (T, M, K) -> (M, K)."""
    count = len(members)
    weight = members.new_full((count,), 1.0 / count) if share is None else share.to(members)
    return (members * weight.reshape(count, -1, 1)).sum(0)


def median(members: Tensor, share: Tensor | None = None) -> Tensor:
    """Return the weighted median over teachers of each number, (T, M, K) -> (M, K); between two the mean of them.

    >>> median(torch.tensor([1.0, 2.0, 3.0, 50.0]).reshape(4, 1, 1)).item()
    2.5
    >>> median(torch.tensor([1.0, 2.0, 3.0, 50.0]).reshape(4, 1, 1), torch.tensor([0.6, 0.2, 0.1, 0.1])).item()
    1.0
    """
    ordered, _, above = _sorted(members, share)
    low = (above < 0.5 - HALF).sum(dim=0, keepdim=True)
    high = (above <= 0.5 + HALF).sum(dim=0, keepdim=True).clamp_max(len(members) - 1)
    return (ordered.gather(0, low) + ordered.gather(0, high))[0] / 2


def trimmed(members: Tensor, share: Tensor | None = None, *, trim: float = TRIM) -> Tensor:
    """Return the mean over teachers of each number, without the part `trim` of their weight at either end.

    A teacher at a cut counts by the part of its weight that is inside.

    >>> trimmed(torch.tensor([1.0, 2.0, 4.0, 50.0]).reshape(4, 1, 1), trim=0.25).item()
    3.0
    """
    ordered, below, above = _sorted(members, share)
    inside = (above.clamp_max(1.0 - trim) - below.clamp_min(trim)).clamp_min(0.0)
    return (ordered * (inside / inside.sum(dim=0)).to(ordered)).sum(dim=0)


HALF = 1e-9  # rounding of a sum of shares in float64


def _sorted(members: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers in order, and the weight (float64) below each and up to each."""
    count = len(members)
    weight = members.new_full((count,), 1.0 / count, dtype=torch.float64) if share is None else share.double()
    ordered, place = members.sort(dim=0)
    weight = (weight / weight.sum(dim=0)).reshape(count, -1, 1).expand_as(members).gather(0, place)
    above = weight.cumsum(0)
    return ordered, above - weight, above


def capped(share: Tensor, cap: float | None) -> Tensor:
    """Return shares (T,) or (T, M) of which none is above cap / T; what is above goes to the others in proportion.

    >>> capped(torch.tensor([0.75, 0.125, 0.125]), 1.5).tolist()
    [0.5, 0.25, 0.25]
    """
    if cap is None:
        return share
    most = max(cap, 1.0) / len(share)
    full = torch.zeros_like(share, dtype=torch.bool)
    for _ in range(len(share)):
        over = (share > most * (1.0 + 1e-9)) & ~full
        if not bool(over.any()):
            break
        full = full | over
        left = 1.0 - most * full.sum(dim=0)
        others = torch.where(full, 0.0, share)
        total = others.sum(dim=0)
        even = (~full).to(share) / (~full).sum(dim=0).clamp_min(1)
        scaled = torch.where(total > 0, others / total.clamp_min(torch.finfo(share.dtype).tiny), even) * left
        share = torch.where(full, most, scaled)
    return share


def standardised(logits: Tensor, sharpness: float = 4.0) -> Tensor:
    """softmax(sharpness z_t / std_t), std_t one number over all M K logits of teacher t: (T, M, K).

    A teacher's scale no longer counts (MrTF, stabilised teachers). Constant logits give the uniform distribution.
    """
    scores = full_precision(logits)
    spread = scores.flatten(1).std(dim=1).nan_to_num(0.0)
    below_best = scores - scores.amax(dim=-1, keepdim=True)  # before the division, which would cost their last digits
    tiny = torch.finfo(scores.dtype).tiny ** 0.5
    return torch.softmax(sharpness * below_best / spread.clamp_min(tiny).reshape(-1, 1, 1), dim=-1)


def entropy(probabilities: Tensor) -> Tensor:
    """-sum_c q_c ln q_c over the last dimension."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def confident_share(probabilities: Tensor) -> Tensor:
    """(T, M) a teacher's share for each sample: softmax over teachers of -entropy."""
    return torch.softmax(-entropy(probabilities), dim=0)


def maximum_rule(probabilities: Tensor, threshold: float) -> Targets:
    """The class that the surest teacher names, kept where it is at least `threshold` sure (D2C-FL).

    Ties go to the first teacher and the lowest class.
    """
    sure, label = probabilities.max(dim=-1)  # (T, M)
    return surest_label(label, sure, threshold, probabilities.shape[-1])


def surest_label(label: Tensor, sure: Tensor, threshold: float, classes: int) -> Targets:
    """The maximum rule on what is left of each teacher (T, M): the class it names and the probability of that."""
    best, who = sure.max(dim=0)
    return hard_targets(label.gather(0, who.unsqueeze(0))[0], best >= threshold, classes, best)


def mean_rule(probabilities: Tensor, threshold: float) -> Targets:
    """The class of the mean of the teachers' probabilities, kept where that is at least `threshold`.

    Whatever it keeps, the maximum rule keeps: rounding may not lift a mean above what it is the mean of.
    """
    best, label = torch.minimum(probabilities.mean(dim=0), probabilities.amax(dim=0)).max(dim=-1)
    return hard_targets(label, best >= threshold, probabilities.shape[-1], best)


def hard_targets(label: Tensor, kept: Tensor, classes: int, confidence: Tensor | None = None) -> Targets:
    """One-hot targets; with a confidence, the rest of the probability is spread over the other classes.

    The label stays the most probable class, even where rounding would lift the others to it (an even guess).
    """
    sure = torch.ones(len(label), device=label.device) if confidence is None else full_precision(confidence)
    below = torch.nextafter(sure, torch.zeros_like(sure))
    rest = torch.minimum((1.0 - sure) / max(classes - 1, 1), below)
    spread = rest.unsqueeze(1).expand(-1, classes)
    return Targets(spread.scatter(1, label.unsqueeze(1), sure.unsqueeze(1)), kept)


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
    outputs = [part.trainer.outputs(part.uploads.weights, x, stacked=True, features=False) for part in teaching(round)]
    logits = torch.cat([output.logits for output in outputs])
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


EMPTY = 1e-6  # a class with less mass than this has no centre


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """p_c^(1 / temperature), normalised: below 1 sharper, above 1 flatter, 1 as it is; 0 stays 0."""
    return torch.softmax(probabilities.log() / temperature, dim=-1)


def cluster_labels(probabilities: Tensor, features: Tensor, sharpness: float = 4.0) -> Tensor:
    """Label refinery by clusters (MrTF): a sample is what its features are near to.

        v_c = sum_x q_c(x) h(x) / sum_x q_c(x),    q(x) <- softmax_c(-sharpness (1 - cos(h(x), v_c)))

    A class of nearly no mass has no centre and gets probability 0; features of zero are equally near to all.
    One (K, M) x (M, F) and one (M, F) x (F, K) product: nothing of size M K F.
    """
    belief, points = full_precision(probabilities), full_precision(features.flatten(1))
    mass = belief.sum(0)
    centres = belief.T @ points / mass.clamp_min(EMPTY).unsqueeze(1)
    near = torch.nn.functional.normalize(points, dim=1) @ torch.nn.functional.normalize(centres, dim=1).T
    scores = (-sharpness * (1.0 - near)).masked_fill(mass <= EMPTY, -torch.inf)
    return torch.softmax(scores, dim=1)


Prepare = Callable[[Weights, Tree, Preparation], tuple[Weights, Tree]]
PoolStep = Callable[..., Tensor | Targets]  # logits (T, M, K) (, share=) -> probabilities (M, K), or hard targets


@dataclass(frozen=True)
class TeacherShares:
    """How much each teacher counts, (T,) or (T, M), and what one must look at to know it.

    M are the rows that are distilled on. `init` and `prepare` are those of a step that keeps something: its slots
    stand beside the ones of `distill`, and `of` sees all of them.
    """

    of: Callable[[Round, Tree], Tensor]
    needs: frozenset[Need] = frozenset()
    init: Callable[[Weights], Tree] = nothing
    prepare: Prepare = no_preparation


def agreement(logits: Tensor, targets: Tensor) -> float:
    """How often a teacher (T, M, K) names the ensemble's class: 1 when all agree."""
    return float((logits.argmax(-1) == targets.argmax(-1)).double().mean())


def everything(probabilities: Tensor) -> Targets:
    """Targets that keep every row."""
    return Targets(probabilities, torch.ones(len(probabilities), dtype=torch.bool, device=probabilities.device))


def targets_of(state: Tree) -> Targets | None:
    """The targets a step keeps in its state under "targets"."""
    kept = state.get("targets")
    return None if not kept else Targets(kept["probabilities"], kept["kept"])


def no_targets(_: Weights) -> Tree:
    """The first state of a step that keeps its targets: they come with its first round."""
    return {"targets": {}}


def keep_targets(state: Tree, targets: Targets) -> Tree:
    return {**state, "targets": targets._asdict()}


Rule = Literal["max", "mean"]
