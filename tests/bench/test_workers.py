"""Runs in this process or in several: the same numbers, and no run's trouble is another's."""

import os
import signal
from multiprocessing import active_children
from pathlib import Path

import pytest
from bench_cases import fake_runs, small

from fedstill.bench import Cell, workers
from fedstill.bench.plan import make_jobs
from fedstill.bench.workers import Ticker, do_jobs
from fedstill.core.errors import FedstillError

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


def jobs(out, *methods, **changes):
    setting = {"model": {"name": "mlp", "hidden": [8]}, "cohort": 2, "checkpoint_every": 1, **changes}
    cells = [Cell(method, "digits", small(method=method, **setting)) for method in methods]
    return make_jobs(cells, preset="paper", seeds=1, device="cpu", out=out)


def outcomes(some, *, at_once=1, hear=None):
    """The runs and the errors, by row."""
    runs, errors = {}, {}

    def listen(message):
        row = some[message.number].row
        if message.run is not None:
            runs[row] = message.run
        elif message.error is not None:
            errors[row] = message.error
        elif hear is not None:
            hear(message)

    do_jobs(some, listen, at_once=at_once)
    return runs, errors


@pytest.fixture
def no_data(monkeypatch):
    """Nobody loads or splits anything."""
    monkeypatch.setattr(workers, "load_source", lambda experiment: None)
    monkeypatch.setattr(workers, "build_federation", lambda experiment, source: None)


def test_a_failure_is_an_answer_its_traceback_goes_into_the_folder_and_the_next_run_goes_on(
    tmp_path, monkeypatch, no_data
):
    fake_runs(monkeypatch)
    plain = workers.run

    def failing(experiment, **options):
        if experiment.method.name == "fedprox":
            raise RuntimeError("no room")
        return plain(experiment, **options)

    monkeypatch.setattr(workers, "run", failing)
    some = jobs(tmp_path, "fedprox", "fedavg")
    runs, errors = outcomes(some)
    assert list(runs) == ["fedavg"]
    file = some[0].folder / "error.txt"
    assert errors == {"fedprox": f"RuntimeError: no room (see {file})"}
    assert "Traceback" in file.read_text()


def test_data_that_cannot_be_had_are_asked_for_once_and_the_cure_is_named(tmp_path, monkeypatch):
    asked = []

    def load(experiment):
        asked.append(experiment.data.source)
        raise FedstillError("the hub did not give it")

    monkeypatch.setattr(workers, "load_source", load)
    _, errors = outcomes(jobs(tmp_path, "fedavg", "fedprox", data="owner/no-such-set"))
    assert asked == ["owner/no-such-set"]
    assert set(errors.values()) == {"the hub did not give it; --data DIR takes it from a folder of yours"}


def test_trouble_of_who_records_a_run_is_not_the_runs_failure(tmp_path, monkeypatch, no_data):
    """As when the disk is full while the results are written."""
    fake_runs(monkeypatch)

    def hear(message):
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        do_jobs(jobs(tmp_path, "fedavg"), hear, at_once=1)
    assert not list(tmp_path.rglob("error.txt"))


def test_rounds_and_preparations_are_told_now_and_then(monkeypatch):
    now, heard = [100.0], []
    monkeypatch.setattr(workers.time, "perf_counter", lambda: now[0])
    ticker = Ticker(7, heard.append)
    ticker.on_prepare("simclr: epoch 1/2", 0.5)
    ticker.on_round({"round": 1})
    now[0] += 1.0
    ticker.on_round({"round": 2})
    assert [(message.number, message.doing, message.round) for message in heard] == [
        (7, "simclr: epoch 1/2", None),
        (7, "", 2),
    ]


@pytest.mark.slow
def test_several_at_a_time_give_the_same_numbers_and_a_failure_or_a_death_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_METHODS)
    alone, _ = outcomes(jobs(tmp_path / "one", "fedavg", "fedprox"))
    rounds = []
    some = jobs(tmp_path / "two", "own.py:deadly", "own.py:wrong", "fedavg", "fedprox")
    runs, errors = outcomes(some, at_once=2, hear=rounds.append)
    assert {row: run["accuracy"] for row, run in runs.items()} == {row: run["accuracy"] for row, run in alone.items()}
    assert {run["at_once"] for run in runs.values()} == {2}
    assert errors["own.py:wrong"].startswith("RuntimeError: this method is wrong")
    assert errors["own.py:deadly"].startswith("its process was ended")
    assert {message.round for message in rounds} >= {0}


ROUNDS_TO_KILL = 600  # two seconds of work: both runs are under way when the first message comes


@pytest.mark.slow
def test_a_killed_worker_s_run_resumes_and_equals_the_uninterrupted_one(tmp_path):
    whole, _ = outcomes(jobs(tmp_path / "whole", "fedavg", "fedprox", rounds=ROUNDS_TO_KILL))
    some, killed = jobs(tmp_path / "parts", "fedavg", "fedprox", rounds=ROUNDS_TO_KILL), []

    def kill(message):
        """kill -9 of a worker as soon as a run is under way."""
        if not killed and message.round:
            killed.append(active_children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    _, errors = outcomes(some, at_once=2, hear=kill)
    assert len(errors) == 1
    again, errors = outcomes([job for job in some if job.row in errors])
    ((row, run),) = again.items()
    assert run["accuracy"] == whole[row]["accuracy"]
    assert not errors


@pytest.mark.slow
def test_workers_end_when_the_work_is_broken_off(tmp_path):
    def interrupt(message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        do_jobs(jobs(tmp_path, "fedavg", "fedprox", rounds=500), interrupt, at_once=2)
    assert not active_children()
