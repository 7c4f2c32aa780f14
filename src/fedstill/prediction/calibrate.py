"""Confidence that means what it says: one temperature, fitted on labels, and how well it holds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Seed
from fedstill.loop.evaluate import BINS, calibration_error

FEWEST_ROWS = 20  # a temperature from fewer labels says more about these than about the model
COLDEST, HOTTEST = 1e-3, 1e3
HALVINGS = 60  # of ln(HOTTEST / COLDEST): to the last bit of a float64


def log_scores(probabilities: Tensor) -> Tensor:
    """Scores (n, K) in float64 whose softmax are the probabilities."""
    return probabilities.double().clamp_min(torch.finfo(torch.float64).tiny).log()


def at_temperature(scores: Tensor, temperature: float) -> Tensor:
    """softmax(z / T) in float64; the most probable class of a row stays the same.

    >>> [round(p, 4) for p in at_temperature(torch.tensor([[2.0, 0.0]]), 2.0)[0].tolist()]
    [0.7311, 0.2689]
    """
    return torch.softmax(scores.double() / temperature, dim=1)


def fit_temperature(scores: Tensor, y: Tensor) -> float | None:
    """The T > 0 that makes the labels most probable (Guo et al., ICML 2017); None when no finite T does.

        T = argmin_T -mean_i ln softmax(z_i / T)[y_i]

    The mean is convex in b = 1 / T with the slope mean_i (sum_c p_c z_c - z_y), whose zero is found by halving.
    There is none when every answer is right (T -> 0) or when the scores say nothing about the labels (T -> inf).
    """
    if len(scores) != len(y) or not len(y):
        raise FedstillError(f"a temperature needs scores and as many labels, got {len(scores)} and {len(y)}")
    centred = scores.double() - scores.double().mean(dim=1, keepdim=True)
    told = centred.gather(1, y.to(centred.device).unsqueeze(1)).mean()

    def slope(temperature: float) -> float:
        expected = (torch.softmax(centred / temperature, dim=1) * centred).sum(dim=1).mean()
        return float(expected - told)

    if slope(COLDEST) <= 0 or slope(HOTTEST) >= 0:
        return None
    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class Calibration:
    """One temperature for all answers; without one, `why` says so in words."""

    temperature: float | None
    why: str
    fitted_on: str | None = None
    rows: int = 0


def calibrate(scores: Tensor, y: Tensor, where: str) -> Calibration:
    """The temperature of some labeled rows (`where` names them), if they suffice."""
    if len(y) < FEWEST_ROWS:
        told = f"not calibrated: {where} has {len(y)} labeled rows, at least {FEWEST_ROWS} are needed"
        return Calibration(None, told, where, len(y))
    temperature = fit_temperature(scores, y)
    if temperature is None:
        told = f"not calibrated: no temperature fits {where} (all answers right, or no better than chance)"
        return Calibration(None, told, where, len(y))
    return Calibration(temperature, f"temperature {temperature:.3f}, fitted on {where} ({len(y)} rows)", where, len(y))


def cross_fitted(scores: Tensor, y: Tensor, *, seed: Seed) -> Tensor:
    """Probabilities (n, K) of labelled rows, each at a temperature that the other half of them chose.

    Where a half has no temperature, the rows of the other one stay as they are.
    """
    order = torch.from_numpy(numpy_generator(seed_for(seed, "calibration")).permutation(len(y)))
    halves = order[: len(y) // 2], order[len(y) // 2 :]
    probabilities = torch.empty(scores.shape, dtype=torch.float64)
    for mine, others in (halves, halves[::-1]):
        temperature = fit_temperature(scores[others], y[others])
        probabilities[mine] = at_temperature(scores[mine], 1.0 if temperature is None else temperature)
    return probabilities


@dataclass(frozen=True)
class ReliabilityBin:
    """Rows whose confidence is in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float  # their mean
    accuracy: float


@dataclass(frozen=True)
class Reliability:
    """How often answers of a confidence are right: the bins that hold rows, and their mean gap (ECE)."""

    rows: int
    accuracy: float
    confidence: float
    ece: float
    bins: tuple[ReliabilityBin, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def reliability(probabilities: Tensor, y: Tensor, bins: int = BINS) -> Reliability:
    """Answers (n, K) against labels (n,), in equal bins of confidence (those of evaluate.calibration_error)."""
    confidence, answer = probabilities.double().max(dim=1)
    correct = (answer == y.to(answer.device)).double()
    which = (confidence * bins).ceil().sub(1).clamp(0, bins - 1).long()
    counts, sure, right = (
        torch.bincount(which, weights, minlength=bins).tolist()
        for weights in (torch.ones_like(confidence), confidence, correct)
    )
    filled = tuple(
        ReliabilityBin(b / bins, (b + 1) / bins, int(counts[b]), sure[b] / counts[b], right[b] / counts[b])
        for b in range(bins)
        if counts[b]
    )
    error = float(calibration_error(confidence, correct, bins))
    return Reliability(len(y), float(correct.mean()), float(confidence.mean()), error, filled)
