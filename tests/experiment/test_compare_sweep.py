"""Sweeps and searches as they run: growth, a kill in the middle, points that end early."""

from __future__ import annotations

import json

import pytest

from fedstill import Experiment, FedstillError, run, sweep
from fedstill.experiment.search import EndBelow
from fedstill.loop.callbacks import Callback

SMALL = Experiment(
    rounds=2,
    cohort=2,
    partition={"scheme": "iid", "clients": 4},
    model={"name": "mlp", "hidden": [4]},
    data={"source": "digits", "test_limit": 50},
)


class Count(Callback):
    def __init__(self, names):
        self._names = names

    def on_round(self, row):
        self._names.append(row["round"])


def test_a_point_is_the_run_of_its_own_experiment():
    found = sweep(SMALL, {"local.lr": [0.01, 0.5]}, seeds=1)
    data = {**SMALL.data.model_dump(), "client_test_share": 0.2}
    alone = run(SMALL.replace(local={"lr": 0.5}, data=data, evaluate="client_rows"))
    point = found.results["local.lr=0.5"][0]
    assert [row["accuracy"] for row in point.history.rows] == [row["accuracy"] for row in alone.history.rows]
    assert found.summaries[0].method == found.sensitivity.best


def test_a_sweep_grows_by_the_values_and_seeds_that_it_lacks(tmp_path):
    rounds = []
    watch = lambda name, seed: [Count(rounds)]  # noqa: E731
    sweep(SMALL, ["local.lr=0.1"], seeds=1, run_dir=tmp_path, callbacks=watch)
    assert len(rounds) == 2
    grown = sweep(SMALL, ["local.lr=0.1,0.2"], seeds=2, run_dir=tmp_path, callbacks=watch, resume=True)
    assert len(rounds) == 2 + 3 * 2
    assert {name: len(each) for name, each in grown.results.items()} == {"local.lr=0.1": 2, "local.lr=0.2": 2}
    fresh = sweep(SMALL, ["local.lr=0.1,0.2"], seeds=2)
    assert {row.method: row.last for row in grown.summaries} == {row.method: row.last for row in fresh.summaries}
    best = Experiment.from_toml(tmp_path / "best.toml")
    assert best.evaluate == SMALL.evaluate
    assert f"local.lr={best.local.lr}" == grown.summaries[0].method
    with pytest.raises(FedstillError, match="use a new folder"):
        sweep(SMALL, ["cohort=1,2"], run_dir=tmp_path, resume=True)


def test_a_run_ends_in_the_round_in_which_its_best_is_below_the_floor():
    end = EndBelow({2: 0.5, 4: 0.7})
    assert [end.on_round({"round": at, "accuracy": value}) for at, value in ((1, 0.1), (2, 0.6), (3, 0.4))] == [
        False
    ] * 3
    assert end.on_round({"round": 4, "accuracy": 0.69})


@pytest.fixture
def searched():
    pytest.importorskip("optuna")
    return SMALL.replace(rounds=4, compare={"over": ["local.lr=0.0001..1"], "search": 8, "seeds": 2})


@pytest.mark.slow
def test_a_search_ends_hopeless_points_early_and_a_killed_one_comes_to_the_same_points(searched, tmp_path):
    whole = sweep(searched, run_dir=tmp_path / "whole")
    assert len(whole.results) + len(whole.ended) == 8
    assert whole.ended
    assert all(len(each) == 2 for each in whole.results.values())
    record = json.loads((tmp_path / "whole" / "search.json").read_text())
    assert record["ended_early"].keys() == whole.ended.keys()

    class Kill(Callback):
        left = 17

        def on_round(self, row):
            Kill.left -= 1
            if Kill.left < 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(searched, run_dir=tmp_path / "cut", callbacks=lambda name, seed: [Kill()])
    assert not (tmp_path / "cut" / "best.toml").exists()
    again = sweep(searched, run_dir=tmp_path / "cut", resume=True)
    assert again.ended == whole.ended
    assert {row.method: row.last for row in again.summaries} == {row.method: row.last for row in whole.summaries}


def test_a_search_without_optuna_says_how_to_get_it(searched, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FedstillError, match=r"pip install 'fedstill\[search\]'"):
        sweep(searched)
