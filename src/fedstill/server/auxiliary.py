"""The unlabeled set in two disjoint parts: rows that are distilled on, and rows that clients compare theirs with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Preparation, Seed


def split_rows(count: int, share: float, seed: Seed) -> Tensor:
    """(M,) bool: floor(share M) rows at random are distilled on; the others are FedAUX's negatives.

    One permutation, a function of the run's seed alone, so that every method and phase of a run has the same parts.

    >>> int(split_rows(13, 0.8, seed=1).sum())
    10
    """
    rows = numpy_generator(seed_for(seed, "auxiliary")).permutation(count)
    chosen = np.zeros(count, dtype=bool)
    chosen[rows[: math.floor(share * count + 1e-9)]] = True  # 0.29 of 100 are 29 rows, whatever 0.29 is in binary
    return torch.from_numpy(chosen)


def distilled_rows(preparation: Preparation, share: float) -> Tensor:
    """`split_rows` of the run's own unlabeled set; both parts hold at least one row."""
    assert preparation.unlabeled is not None  # declared as a need
    chosen = split_rows(len(preparation.unlabeled), share, preparation.run_seed)
    if not 0 < int(chosen.sum()) < len(chosen):
        raise FedstillError(
            f"algorithm.distill_share = {share} leaves one part of the {len(chosen)} unlabeled rows empty: "
            "give more rows in data.unlabeled, or another share"
        )
    return chosen
