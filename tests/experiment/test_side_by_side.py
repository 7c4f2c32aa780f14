"""The runs of a comparison in several processes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedstill import Experiment, FedstillError, compare
from fedstill.loop.callbacks import Callback

SMALL = Experiment(
    rounds=2,
    cohort=2,
    partition={"scheme": "iid", "clients": 4},
    model={"name": "mlp", "hidden": [8]},
    data={"source": "digits", "test_limit": 50},
)
BOTH = SMALL.replace(compare={"jobs": 2})

OWN_METHODS = """
import multiprocessing
import os

from fedstill.methods import fedavg as plain


def wrong():
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("this method is wrong")
    return plain()


def deadly():
    if multiprocessing.parent_process() is not None:
        os._exit(7)
    return plain()
"""


class Heard(Callback):
    def __init__(self, into, name):
        self.into, self.name = into, name

    def on_start(self, info):
        self.into.append((*self.name, "start", info.rounds))

    def on_round(self, row):
        self.into.append((*self.name, "round", row["round"]))


def test_jobs_need_a_folder_and_data_that_other_processes_can_read(tmp_path):
    with pytest.raises(FedstillError, match=r"compare\.jobs = 2: run_dir is missing.*set it to 1"):
        compare(BOTH, ["fedavg"], seeds=1)
    data = ([[0.0], [1.0]] * 20, [0, 1] * 20)
    with pytest.raises(FedstillError, match=r"compare\.jobs = 2: data in Python are in one process only"):
        compare(BOTH, ["fedavg"], seeds=1, run_dir=tmp_path, data=data)


@pytest.mark.slow
def test_several_at_a_time_give_the_numbers_of_one_at_a_time_and_their_rounds_are_heard(tmp_path):
    heard = []
    watch = lambda method, seed: [Heard(heard, (method, seed))]  # noqa: E731
    both = compare(BOTH, ["fedavg", "fedprox"], seeds=2, run_dir=tmp_path / "two", callbacks=watch)
    alone = compare(SMALL, ["fedavg", "fedprox"], seeds=2, run_dir=tmp_path / "one")
    for one, other in zip(both.summaries, alone.summaries, strict=True):
        assert (one.method, one.last, one.best) == (other.method, other.last, other.best)
    runs = [(method, seed) for method in ("fedavg", "fedprox") for seed in (0, 1)]
    for name in runs:
        assert [event[2:] for event in heard if event[:2] == name] == [("start", 2), ("round", 1), ("round", 2)]


@pytest.mark.slow
def test_a_failure_and_a_death_are_named_and_stop_no_other_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_METHODS)
    with pytest.raises(FedstillError, match=r"own\.py:(wrong|deadly), seed 0: .*\(1 more failed\)"):
        compare(BOTH, ["own.py:wrong", "own.py:deadly", "fedavg"], seeds=1, run_dir="out")
    assert len((tmp_path / "out" / "fedavg" / "seed-0" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "this method is wrong" in next(Path("out").rglob("error.txt")).read_text()


@pytest.mark.slow
def test_a_killed_comparison_leaves_no_process_and_the_same_command_ends_it(tmp_path):
    (tmp_path / "x.toml").write_text(
        'data.source = "digits"\npartition.scheme = "iid"\npartition.clients = 4\ncohort = 2\nrounds = 150\n'
        'model.name = "mlp"\nmodel.hidden = [8]\ncheckpoint_every = 5\n'
    )
    words = [sys.executable, "-m", "fedstill", "compare", "x.toml", "--methods", "fedavg,fedprox", "--seeds", "1"]
    words += ["--jobs", "2", "--out", "out", "--format", "json"]
    first = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(list((tmp_path / "out").glob("*/seed-0/checkpoints/*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    workers = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    assert len(workers) >= 2
    first.send_signal(signal.SIGKILL)
    first.wait()
    until = time.monotonic() + 30
    while any(_lives(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in workers)
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    whole = subprocess.run([*words[:-3], "whole", *words[-2:]], cwd=tmp_path, capture_output=True, text=True)
    numbers = [{row["method"]: row["accuracies"] for row in json.loads(done.stdout)} for done in (second, whole)]
    assert numbers[0] == numbers[1]


def _lives(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
