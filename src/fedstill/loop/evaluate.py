"""How good a model is: for everybody, for each class, for each client, and whether its confidence is earned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.trainer import Trainer
from fedstill.core.types import Federation, Weights

BINS = 15


@dataclass(frozen=True)
class Exam:
    """The questions, on the device: test set and what each client's label distribution is."""

    x: Tensor  # (n, ...) storage form
    y: Tensor  # (n,)
    class_sizes: Tensor  # (K,) float64, test samples of each class
    shares: Tensor  # (clients, K) float32, rows sum to 1 over the classes that are tested
    batch: int | None = None  # answered in train mode, so many questions at a time; None: in eval mode


def label_counts(federation: Federation) -> Tensor:
    """(N, K) float32: how many samples of each class each client holds."""
    classes, population = len(federation.train.classes), federation.population
    sizes = federation.offsets.diff().cpu()
    client = torch.repeat_interleave(torch.arange(population), sizes)
    labels = federation.train.y.cpu()[federation.indices.cpu()]
    flat = torch.bincount(client * classes + labels, minlength=population * classes)
    return flat.reshape(population, classes).float()


def make_exam(federation: Federation, device: torch.device | str, counts: Tensor | None = None) -> Exam:
    """Put all that evaluation needs on the device, once a run. `counts` is (N, K) of `label_counts`."""
    counts = label_counts(federation) if counts is None else counts.cpu()
    y = federation.test.y.to(device)
    class_sizes = torch.bincount(y.cpu(), minlength=counts.shape[1]).double()
    tested = counts * (class_sizes > 0)
    tested = tested[tested.sum(dim=1) > 0]
    shares = tested / tested.sum(dim=1, keepdim=True)
    return Exam(federation.test.x.to(device), y, class_sizes.to(device), shares.to(device))


def answered_in_train_mode(exam: Exam, batch: int | None) -> Exam:
    """The same questions, `batch` of them at a time, so that BatchNorm goes by them; None: in eval mode."""
    if batch is not None and batch < 1:
        raise FedstillError(f"evaluate_batch = {batch}: use at least 1, or leave it out")
    return replace(exam, batch=batch)


def evaluate(weights: Weights, exam: Exam, trainer: Trainer) -> dict[str, Any]:
    """One look at the global model on the global test set; one host sync.

    accuracy, loss (mean cross-entropy), ece (15 equal bins of confidence: Guo et al., ICML 2017),
    class_accuracy (K numbers, None for a class without test samples), and client_mean and client_worst: the
    *expected* accuracy on each client's own label distribution, sum_c p_k(c) acc_c, with p_k from its
    training labels. It is exact when samples of a class are alike everywhere (label skew) and says nothing
    about feature skew.
    """
    logits = _answers(weights, exam, trainer).float()
    confidence, answer = logits.softmax(dim=1).max(dim=1)
    correct = (answer == exam.y).double()
    hits = torch.zeros_like(exam.class_sizes).index_add_(0, exam.y, correct)
    per_class = hits / exam.class_sizes  # NaN where nothing is tested
    per_client = exam.shares @ per_class.nan_to_num().float()
    numbers = [
        correct.mean(),
        F.cross_entropy(logits, exam.y).double(),
        calibration_error(confidence, correct),
        per_client.mean().double(),
        per_client.min().double(),
    ]
    values = torch.cat([torch.stack(numbers), per_class]).tolist()
    names = ("accuracy", "loss", "ece", "client_mean", "client_worst")
    shown = dict(zip(names, values[: len(names)], strict=True))
    class_accuracy = [value if value == value else None for value in values[len(names) :]]
    return {**shown, "class_accuracy": class_accuracy}


def accuracy(weights: Weights, exam: Exam, trainer: Trainer) -> float:
    """Of a model that is only of passing interest."""
    return float((_answers(weights, exam, trainer).argmax(dim=1) == exam.y).double().mean())


def _answers(weights: Weights, exam: Exam, trainer: Trainer) -> Tensor:
    if exam.batch is None:
        return trainer.outputs(weights, exam.x).logits
    return trainer.outputs(weights, exam.x, batch=exam.batch).logits


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """sum_b |B_b| / n |acc(B_b) - conf(B_b)| over equal bins (b/bins, (b+1)/bins]."""
    which = (confidence * bins).ceil().sub(1).clamp(0, bins - 1)
    member = (which.unsqueeze(0) == torch.arange(bins, device=which.device).unsqueeze(1)).double()  # (bins, n)
    # a product with 0/1 and not a scatter: the same bits in every run on a GPU
    gaps = member @ (correct.double() - confidence.double())
    return gaps.abs().sum() / len(confidence)


class Forgetting:
    """mean_c (best class accuracy so far - class accuracy now) >= 0 (after Lee et al., FedNTD, NeurIPS 2022)."""

    def __init__(self) -> None:
        self._best: dict[int, float] = {}

    def see(self, class_accuracy: list[float | None]) -> float:
        """Take in one evaluation and say how much has been forgotten by now."""
        seen = {c: value for c, value in enumerate(class_accuracy) if value is not None}
        for c, value in seen.items():
            self._best[c] = max(value, self._best.get(c, value))
        return sum(self._best[c] - value for c, value in seen.items()) / max(1, len(seen))
