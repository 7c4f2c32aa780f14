"""How teachers' outputs (T, M, K) become one belief (M, K), each way a small function."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedstill.core.types import Targets

Pool = Literal["logits", "probabilities"]


def full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def pool_targets(
    logits: Tensor, pool: Pool = "logits", *, temperature: float = 1.0, share: Tensor | None = None
) -> Tensor:
    """Soft targets (M, K) of an ensemble (T, M, K); `share` (T,) or (T, M) sums to 1 over T, uniform by default.

        logits:        softmax(sum_t share_t z_t / temperature)      (AvgLogit)
        probabilities: sum_t share_t softmax(z_t / temperature)      (AvgProb)

    >>> ensemble = torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]])
    >>> [round(p, 4) for p in pool_targets(ensemble)[0].tolist()]
    [0.2689, 0.7311]
    >>> [round(p, 4) for p in pool_targets(ensemble, "probabilities")[0].tolist()]
    [0.4494, 0.5506]
    """
    scores = full_precision(logits) / temperature
    members = scores if pool == "logits" else torch.softmax(scores, dim=-1)
    pooled = mix(members, share)
    return torch.softmax(pooled, dim=-1) if pool == "logits" else pooled


def mix(members: Tensor, share: Tensor | None = None) -> Tensor:
    """sum_t share_t members_t: (T, M, K) -> (M, K)."""
    count = len(members)
    weight = members.new_full((count,), 1.0 / count) if share is None else share.to(members)
    return (members * weight.reshape(count, -1, 1)).sum(0)


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
