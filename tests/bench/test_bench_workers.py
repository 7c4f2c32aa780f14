"""Several runs at once: the same numbers, and no run's trouble is another's."""

import os
import signal
import time
from pathlib import Path

import pytest
from bench_cases import RECIPE, bench, small, write_paper

from fedstill.bench import plan, workers
from fedstill.bench.plan import circumstances, make_orders, make_run, source_version
from fedstill.bench.recipe import Cell
from fedstill.bench.results import read_runs
from fedstill.bench.workers import InProcess

OWN_METHODS = """
import multiprocessing
import os

from fedstill.methods import fedavg as plain


def wrong():
    '''Fails in a worker only: here it must pass the checks of an experiment.'''
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("this method is wrong")
    return plain()


def deadly():
    if multiprocessing.parent_process() is not None:
        os._exit(7)
    return plain()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_METHODS)
    write_paper(tmp_path, recipe=RECIPE.replace('"fedprox": {"mu": 1.0}', '"fedprox": {"mu": 1.0}, "own.py:wrong": {}'))
    return tmp_path


def accuracies(file):
    return {(run["row"], run["seed"]): run["accuracy"] for run in read_runs(file)}


def test_two_at_a_time_give_the_same_numbers_and_a_failure_stops_nobody(folder):
    bench("tiny", "--table", "1", "--methods", "fedavg,fedprox", "--seeds", "2", "--out", "one")
    outcome = bench("tiny", "--table", "1", "--seeds", "2", "--jobs", "2", "--out", "two", code=1)
    found = accuracies(folder / "two/results.json")
    assert found == accuracies(folder / "one/results.json")
    assert len(found) == 4
    assert {run["at_once"] for run in read_runs(folder / "two/results.json")} == {2}
    failed = [line for line in outcome.stderr.splitlines() if "failed: RuntimeError: this method is wrong" in line]
    assert len(failed) == 2
    assert "with 2 at a time on cpu" in outcome.stderr


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_run_only(folder):
    recipe = folder / "benchmarks/tiny/recipe.py"
    recipe.write_text(recipe.read_text().replace("own.py:wrong", "own.py:deadly"))
    outcome = bench("tiny", "--table", "1", "--jobs", "2", code=1)
    assert set(accuracies(folder / "runs/bench/tiny/results.json")) == {("fedavg", 0), ("fedprox", 0)}
    (line,) = (line for line in outcome.stderr.splitlines() if "failed: " in line)
    assert "own.py:deadly digits seed 0 failed: its process ended with code 7" in line


@pytest.mark.slow
def test_a_killed_worker_s_run_resumes_and_equals_the_uninterrupted_one(folder, monkeypatch):
    words = ["tiny", "--table", "1", "--methods", "fedavg,fedprox", "--set", "rounds=60", "--jobs", "2"]
    bench(*words, "--out", "whole")
    listen, killed = workers.Pool._listen, []

    def killing(self, worker, hear):
        """Kill -9 the first worker that has a checkpoint behind it."""
        saved = Path(worker.task["order"]["folder"]) / "checkpoints"
        while not killed and worker.task["kind"] == "run" and worker.process.is_alive():
            if any(saved.glob("round-*.zip")):
                killed.append(worker.process.pid)
                os.kill(worker.process.pid, signal.SIGKILL)
            time.sleep(0.001)
        listen(self, worker, hear)

    monkeypatch.setattr(workers.Pool, "_listen", killing)
    bench(*words, "--out", "parts", code=1)
    assert killed
    bench(*words, "--out", "parts")
    assert accuracies(folder / "parts/results.json") == accuracies(folder / "whole/results.json")
    assert any("resuming after round" in log.read_text() for log in (folder / "parts").rglob("log.txt"))


def one_order(out):
    return make_orders([Cell("fedavg", "digits", small())], preset="paper", seeds=1, device="cpu", out=out)


def test_seconds_of_short_runs_are_not_rounded_away(tmp_path):
    run = make_run(one_order(tmp_path)[0], [{"accuracy": 0.5}] * 4, 0.0123, circumstances("cpu", 1))
    assert run["seconds"] == 0.012


def test_a_record_says_which_engine_made_it_if_not_the_default(tmp_path):
    made, rows = circumstances("cpu", 1), [{"accuracy": 0.5}] * 4
    cell = Cell("fedavg", "digits", small(engine={"precision": "float64", "chunk": 2, "threads": 1}))
    (order,) = make_orders([cell], preset="paper", seeds=1, device="cpu", out=tmp_path)
    assert make_run(order, rows, 1.0, made)["engine"] == {"chunk": 2, "precision": "float64"}
    assert "engine" not in make_run(one_order(tmp_path)[0], rows, 1.0, made)


def test_a_record_says_how_many_of_its_seconds_were_before_the_first_round(tmp_path):
    rows = [{"accuracy": 0.5, "seconds_prepared": 7.25}, *[{"accuracy": 0.5}] * 3]
    (order,), made = one_order(tmp_path), circumstances("cpu", 1)
    assert make_run(order, rows, 9.0, made)["prepared"] == 7.25
    assert "prepared" not in make_run(order, rows[1:], 9.0, made)


@pytest.mark.parametrize("kind", ["round", "done"])
def test_trouble_of_the_listener_is_not_the_runs_failure(tmp_path, kind):
    """As when the disk is full while the results are written."""
    heard = []

    def hear(message):
        heard.append(message["kind"])
        if message["kind"] == kind:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        InProcess().do("run", one_order(tmp_path), hear)
    assert "failed" not in heard
    assert not list(tmp_path.rglob("error.txt"))


def test_a_run_from_source_says_the_version_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "version_of", lambda package: None)
    made = circumstances("cpu", 1)
    assert made["fedstill"] == source_version(Path(__file__).parents[2])
    assert made["fedstill"][0].isdecimal()
    assert made["torch"]
    assert source_version(tmp_path) == "unknown"
