"""What every method with a generator on the server shares: labels to ask for, class weights, noise, diversity.

A generator is a Model that reads (B, d + K), noise beside a one-hot class, and whose logits are the samples that it
invents, flat: (B, number of values). Make one with models.generators.build_generator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import normal, numpy_generator, seed_for, to_signed
from fedstill.core.types import Model, Round, Seed

GeneratorFor = Callable[[Model], Model]  # the generator that invents samples (or features) for a run's model


def label_counts(round: Round) -> Tensor:
    """(C, K) of the cohort, at least 0: counts with noise on them may be negative."""
    counts = round.uploads.label_counts
    assert counts is not None, "the step declares Need.LABEL_COUNTS_UPLOADED"
    return counts.clamp_min(0.0)


def class_shares(counts: Tensor) -> Tensor:
    """alpha_k^y = n_k^y / (n^y + 1e-6), n^y = sum_j n_j^y: how much client k counts for class y; (C, K).

    0 for a class that nobody of the cohort has.
    """
    return counts / (counts.sum(0) + 1e-6)


def quota_labels(counts: Tensor, total: int, seed: Seed) -> Tensor:
    """`total` labels in the exact proportions of the class counts (K,), shuffled: bounds floor(total cumsum(p)).

    Classes with no sample are never asked for; with no sample at all every class is as likely.
    """
    share = counts.double().cpu().numpy()
    share = share if share.sum() > 0 else np.ones_like(share)
    bounds = np.floor(np.cumsum(share) / share.sum() * total + 1e-9).astype(np.int64)
    bounds[np.flatnonzero(share)[-1] :] = total
    labels = np.repeat(np.arange(len(share)), np.diff(bounds, prepend=0))
    return torch.from_numpy(numpy_generator(seed).permutation(labels)).to(counts.device)


def gaussian_noise(seed: Seed, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """N(0, 1), the same on every device."""
    drawn = normal(torch.tensor(to_signed(seed_for(seed, "noise")), device=like.device), shape)
    return drawn.to(like.dtype)


def asked_for(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """(..., d + K): noise z (..., d) beside one-hot classes y (...)."""
    kinds = torch.arange(classes, device=y.device)
    return torch.cat([z, (y.unsqueeze(-1) == kinds).to(z.dtype)], dim=-1)


def diversity(x: Tensor, z: Tensor) -> Tensor:
    """exp(-mean_{i, j} d_z(i, j) d_x(i, j)), d_z the mean square and d_x the mean absolute difference of two rows.

    1 when all samples are equal. FedFTG prints 2-norms, not means: with 3 x 32 x 32 pixels that is 0 in float32.
    """
    flat = x.flatten(1)
    apart_z = (z.unsqueeze(0) - z.unsqueeze(1)).square().mean(-1)
    apart_x = torch.stack([(flat - row).abs().mean(-1) for row in flat.unbind()])
    return torch.exp(-(apart_z * apart_x).mean())
