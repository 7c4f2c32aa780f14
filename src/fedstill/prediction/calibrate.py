"""Calibrate confidences with one temperature, fitted on labels, and measure how reliable they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.loop.evaluate import BINS, calibration_error

FEWEST_ROWS = 20  # a temperature from fewer labels says more about these than about the model
COLDEST, HOTTEST = 1e-3, 1e3
HALVINGS = 60  # of ln(HOTTEST / COLDEST): to the last bit of a float64


def log_scores(probabilities: Tensor) -> Tensor:
    """Return scores (n, K) in float64 whose softmax are the probabilities."""
    return probabilities.double().clamp_min(torch.finfo(torch.float64).tiny).log()


def at_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Return softmax(z / T) in float64; the most probable class of a row stays the same.

    >>> [round(p, 4) for p in at_temperature(torch.tensor([[2.0, 0.0]]), 2.0)[0].tolist()]
    [0.7311, 0.2689]
    """
    return torch.softmax(scores.double() / temperature, dim=1)


def fit_temperature(scores: Tensor, y: Tensor) -> float | None:
    """Return the T > 0 that makes the labels most probable (Guo et al., ICML 2017); None when no finite T does.

        T = argmin_T -mean_i ln softmax(z_i / T)[y_i]

    The mean is convex in b = 1 / T with the slope mean_i (sum_c p_c z_c - z_y), whose zero is found by halving.
    There is none when every answer is right (T -> 0) or when the scores say nothing about the labels (T -> inf).
    """
    centred = scores.double() - scores.double().mean(dim=1, keepdim=True)
    labelled = centred.gather(1, y.to(centred.device).unsqueeze(1)).mean()

    def slope(temperature: float) -> float:
        expected = (torch.softmax(centred / temperature, dim=1) * centred).sum(dim=1).mean()
        return float(expected - labelled)

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
    """Fit the temperature on labeled rows, which `where` names, if they are enough."""
    temperature = fit_temperature(scores, y) if len(y) >= FEWEST_ROWS else None
    if len(y) < FEWEST_ROWS:
        why = f"not calibrated: {where} has {len(y)} labeled rows, at least {FEWEST_ROWS} are needed"
    elif temperature is None:
        why = f"not calibrated: no temperature fits {where} (all answers right, or no better than chance)"
    else:
        why = f"temperature {temperature:.3f}, fitted on {where} ({len(y)} rows)"
    return Calibration(temperature, why, where, len(y))


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


def reliability(probabilities: Tensor, y: Tensor, bins: int = BINS) -> Reliability:
    """Compare answers (n, K) with labels (n,) in equal bins of confidence, the bins of evaluate.calibration_error."""
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
