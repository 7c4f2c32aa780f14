from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import toy_federation
from sklearn import metrics as sklearn_metrics

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator
from fedstill.core.types import Dataset, Federation, Output
from fedstill.loop.evaluate import (
    CONFUSION_CLASSES,
    METRICS,
    Metric,
    calibration_error,
    forgetting,
    global_test,
    label_counts,
    make_test_set,
)


class Oracle:
    """A trainer whose model says what it was told to say."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = torch.tensor(logits, dtype=torch.float32)

    def outputs(self, weights, x, stacked=False):
        assert len(x) == len(self.logits)
        return Output(self.logits, x)


def federation_of(train_labels: list[list[int]], test_labels, classes: int) -> Federation:
    y = torch.tensor([label for labels in train_labels for label in labels], dtype=torch.int64)
    names = tuple(str(c) for c in range(classes))
    test_y = torch.tensor(np.asarray(test_labels))
    offsets = torch.tensor([0, *np.cumsum([len(labels) for labels in train_labels])])
    train, test = (
        Dataset("t", torch.zeros(len(y), 1), y, names),
        Dataset("t", torch.zeros(len(test_y), 1), test_y, names),
    )
    return Federation(train, test, torch.arange(len(y)), offsets)


def reference(logits: np.ndarray, y: np.ndarray, clients: list[list[int]], classes: int) -> dict:
    """From the definitions, sample by sample."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    p = shifted / shifted.sum(1, keepdims=True)
    answer, confidence = p.argmax(1), p.max(1)
    class_accuracy = [float(np.mean(answer[y == c] == c)) if (y == c).any() else None for c in range(classes)]
    per_client = []
    for labels in clients:
        known = [class_accuracy[label] for label in labels if class_accuracy[label] is not None]
        if known:
            per_client.append(np.mean(known))
    gap = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gap += inside.mean() * abs((answer == y)[inside].mean() - confidence[inside].mean())
    return {
        "accuracy": np.mean(answer == y),
        "loss": -np.mean(np.log(p[np.arange(len(y)), y])),
        "ece": gap,
        **of_sklearn(torch.softmax(torch.as_tensor(logits).double(), 1).numpy(), y),  # torch's bits decide ties
        "client_mean": np.mean(per_client),
        "client_worst": np.min(per_client),
        "class_accuracy": class_accuracy,
        "confusion": sklearn_metrics.confusion_matrix(y, answer, labels=range(classes)).tolist(),
    }


def of_sklearn(p: np.ndarray, y: np.ndarray) -> dict[str, float | None]:
    answer, tested = p.argmax(1), np.unique(y)
    areas = [sklearn_metrics.roc_auc_score(y == c, p[:, c]) for c in tested] if len(tested) > 1 else None
    if len(tested) == p.shape[1] > 2:
        areas = sklearn_metrics.roc_auc_score(y, p, multi_class="ovr", average="macro")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an answer that is no class of y
        balanced = sklearn_metrics.balanced_accuracy_score(y, answer)
    return {
        "balanced_accuracy": balanced,
        "macro_f1": sklearn_metrics.f1_score(y, answer, average="macro"),
        "auc": None if areas is None else np.mean(areas),
    }


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 40))
def test_every_number_is_the_one_of_the_definition(seed, classes, count):
    generator = numpy_generator(seed)
    logits = generator.normal(size=(count, classes)).round(generator.integers(0, 3)).astype(np.float32) * 3  # ties, too
    y = generator.integers(0, classes, count)
    clients = [list(generator.integers(0, classes, size)) for size in (3, 0, 7, 1)]
    clients.append([int(y[0])])  # somebody holds a class that is tested
    found = global_test(None, make_test_set(federation_of(clients, y, classes), "cpu"), Oracle(logits))
    expected = reference(logits, y, clients, classes)
    assert found.keys() == expected.keys()
    assert found.pop("confusion") == expected.pop("confusion")
    assert found.pop("class_accuracy") == pytest.approx(expected.pop("class_accuracy"))
    assert found == pytest.approx(expected, abs=2e-6)


def test_classes_that_are_sorted_apart_have_the_same_areas(monkeypatch):
    generator = numpy_generator(0)
    logits, y = generator.normal(size=(30, 5)), np.arange(30) % 5
    test = make_test_set(federation_of([[0]], y, 5), "cpu")
    together = global_test(None, test, Oracle(logits))["auc"]
    monkeypatch.setattr("fedstill.loop.evaluate.SORTED_AT_ONCE", 60)
    assert global_test(None, test, Oracle(logits))["auc"] == together


def test_a_task_of_many_classes_has_no_confusion_matrix_in_its_rows():
    for classes in (CONFUSION_CLASSES, CONFUSION_CLASSES + 1):
        test = make_test_set(federation_of([[0]], [0, 1], classes), "cpu")
        row = global_test(None, test, Oracle(np.eye(2, classes)))
        assert ("confusion" in row) == (classes == CONFUSION_CLASSES)


def test_mean_and_worst_client_by_hand():
    """Class accuracies 1.0 and 0.5: clients with 2:0, 1:1 and 0:3 labels expect 1.0, 0.75 and 0.5."""
    federation = federation_of([[0, 0], [0, 1], [1, 1, 1], []], [0, 0, 1, 1], 2)
    logits = np.array([[5.0, 0], [5, 0], [0, 5], [5, 0]])
    found = global_test(None, make_test_set(federation, "cpu"), Oracle(logits))
    assert found["class_accuracy"] == [1.0, 0.5]
    assert found["client_mean"] == pytest.approx(0.75)
    assert found["client_worst"] == pytest.approx(0.5)


def test_a_class_without_test_samples_is_none_and_weighs_nothing():
    federation = federation_of([[0, 2, 2], [2]], [0, 1], 3)
    found = global_test(None, make_test_set(federation, "cpu"), Oracle(np.array([[1.0, 0, 0], [1, 0, 0]])))
    assert found["class_accuracy"] == [1.0, 0.0, None]
    assert found["client_mean"] == found["client_worst"] == 1.0


def test_calibration_by_hand():
    """Two answers at 0.9, one right: |0.5 - 0.9|. Two at 0.6, both right: |1 - 0.6|. Mean 0.4."""
    confidence, correct = torch.tensor([0.9, 0.9, 0.6, 0.6]), torch.tensor([1.0, 0, 1, 1])
    assert calibration_error(confidence, correct).item() == pytest.approx(0.4)


def test_certain_and_right_is_perfectly_calibrated():
    assert calibration_error(torch.ones(5), torch.ones(5)).item() == 0.0


def test_label_counts_count_what_each_client_holds():
    federation = toy_federation([3, 0, 5])
    counts = label_counts(federation)
    assert counts.sum(dim=1).tolist() == [3, 0, 5]
    held = federation.train.y[federation.indices[3:8]]
    assert counts[2].tolist() == [(held == c).sum().item() for c in range(3)]


def test_forgetting_is_the_mean_fall_from_each_class_peak():
    first, second, third = [0.2, 0.8, None], [0.6, 0.5, None], [0.1, 0.9, None]
    assert forgetting([], first) == 0.0
    assert forgetting([first], second) == pytest.approx((0.0 + 0.3) / 2)
    assert forgetting([first, second], third) == pytest.approx((0.5 + 0.0) / 2)


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=6))
def test_forgetting_is_never_negative_and_zero_at_a_peak(series):
    assert forgetting(series[:-1], series[-1]) >= 0
    assert forgetting(series, [1.0, 1.0, 1.0]) == 0.0
    assert not math.isnan(forgetting(series, [None, None, None]))


def test_a_metric_that_gives_several_numbers_is_named(monkeypatch):
    monkeypatch.setitem(METRICS, "each", Metric(lambda answers: answers.correct))
    federation = federation_of([[0, 1]], [0, 1], 2)
    with pytest.raises(
        FedstillError, match=r"the metric 'each', .*test_evaluate.py, line .* gave numbers of shape \(2,\)"
    ):
        global_test(None, make_test_set(federation, "cpu"), Oracle(np.eye(2)))


def test_an_answer_beyond_the_classes_of_the_data_is_wrong_and_in_no_column_of_the_confusion():
    """A network of four outputs, two classes: one right answer, one of class 3, which does not exist."""
    federation = federation_of([[0, 1]], [0, 1], 2)
    row = global_test(None, make_test_set(federation, "cpu"), Oracle(np.array([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])))
    assert row["accuracy"] == 0.5
    assert row["confusion"] == [[1, 0], [0, 0]]
