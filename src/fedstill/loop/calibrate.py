"""Calibrate confidences with one temperature, fitted on labels, and measure how reliable they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from pydantic import TypeAdapter
from torch import Tensor

from fedstill.core.limits import SECTION, Count, CountOrNone, NotNegative, Share, Temperature
from fedstill.loop.evaluate import BINS, calibration_error

CALIBRATION_FILE = "calibration.json"
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
class ReliabilityBin:
    """Rows whose confidence is in (low, high]."""

    __pydantic_config__ = SECTION
    low: Share
    high: Share
    count: Count
    confidence: Share  # their mean
    accuracy: Share


@dataclass(frozen=True)
class Reliability:
    """How often answers of a confidence are right: the bins that hold rows, and their mean gap (ECE)."""

    __pydantic_config__ = SECTION
    rows: Count
    accuracy: Share
    confidence: Share
    ece: NotNegative
    bins: Annotated[tuple[ReliabilityBin, ...], MinLen(1)]


def reliability(probabilities: Tensor, y: Tensor, bins: int = BINS) -> Reliability:
    """Compare answers (n, K) with labels (n,) in equal bins of confidence, the bins of evaluate.calibration_error."""
    confidence, answer = probabilities.double().max(dim=1)
    return reliability_of(confidence, (answer == y.to(answer.device)).double(), bins)


def reliability_of(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Reliability:
    """Compare confidences (n,) in float64 with 1.0 for a right answer and 0.0 for a wrong one."""
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
    return Reliability(len(correct), float(correct.mean()), float(confidence.mean()), error, filled)


@dataclass(frozen=True)
class Calibration:
    """One temperature for all answers; without one, `why` says so in words.

    before, after: how answers hold against the labels of the rows that chose the temperature.
    """

    __pydantic_config__ = SECTION
    temperature: Temperature | None
    why: str
    fitted_on: str | None = None
    rows: CountOrNone = 0
    before: Reliability | None = None
    after: Reliability | None = None


def calibrate(scores: Tensor, y: Tensor, where: str) -> Calibration:
    """Fit the temperature on some labeled rows (`where` names them), if they suffice and if it helps there."""
    y = y.to(scores.device)
    before = reliability(at_temperature(scores, 1.0), y) if len(y) else None
    if before is None or len(y) < FEWEST_ROWS:
        why = f"not calibrated: {where} has {len(y)} labeled rows, at least {FEWEST_ROWS} are needed"
        return Calibration(None, why, where, len(y), before)
    temperature = fit_temperature(scores, y)
    if temperature is None:
        why = f"not calibrated: no temperature fits {where} (all answers right, or no better than chance)"
        return Calibration(None, why, where, len(y), before)
    after = reliability(at_temperature(scores, temperature), y)
    if after.ece >= before.ece:
        why = (
            f"not calibrated: on {where} the temperature {temperature:.3f} would raise the calibration error from "
            f"{before.ece:.1%} to {after.ece:.1%}"
        )
        return Calibration(None, why, where, len(y), before)
    why = f"temperature {temperature:.3f}, fitted on {where} ({len(y)} rows)"
    return Calibration(temperature, why, where, len(y), before, after)


def calibration_from(tree: Mapping[str, Any]) -> Calibration:
    """Return the calibration that `dataclasses.asdict` turned into a dict; other content is a ValueError."""
    return TypeAdapter(Calibration).validate_python(tree)
