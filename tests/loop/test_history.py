from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from run_helpers import linear_model

from fedstill.loop.history import History, Journal, Result, plain


def history() -> History:
    accuracy = [0.2, None, 0.7, 0.7, 0.6]
    rows = [{"round": i + 1, "bytes_up": 10, "bytes_down": 20} for i in range(5)]
    for row, value in zip(rows, accuracy, strict=True):
        if value is not None:
            row["accuracy"] = value
    return History(rows)


def test_best_is_the_first_of_equals_and_last_the_last_evaluated():
    record = history()
    assert record.best["round"] == 3
    assert record.last["round"] == 5
    record.rows.append({"round": 6})
    assert record.last["round"] == 5


def test_the_best_round_by_another_metric():
    rows = [{"round": 1, "loss": 2.0, "auc": None}, {"round": 2, "loss": 1.0, "auc": 0.6}, {"round": 3, "loss": 3.0}]
    rows = [{**row, "accuracy": 0.5} for row in rows]
    assert [History(rows, best_by=name).best["round"] for name in ("accuracy", "loss", "auc", "ece")] == [1, 2, 2, 1]


def test_rounds_to_a_target_is_the_first_round_that_reaches_it():
    assert history().rounds_to(0.7) == 3
    assert history().rounds_to(0.1) == 1
    assert history().rounds_to(0.71) is None


def test_mean_last_skips_rounds_without_an_evaluation():
    assert history().mean_last(3) == pytest.approx((0.7 + 0.7 + 0.6) / 3)
    assert history().mean_last(10) == pytest.approx((0.2 + 0.7 + 0.7 + 0.6) / 4)
    assert math.isnan(History().mean_last())


def test_rows_are_a_table():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(history().rows)
    assert table["round"].tolist() == [1, 2, 3, 4, 5]
    assert table["accuracy"].isna().tolist() == [False, True, False, False, False]


def test_summary_has_exactly_the_promised_keys():
    weights = linear_model().init(0)
    result = Result(history(), weights, weights, "fedavg", 1.23456, Path("runs/a"), 0.7)
    assert result.summary() == {
        "method": "fedavg",
        "rounds": 5,
        "accuracy_last": 0.6,
        "accuracy_best": 0.7,
        "seconds": 1.235,
        "bytes_up": 50,
        "bytes_down": 100,
        "run_dir": "runs/a",
    }
    assert result.rounds_to_target == 3
    assert json.loads(json.dumps(result.summary())) == result.summary()


def test_plain_values_are_json():
    value = {"a": torch.tensor([1.5, math.nan]), "b": (np.float32(0.5), np.int64(3)), 3: math.inf, "c": None, "d": True}
    assert (
        json.dumps(plain(value), allow_nan=False)
        == '{"a": [1.5, null], "b": [0.5, 3.0], "3": null, "c": null, "d": true}'
    )


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_reopening_the_journal_leaves_exactly_the_rounds_it_is_given(tmp_path):
    record = history()
    with Journal(tmp_path, History()) as journal:
        for row in record.rows:
            journal.add(row, [{"round": row["round"], "client": 1, "reason": "x"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "accu')  # a kill in the middle of a line
    kept = History(record.rows[:3], [{"round": 1, "client": 1, "reason": "x"}])
    with Journal(tmp_path, kept) as journal:
        journal.add({"round": 4}, [])
    assert [row["round"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read(tmp_path / "audit.jsonl") == kept.audit
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.jsonl", "metrics.jsonl"]
