"""Other ways to say how sure a client is of a sample, for comparison (FedAUX, Fig. 4); none protects anybody."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.core.types import Seed

OtherScorer = Literal["kde", "isolation_forest", "one_class_svm", "two_class_svm"]
Points = np.ndarray  # (n, F)
LEAST = 1e-30  # of a score, as a part of the largest one for the same sample


def log_scores(scorer: OtherScorer, own: Tensor, negatives: Tensor, asked: Tensor, seed: Seed) -> Tensor:
    """(M,) the logarithm of one client's score for `asked` (M, F), from its `own` features and the public negatives.

    kde:              the density of a Gaussian kernel estimate from its own points
    isolation_forest: 1 - the anomaly score of a forest grown on its own points
    one_class_svm:    sum_j a_j k(x, x_j) / rho: 1 on the border of the region that holds its own points
    two_class_svm:    1 / (1 + exp(-f(x))), f the margin of an RBF machine that parts them from the negatives
    """
    mine, public, wanted = (part.double().cpu().numpy() for part in (own, negatives, asked))
    scored = _SCORERS[scorer](mine, public, wanted, seed % 2**32)
    return torch.from_numpy(scored).to(own.device)


def _kde(own: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    """Bandwidth by Scott's rule, from the client's own spread; at least a thousandth of the public one."""
    from sklearn.neighbors import KernelDensity

    spread = max(np.sqrt(own.var(axis=0).mean()), 1e-3 * np.sqrt(negatives.var(axis=0).mean()), 1e-12)
    width = spread * len(own) ** (-1.0 / (own.shape[1] + 4))
    density: np.ndarray = KernelDensity(bandwidth=float(width)).fit(own).score_samples(asked)
    return density


def _isolation_forest(own: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    from sklearn.ensemble import IsolationForest

    return _log(1.0 + IsolationForest(random_state=seed).fit(own).score_samples(asked))


def _one_class_svm(own: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    from sklearn.svm import OneClassSVM

    machine = OneClassSVM(gamma=_kernel_width(negatives)).fit(own)
    return _log(machine.score_samples(asked) / max(float(machine.offset_[0]), LEAST))


def _two_class_svm(own: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    from sklearn.svm import SVC

    sign = np.r_[np.ones(len(own)), -np.ones(len(negatives))]
    margin = SVC(gamma=_kernel_width(negatives)).fit(np.r_[own, negatives], sign).decision_function(asked)
    logs: np.ndarray = -np.logaddexp(0.0, -margin)
    return logs


def _kernel_width(negatives: Points) -> float:
    """1 / (F var), scikit-learn's "scale", from public data and so the same for all clients."""
    return float(1.0 / max(negatives.shape[1] * negatives.var(), 1e-12))


def _log(scores: np.ndarray) -> np.ndarray:
    logs: np.ndarray = np.log(np.maximum(scores, LEAST))
    return logs


_SCORERS: dict[OtherScorer, Callable[[Points, Points, Points, int], np.ndarray]] = {
    "kde": _kde,
    "isolation_forest": _isolation_forest,
    "one_class_svm": _one_class_svm,
    "two_class_svm": _two_class_svm,
}


def relative(logs: Tensor) -> Tensor:
    """(A, M) scores as parts of the largest for the same sample: densities in many dimensions have no other scale."""
    return (logs - logs.amax(dim=0, keepdim=True)).exp().clamp_min(LEAST)


def comparable(logs: list[Tensor]) -> list[Tensor]:
    """Log-densities (A_g, M) of the clients of each prototype, which live in spaces of different dimension.

    For every sample a prototype's densities have mean 1: its clients share as if they were alone, and all of them
    together count by their number. One prototype stays as it is, bit for bit.
    """
    if len(logs) == 1:
        return logs
    return [own - (own.logsumexp(dim=0) - math.log(max(len(own), 1))) for own in logs]
