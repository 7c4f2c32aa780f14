"""Comparisons: one table from several methods and seeds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedstill import EarlyStop, Experiment, FedstillError, compare, run
from fedstill.experiment.compare import table_notes
from fedstill.experiment.trackers import numbers
from fedstill.loop.callbacks import Callback
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


def files_of(folder, *, of="metrics.jsonl"):
    return {path: path.stat().st_mtime_ns for path in folder.rglob(of)}


class Played(Callback):
    """Counts the rounds that are really played."""

    def __init__(self, into, name):
        self.into, self.name = into, name

    def on_round(self, row):
        self.into.append((*self.name, row["round"]))


def test_more_methods_and_seeds_in_the_same_folder_run_only_the_missing_runs(tmp_path):
    played = []
    watch = lambda method, seed: [Played(played, (method, seed))]  # noqa: E731
    compare(SMALL, ["fedavg"], seeds=1, run_dir=tmp_path / "grows", callbacks=watch)
    assert played == [("fedavg", 0, 1), ("fedavg", 0, 2)]
    played.clear()
    more = compare(SMALL, ["fedprox"], seeds=2, run_dir=tmp_path / "grows", callbacks=watch, resume=True)
    assert set(played) == {("fedavg", 1, 1), ("fedavg", 1, 2), *(("fedprox", s, r) for s in (0, 1) for r in (1, 2))}
    at_once = compare(SMALL, ["fedavg", "fedprox"], seeds=2, run_dir=tmp_path / "at once")
    assert list(more.results) == ["fedavg", "fedprox"]
    for one, other in zip(more.summaries, at_once.summaries, strict=True):
        assert (one.method, one.last, one.best) == (other.method, other.last, other.best)
    table = json.loads((tmp_path / "grows" / "results.json").read_text())
    assert [row["run_dir"] for row in table["runs"]] == [
        f"{method}/seed-{seed}" for method in ("fedavg", "fedprox") for seed in (0, 1)
    ]
    played.clear()
    fewer = compare(SMALL, ["fedavg"], seeds=1, run_dir=tmp_path / "grows", callbacks=watch, resume=True)
    assert (played, list(fewer.results), len(fewer.results["fedavg"])) == ([], ["fedavg", "fedprox"], 2)


def test_a_changed_experiment_does_not_go_into_the_folder_of_another(tmp_path):
    compare(SMALL, ["fedavg"], seeds=1, run_dir=tmp_path)
    before = files_of(tmp_path, of="*")
    for change, words in (
        ({"local": {"lr": 0.5}}, r"local\.lr was 0\.01 and is 0\.5"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"cohort": 3}, "cohort was 2 and is 3"),
    ):
        with pytest.raises(FedstillError, match=f"a comparison of another experiment: {words}: set it back"):
            compare(SMALL.replace(**change), ["fedprox"], seeds=1, run_dir=tmp_path, resume=True)
    assert files_of(tmp_path, of="*") == before


def test_two_methods_of_one_name_from_two_files_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("a", "b"):
        Path(place).mkdir()
        Path(place, "own.py").write_text("from fedstill.methods import fedavg\n\n\ndef mine():\n    return fedavg()\n")
    compare(SMALL, ["a/own.py:mine"], seeds=1, run_dir="out")
    compare(SMALL, ["a/own.py:mine"], seeds=1, run_dir="out", resume=True)
    with pytest.raises(FedstillError, match=r"another method in 'own\.py-mine'.*rename b/own\.py:mine"):
        compare(SMALL, ["b/own.py:mine"], seeds=1, run_dir="out", resume=True)


def test_methods_that_a_second_start_has_not_come_to_keep_their_rows(tmp_path):
    compare(SMALL, ["fedavg", "fedprox"], seeds=1, run_dir=tmp_path)

    class Stopped(Exception):
        pass

    def stop(method, seed):
        if (method, seed) == ("fedprox", 1):
            raise Stopped
        return ()

    with pytest.raises(Stopped):
        compare(SMALL, seeds=2, run_dir=tmp_path, callbacks=stop, resume=True)
    table = json.loads((tmp_path / "results.json").read_text())
    assert {row["method"]: row["seeds"] for row in table["methods"]} == {"fedavg": 2, "fedprox": 1}
    assert [row["run_dir"] for row in table["runs"]] == ["fedprox/seed-0", "fedavg/seed-0", "fedavg/seed-1"]


def test_a_folder_at_work_is_left_alone(tmp_path):
    inside = []

    def intrude(method, seed):
        with ThreadPoolExecutor(1) as other:
            intruder = other.submit(compare, SMALL, ["fedavg"], seeds=1, run_dir=tmp_path, resume=True)
            with pytest.raises(FedstillError, match=r"is at work already \(pid \d+\)"):
                intruder.result()
        inside.append(method)
        return ()

    compare(SMALL, ["fedavg"], seeds=1, run_dir=tmp_path, callbacks=intrude)
    assert inside == ["fedavg"]
    assert not list(tmp_path.rglob(".running"))


def test_the_same_method_under_two_names_is_no_difference_shown():
    """FedProx without its term is FedAvg, bit for bit."""
    rows = {row["method"]: row for row in compare(SMALL, ["fedavg", "fedprox(mu=0.0)"], seeds=3).as_json()}
    twin = rows["fedprox(mu=0.0)"]
    assert twin["accuracies"] == rows["fedavg"]["accuracies"]
    assert (twin["from_fedavg"]["verdict"], twin["from_fedavg"]["p"]) == ("no difference shown", 1.0)
    assert twin["group"] == rows["fedavg"]["group"]


def test_each_method_also_runs_under_each_attack_on_the_same_data(tmp_path):
    attacked = SMALL.replace(rounds=1, compare={"attacks": ["sign:0.5", "backdoor:0.5:3"]})
    comparison = compare(attacked, ["fedavg", "fedprox"], seeds=1, run_dir=tmp_path / "all")
    names = [
        f"{method}{under}"
        for method in ("fedavg", "fedprox")
        for under in ("", " under sign:0.5", " under backdoor:0.5:3")
    ]
    assert list(comparison.results) == names
    plain = compare(SMALL.replace(rounds=1), ["fedavg"], seeds=1)
    assert (
        comparison.results["fedavg"][0].history.last["accuracy"] == plain.results["fedavg"][0].history.last["accuracy"]
    )
    measured = {name for name, (result,) in comparison.results.items() if "backdoor_success" in result.history.last}
    assert measured == {name for name in names if "backdoor" in name}
    assert "backdoor %" in plain_table(comparison.summaries)
    own = Experiment.from_toml(tmp_path / "all" / "fedavg-under-sign-0.5" / "seed-0" / "config.toml")
    assert (own.attack.name, own.attack.share) == ("sign", 0.5)
    grown = compare(attacked, ["fedavg", "fedprox"], seeds=1, run_dir=tmp_path / "all", resume=True)
    assert list(grown.results) == names
