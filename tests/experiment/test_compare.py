"""Comparisons: one table from several methods and seeds."""

from __future__ import annotations

import pytest

from fedstill import EarlyStop, Experiment, compare
from fedstill.experiment.trackers import numbers
from fedstill.loop.evaluate import METRICS, Metric
from fedstill.report.table import plain_table

SMALL = Experiment(
    rounds=2,
    cohort=2,
    partition={"scheme": "iid", "clients": 4},
    model={"name": "mlp", "hidden": [8]},
    data={"source": "digits", "test_limit": 50},
)


def test_a_metric_is_one_entry_that_rows_table_early_stop_and_trackers_read(monkeypatch):
    mistakes = Metric(lambda answers: 1.0 - answers.correct.mean(), lower_is_better=True, column="wrong %")
    monkeypatch.setitem(METRICS, "mistakes", mistakes)
    comparison = compare(SMALL, ["fedavg"], seeds=2, callbacks=lambda method, seed: [EarlyStop(1, "mistakes")])
    (results,) = comparison.results.values()
    for result in results:
        for row in result.history.rows:
            assert row["mistakes"] == pytest.approx(1.0 - row["accuracy"])
            assert numbers(row)["mistakes"] == row["mistakes"]
    heading, line = plain_table(comparison.summaries).splitlines()
    assert heading.split()[-2:] == ["wrong", "%"]
    (summary,) = comparison.summaries
    assert float(line.split()[-1]) == pytest.approx(100.0 - 100.0 * summary.mean, abs=0.006)


def test_a_run_stops_early_when_a_metric_that_should_fall_rises(monkeypatch):
    rises = iter(range(100))
    monkeypatch.setitem(METRICS, "rises", Metric(lambda a: a.correct.mean() * 0 + next(rises), lower_is_better=True))
    stop = lambda method, seed: [EarlyStop(1, "rises")]  # noqa: E731
    (results,) = compare(SMALL.replace(rounds=5), ["fedavg"], seeds=1, callbacks=stop).results.values()
    assert len(results[0].history.rows) == 2
