"""How good a model is: for everybody, for each class, for each client, and whether its confidence is earned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.author_mistakes import name_of
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import Trainer
from fedstill.core.types import Federation, Weights

BINS = 15  # of the calibration error


@dataclass(frozen=True)
class TestSet:
    """The test samples on the device, and each client's share of every class."""

    __test__ = False  # pytest: not a class of tests
    x: Tensor  # (n, ...) storage form
    y: Tensor  # (n,)
    class_sizes: Tensor  # (K,) float64, test samples of each class
    shares: Tensor  # (clients, K) float32, rows sum to 1 over the classes that are tested
    federation: Federation  # for an evaluation of one's own, on the clients' data


class Answers(NamedTuple):
    """A model's answers to the test set; a metric is a function of them."""

    logits: Tensor  # (n, K) float32
    confidence: Tensor  # (n,) the largest probability
    correct: Tensor  # (n,) float64, 1 where the most probable class is right
    class_accuracy: Tensor  # (K,) float64, NaN for a class without test samples
    test: TestSet


@dataclass(frozen=True)
class Metric:
    """One number of a round, by the name that it has in metrics.jsonl, in trackers and for `EarlyStop`.

    column: the heading under which comparison tables show the last round's value; empty: not in tables.
    percent: whether tables show it as a percentage.
    """

    of: Callable[[Answers], Tensor] | None  # None: the loop itself notes it
    lower_is_better: bool = False
    column: str = ""
    percent: bool = True


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """sum_b |B_b| / n |acc(B_b) - conf(B_b)| over equal bins (b/bins, (b+1)/bins] (Guo et al., ICML 2017)."""
    which = (confidence * bins).ceil().sub(1).clamp(0, bins - 1)
    member = (which.unsqueeze(0) == torch.arange(bins, device=which.device).unsqueeze(1)).double()  # (bins, n)
    # a product with 0/1 and not a scatter: the same bits in every run on a GPU
    gaps = member @ (correct.double() - confidence.double())
    return gaps.abs().sum() / len(confidence)


def expected_by_client(answers: Answers) -> Tensor:
    """(clients,) the expected accuracy on each client's own label distribution, sum_c p_k(c) acc_c.

    p_k comes from the client's training labels. The number is exact when samples of a class are alike everywhere
    (label skew), and it says nothing about feature skew.
    """
    return answers.test.shares @ answers.class_accuracy.nan_to_num().float()


METRICS: dict[str, Metric] = {
    "accuracy": Metric(lambda answers: answers.correct.mean()),
    "loss": Metric(lambda answers: F.cross_entropy(answers.logits, answers.test.y).double(), lower_is_better=True),
    "ece": Metric(lambda answers: calibration_error(answers.confidence, answers.correct), lower_is_better=True),
    "client_mean": Metric(lambda answers: expected_by_client(answers).mean().double()),
    "client_worst": Metric(lambda answers: expected_by_client(answers).min().double()),
    "train_loss": Metric(None, lower_is_better=True),
    "forgetting": Metric(None, lower_is_better=True),
}


def is_lower_better(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].lower_is_better


def label_counts(federation: Federation) -> Tensor:
    """(N, K) float32: how many samples of each class each client holds."""
    classes, population = len(federation.train.classes), federation.population
    sizes = federation.offsets.diff().cpu()
    client = torch.repeat_interleave(torch.arange(population), sizes)
    labels = federation.train.y.cpu()[federation.indices.cpu()]
    flat = torch.bincount(client * classes + labels, minlength=population * classes)
    return flat.reshape(population, classes).float()


def make_test_set(federation: Federation, device: torch.device | str, counts: Tensor | None = None) -> TestSet:
    """Put everything that an evaluation needs on the device, once a run. `counts` is (N, K) of `label_counts`."""
    counts = label_counts(federation) if counts is None else counts.cpu()
    y = federation.test.y.to(device)
    class_sizes = torch.bincount(y.cpu(), minlength=counts.shape[1]).double()
    tested = counts * (class_sizes > 0)
    tested = tested[tested.sum(dim=1) > 0]
    shares = tested / tested.sum(dim=1, keepdim=True)
    return TestSet(federation.test.x.to(device), y, class_sizes.to(device), shares.to(device), federation)


Evaluate = Callable[[Weights, TestSet, Trainer], dict[str, Any]]  # -> the row's metrics, "accuracy" among them


def global_test(weights: Weights, test: TestSet, trainer: Trainer) -> dict[str, Any]:
    """Measure the model on the global test set, in eval mode: all METRICS, and class_accuracy (K numbers or None)."""
    return measure(trainer.outputs(weights, test.x).logits, test)


def measure(logits: Tensor, test: TestSet) -> dict[str, Any]:
    """All METRICS of a model that gave these answers (n, K) to the test set; one host sync."""
    logits = logits.float()
    confidence, answer = logits.softmax(dim=1).max(dim=1)
    correct = (answer == test.y).double()
    hits = torch.zeros_like(test.class_sizes).index_add_(0, test.y, correct)
    answers = Answers(logits, confidence, correct, hits / test.class_sizes, test)
    numbers = {}
    for name, metric in METRICS.items():
        if metric.of is not None:
            number: Any = metric.of(answers)
            if getattr(number, "ndim", number is None):
                what = "nothing" if number is None else f"numbers of shape {tuple(number.shape)}"
                raise FedstillError(f"the metric '{name}', {name_of(metric.of)}, gave {what}: give one, e.g. a mean")
            numbers[name] = torch.as_tensor(number, dtype=torch.float64, device=logits.device)
    values = torch.cat([torch.stack(list(numbers.values())), answers.class_accuracy]).tolist()
    class_accuracy = [value if value == value else None for value in values[len(numbers) :]]
    return {**dict(zip(numbers, values, strict=False)), "class_accuracy": class_accuracy}


EVALUATIONS: dict[str, Evaluate] = {"global_test": global_test}


def forgetting(earlier: Iterable[list[float | None]], now: list[float | None]) -> float:
    """mean_c (best accuracy of class c so far - its accuracy now) >= 0 (after Lee et al., FedNTD, NeurIPS 2022).

    earlier: the class accuracies of the evaluated rounds before; None: the class was not in the test set.
    """
    by_class: Iterable[tuple[float | None, ...]] = zip(now, *earlier, strict=True)
    lost = [
        max(value for value in values if value is not None) - values[0] for values in by_class if values[0] is not None
    ]
    return sum(lost) / max(1, len(lost))
