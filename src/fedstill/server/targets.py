"""What refines targets (M, K) before the student sees them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.server.pools import full_precision

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


def smooth_over_rounds(new: Tensor, old: Tensor | None, share: float) -> Tensor:
    """(1 - share) new + share old; the first time, what is new."""
    return new if old is None else (1.0 - share) * new + share * old.to(new)
