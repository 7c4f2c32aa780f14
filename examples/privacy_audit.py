"""Does a mechanism keep its promise? An empirical test that can refute an (epsilon, delta), never prove it.

`audit` draws the release many times from each of two neighbouring datasets, projects it on the direction that tells
them apart best, and counts how often a threshold is right. Differential privacy bounds both rates for every threshold:

    TPR <= e^epsilon FPR + delta,    1 - FPR <= e^epsilon (1 - TPR) + delta,    and so
    TPR - FPR <= (e^epsilon - 1 + 2 delta) / (e^epsilon + 1)

    noise = np.random.default_rng(0).normal(size=(2, 10_000))
    sigma = fedstill.privacy.analytic_gaussian_multiplier(epsilon=1.0, delta=1e-5)
    result = audit(lambda i: 1.0 + sigma * noise[0, i], lambda i: sigma * noise[1, i], epsilon=1.0, delta=1e-5)
    assert result.holds and result.epsilon_at_least <= 1.0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from fedstill.core.errors import FedstillError

Mechanism = Callable[[int], np.ndarray]  # number of the draw -> the release: a number or a vector
THRESHOLDS = 200


@dataclass(frozen=True)
class Audit:
    """The advantage and the epsilon that were observed, with confidence bounds, beside the claim."""

    epsilon: float  # claimed
    delta: float
    advantage: float  # TPR - FPR at the best threshold, on draws that did not choose it
    advantage_at_least: float  # with the chosen confidence
    advantage_allowed: float  # the most that the claim allows
    epsilon_at_least: float  # with the same confidence, by Clopper-Pearson; 0 if the draws rule out nothing

    @property
    def holds(self) -> bool:
        """Whether no observation contradicts the claim."""
        return self.advantage_at_least <= self.advantage_allowed and self.epsilon_at_least <= self.epsilon


def audit(
    release: Mechanism,
    neighbour: Mechanism,
    epsilon: float,
    delta: float,
    *,
    draws: int = 10_000,
    confidence: float = 0.999,
    direction: np.ndarray | None = None,
) -> Audit:
    """Try to tell a mechanism on one dataset from the same mechanism on a neighbour.

    release, neighbour: the release from each dataset as a function of the draw's number. Draws must be independent.
    direction: vectors are projected on it; by default the difference of the means of the first half of the draws. The
    threshold is chosen on the first half, too. The result is from the second half alone.
    """
    if draws < 100:
        raise FedstillError(f"audit: {draws} draws show nothing: use at least 100")
    ours, theirs = (np.stack([np.atleast_1d(make(i)).ravel() for i in range(draws)]) for make in (release, neighbour))
    half = draws // 2
    if direction is None:
        direction = ours[:half].mean(0) - theirs[:half].mean(0)
    length = float(np.linalg.norm(direction))
    axis = np.asarray(direction, float).ravel() / (length if length > 0 else 1.0)
    ours, theirs = ours @ axis, theirs @ axis
    grid = np.quantile(np.concatenate([ours[:half], theirs[:half]]), np.linspace(0, 1, THRESHOLDS))
    best = max(grid, key=lambda bound: _advantage(ours[:half], theirs[:half], bound))
    edge = max(grid, key=lambda bound: _shown(ours[:half], theirs[:half], bound, delta, confidence))
    seen = _advantage(ours[half:], theirs[half:], best)
    slack = math.sqrt(math.log(2 / (1 - confidence)) / (2 * (draws - half)))  # Hoeffding, for each of both rates
    return Audit(
        epsilon,
        delta,
        advantage=seen,
        advantage_at_least=max(0.0, seen - 2 * slack),
        advantage_allowed=allowed_advantage(epsilon, delta),
        epsilon_at_least=_shown(ours[half:], theirs[half:], edge, delta, confidence),
    )


def allowed_advantage(epsilon: float, delta: float) -> float:
    """Return the largest TPR - FPR of any test against an (epsilon, delta)-private mechanism.

    >>> allowed_advantage(0.0, 1e-5) == 1e-5, allowed_advantage(800.0, 0.0)
    (True, 1.0)
    """
    return min(1.0, math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, 700.0))))


def _advantage(ours: np.ndarray, theirs: np.ndarray, bound: float) -> float:
    return float((ours >= bound).mean() - (theirs >= bound).mean())


def _shown(ours: np.ndarray, theirs: np.ndarray, bound: float, delta: float, confidence: float) -> float:
    """Return the largest epsilon that the counts at a threshold rule out, from either side (Clopper-Pearson)."""
    alpha, count = (1 - confidence) / 4, len(ours)  # two rates, two sides
    above = int((ours >= bound).sum()), int((theirs >= bound).sum())
    below = count - above[1], count - above[0]
    return max(0.0, *(_log_ratio(right, wrong, count, delta, alpha) for right, wrong in (above, below)))


def _log_ratio(right: int, wrong: int, count: int, delta: float, alpha: float) -> float:
    """Return ln((TPR - delta) / FPR) with TPR as low and FPR as high as is believable."""
    low = float(betaincinv(right, count - right + 1, alpha)) if right else 0.0
    high = float(betaincinv(wrong + 1, count - wrong, 1 - alpha)) if wrong < count else 1.0
    return math.log((low - delta) / high) if low > delta else 0.0
