"""How good a model is: for everybody, for each class, for each client, and whether its confidence is earned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.author_mistakes import name_of
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.trainer import Trainer
from fedstill.core.types import Federation, Weights

BINS = 15  # of the calibration error
CONFUSION_CLASSES = 32  # a row of metrics.jsonl holds the confusion matrix of a task with at most so many classes
SORTED_AT_ONCE = 2**22  # scores


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
    hits: Tensor  # (K,) float64, right answers for samples of each class
    answered: Tensor  # (K,) float64, how often each class is the answer
    class_accuracy: Tensor  # (K,) float64, NaN for a class without test samples
    test: TestSet


@dataclass(frozen=True)
class Metric:
    """One number of a round, by the name that it has in metrics.jsonl, in trackers and for `EarlyStop`.

    column: the heading under which comparison tables show the last round's value; empty: not in tables.
    percent: whether tables show it as a percentage.
    means: what it is, for `fedstill list metrics`.
    """

    of: Callable[[Answers], Tensor] | None  # None: the loop itself notes it
    lower_is_better: bool = False
    column: str = ""
    percent: bool = True
    means: str = ""


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Tensor:
    """sum_b |B_b| / n |acc(B_b) - conf(B_b)| over equal bins (b/bins, (b+1)/bins] (Guo et al., ICML 2017)."""
    which = (confidence * bins).ceil().sub(1).clamp(0, bins - 1)
    member = (which.unsqueeze(0) == torch.arange(bins, device=which.device).unsqueeze(1)).double()  # (bins, n)
    # a product with 0/1 and not a scatter: the same bits in every run on a GPU
    gaps = member @ (correct.double() - confidence.double())
    return gaps.abs().sum() / len(confidence)


def macro_f1(answers: Answers) -> Tensor:
    """mean_c 2 hits_c / (samples of c + answers c), over the classes that are tested or answered."""
    return (2 * answers.hits / (answers.test.class_sizes + answers.answered)).nanmean()


def auc(answers: Answers) -> Tensor:
    """mean_c P(p_c of a sample of class c > p_c of another sample), a tie counts one half; NaN if one class is tested.

    This is the area under the ROC curve, one class against all others (Provost & Domingos, 2001). Classes without test
    samples are left out.
    """
    scores, y = answers.logits.double().softmax(dim=1).T.contiguous(), answers.test.y
    areas, first = [], 0
    for some in torch.split(scores, max(1, SORTED_AT_ONCE // len(y))):
        ranked, order = some.sort(dim=1)
        positive = y[order] == torch.arange(first, first + len(some), device=y.device).unsqueeze(1)
        last_of_equals = F.pad(ranked[:, 1:] != ranked[:, :-1], (0, 1), value=True)
        # samples up to the last of equal scores, of the class and of others; and up to the equals before these
        hits, others = ((flags.cumsum(1) * last_of_equals).cummax(1).values for flags in (positive, ~positive))
        hits_before, others_before = (F.pad(counts[:, :-1], (1, 0)) for counts in (hits, others))
        pairs = ((hits - hits_before) * (others + others_before)).sum(dim=1).double()
        areas.append(pairs / (2 * hits[:, -1] * others[:, -1]))
        first += len(some)
    return torch.cat(areas).nanmean()


def expected_by_client(answers: Answers) -> Tensor:
    """(clients,) the expected accuracy on each client's own label distribution, sum_c p_k(c) acc_c.

    p_k comes from the client's training labels. The number is exact when samples of a class are alike everywhere
    (label skew), and it says nothing about feature skew. One NaN where the server has no client's labels.
    """
    if not len(answers.test.shares):
        return answers.test.shares.new_full((1,), math.nan)
    return answers.test.shares @ answers.class_accuracy.nan_to_num().float()


METRICS: dict[str, Metric] = {
    "accuracy": Metric(lambda answers: answers.correct.mean(), means="the share of right answers"),
    "loss": Metric(
        lambda answers: F.cross_entropy(answers.logits, answers.test.y).double(),
        lower_is_better=True,
        means="the log loss (cross-entropy)",
    ),
    "ece": Metric(
        lambda answers: calibration_error(answers.confidence, answers.correct),
        lower_is_better=True,
        means="the expected calibration error: how far confidence is from accuracy",
    ),
    "balanced_accuracy": Metric(
        lambda answers: answers.class_accuracy.nanmean(), means="the mean of the class accuracies"
    ),
    "macro_f1": Metric(macro_f1, means="the mean of the classes' F1"),
    "auc": Metric(auc, means="the area under the ROC curve, one class against all others, the mean over classes"),
    "client_mean": Metric(
        lambda answers: expected_by_client(answers).mean().double(), means="the clients' expected accuracy, on average"
    ),
    "client_worst": Metric(
        lambda answers: expected_by_client(answers).min().double(),
        means="the expected accuracy of the worst-off client",
    ),
    "train_loss": Metric(None, lower_is_better=True, means="the mean loss of the round's clients in training"),
    "forgetting": Metric(
        None, lower_is_better=True, means="how far class accuracies have fallen from their peaks, on average"
    ),
    "backdoor_success": Metric(
        None,
        lower_is_better=True,
        column="backdoor %",
        means="the share of test samples of other classes that a backdoor turns into its target",
    ),
}


def is_lower_better(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].lower_is_better


def number_of(row: Mapping[str, Any], metric: str, *, asked: str) -> float | None:
    """Return a metric of an evaluated round, None where it is not defined; refuse a name that no number there has."""
    value = row.get(metric)
    if metric not in row or not (value is None or isinstance(value, (int, float))):
        numbers = [name for name, value in row.items() if isinstance(value, (int, float))]
        raise FedstillError(f"{asked}: no metric '{metric}' in an evaluated round: {suggest(metric, numbers)}")
    return value


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


class NotMeasured(FedstillError):
    """Raised by an evaluation that asks others of whom none answers; the round counts as not evaluated."""


Evaluate = Callable[[Weights, TestSet, Trainer], dict[str, Any]]  # -> the row's metrics, "accuracy" among them


def global_test(weights: Weights, test: TestSet, trainer: Trainer) -> dict[str, Any]:
    """Measure the model on the global test set, in eval mode; see `measure`."""
    return measure(trainer.outputs(weights, test.x).logits, test)


def measure(logits: Tensor, test: TestSet) -> dict[str, Any]:
    """Return all METRICS of a model that gave these answers (n, K) to the test set, by one host sync.

    Beside them: class_accuracy (K numbers) and, of at most CONFUSION_CLASSES classes, confusion: how many samples of
    class i (row) were taken for class j (column). None stands for a number that these samples do not define.
    """
    logits = logits.float()
    confidence, answer = logits.softmax(dim=1).max(dim=1)
    correct = (answer == test.y).double()
    hits = torch.zeros_like(test.class_sizes).index_add_(0, test.y, correct)
    classes = len(hits)
    # a network may have more outputs than the data have classes; an answer beyond them is wrong and in no column
    column, known = answer.clamp(max=classes - 1), (answer < classes).to(correct)
    answered = torch.zeros_like(hits).index_add_(0, column, known)
    answers = Answers(logits, confidence, correct, hits, answered, hits / test.class_sizes, test)
    numbers = {}
    for name, metric in METRICS.items():
        if metric.of is not None:
            number: Any = metric.of(answers)
            if getattr(number, "ndim", number is None):
                problem = "nothing" if number is None else f"numbers of shape {tuple(number.shape)}"
                raise FedstillError(f"the metric '{name}', {name_of(metric.of)}, gave {problem}: give one, e.g. a mean")
            numbers[name] = torch.as_tensor(number, dtype=torch.float64, device=logits.device)
    confusion = hits.new_zeros(classes**2 if classes <= CONFUSION_CLASSES else 0)
    if len(confusion):
        confusion.index_add_(0, test.y * classes + column, known)
    on_host = iter(torch.cat([torch.stack(list(numbers.values())), answers.class_accuracy, confusion]).tolist())
    row: dict[str, Any] = {name: _defined(next(on_host)) for name in numbers}
    row["class_accuracy"] = [_defined(next(on_host)) for _ in range(classes)]
    if len(confusion):
        row["confusion"] = [[int(next(on_host)) for _ in range(classes)] for _ in range(classes)]
    return row


def _defined(value: float) -> float | None:
    return value if value == value else None


def accuracy_by_party(
    weights: Weights, federation: Federation, trainer: Trainer, *, client: int | None = None
) -> tuple[float | None, ...]:
    """Return the accuracy of a model on each client's own test rows, None for a client that has none of them.

    A federation whose clients hold back no rows (see data.federation.hold_client_tests) gives an empty tuple.
    client: measure on the rows of this client only; the tuple has one number.
    """
    if federation.client_test is None:
        return ()
    rows, offsets = federation.client_test
    if client is not None:
        offsets = offsets[client : client + 2]
        rows, offsets = rows[offsets[0] : offsets[1]], offsets - offsets[0]
    if not len(rows):
        return (None,) * (len(offsets) - 1)
    logits = trainer.outputs(weights, federation.train.x[rows], features=False, keep=False).logits
    correct = (logits.argmax(dim=1).cpu() == federation.train.y[rows]).double()
    hits = torch.cat([correct.new_zeros(1), correct.cumsum(0)])[offsets].diff()
    return tuple(_defined(value) for value in (hits / offsets.diff()).tolist())


def client_rows(weights: Weights, test: TestSet, trainer: Trainer) -> dict[str, Any]:
    """Measure the model on the rows that clients hold back (data.client_test_share), all together; see `measure`."""
    federation = test.federation
    if federation.client_test is None:
        raise FedstillError("evaluate = 'client_rows': no client holds back rows; set data.client_test_share, e.g. 0.2")
    rows, _ = federation.client_test
    x, y = federation.train.x[rows], federation.train.y[rows].to(test.y.device)
    sizes = torch.bincount(y, minlength=len(test.class_sizes)).to(test.class_sizes)
    logits = trainer.outputs(weights, x, features=False, keep=False).logits
    return measure(logits, replace(test, x=x, y=y, class_sizes=sizes))


EVALUATIONS: dict[str, Evaluate] = {"global_test": global_test, "client_rows": client_rows}


def forgetting(earlier: Iterable[list[float | None]], now: list[float | None]) -> float:
    """mean_c (best accuracy of class c so far - its accuracy now) >= 0 (after Lee et al., FedNTD, NeurIPS 2022).

    earlier: the class accuracies of the evaluated rounds before; None: the class was not in the test set.
    """
    by_class: Iterable[tuple[float | None, ...]] = zip(now, *earlier, strict=True)
    lost = [
        max(value for value in values if value is not None) - values[0] for values in by_class if values[0] is not None
    ]
    return sum(lost) / max(1, len(lost))
