"""Comparisons: one table from several methods and seeds."""

from __future__ import annotations

import json

import pytest

from fedstill import EarlyStop, Experiment, FedstillError, compare, run
from fedstill.experiment.compare import table_notes
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


def test_each_run_of_a_comparison_ends_early_on_its_own_and_its_references_do_not():
    unstable = SMALL.replace(
        rounds=12, local={"epochs": 1, "lr": 2.0}, early_stop={"patience": 1}, compare={"references": True}
    )
    comparison = compare(unstable, ["fedavg"], seeds=2)
    (results,) = comparison.results.values()
    for result, seed in zip(results, (0, 1), strict=True):
        values = [
            row["accuracy"] for row in run(SMALL.replace(rounds=12, local=unstable.local, seed=seed)).history.rows
        ]
        end = next(round for round in range(2, 13) if values[round - 1] <= max(values[: round - 1]))
        assert (len(result.history.rows), bool(result.ended_early)) == (end, end < 12)
    ended = [str(len(result.history.rows)) for result in results if result.ended_early]
    assert ended
    note = f"fedavg, {len(ended)} of 2 runs: ended early (early_stop), after {', '.join(ended)} rounds"
    assert table_notes(comparison.results) == [note]
    assert [found.rounds for found in comparison.references] == [12, 12]


def test_methods_of_a_comparison_share_the_references_of_their_seed(tmp_path):
    asked = SMALL.replace(compare={"references": True})
    comparison = compare(asked, ["fedavg", "fedprox"], seeds=2, run_dir=tmp_path / "both")
    assert [len(found.alone) for found in comparison.references] == [4, 4]
    assert {row.method for row in comparison.summaries[2:]} == {"pooled", "alone (mean)", "majority class"}
    assert not list((tmp_path / "both" / "fedavg").rglob("references.json"))
    table = json.loads((tmp_path / "both" / "results.json").read_text())
    assert [row["seed"] for row in table["references"]] == [0, 1]
    assert "references" not in [row["method"] for row in table["methods"]]
    one_run = run(asked, run_dir=tmp_path / "one")
    assert one_run.references.pooled == comparison.references[0].pooled
    assert one_run.references.alone == comparison.references[0].alone


def test_references_need_one_network_for_all():
    several = {"name": "mixed", "prototypes": ["mlp(hidden=[16])", "mlp(hidden=[8])"]}
    with pytest.raises(FedstillError, match=r"compare\.references.*one network"):
        SMALL.replace(model=several, compare={"references": True})
