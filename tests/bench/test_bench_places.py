"""One bench works in a folder, and the results file loses nothing when several write."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench_cases import bench, invoke, run_of, small, write_paper

from fedstill.bench.plan import BENCH_LOCK, claimed, holding
from fedstill.bench.results import add_run, read_runs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_paper(tmp_path)
    return tmp_path


def test_a_second_bench_in_the_same_folder_is_refused_with_the_others_number(folder):
    with claimed(Path("out"), Path("out/results.json")):
        outcome = invoke("tiny", "--table", "1", "--out", "out")
        assert outcome.exit_code == 2
        (line,) = outcome.stderr.splitlines()
        assert f"another bench works in 'out', pid {os.getpid()}: wait or use another --out" in line
        bench("tiny", "--table", "1", "--out", "other", "--results", "out/results.json")
        shown = bench("tiny", "--table", "1", "--out", "out")
        assert "nothing to run: 2 runs done" in shown.stderr, "looking is free"
    bench("tiny", "--table", "1", "--out", "out", "--seeds", "2")


def test_the_lock_of_a_dead_process_is_taken_over_and_none_is_left(folder):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (folder / "out").mkdir()
    (folder / "out" / BENCH_LOCK).write_text(f"{gone.pid}\n")
    bench("tiny", "--table", "1", "--out", "out")
    assert list(folder.rglob("*.lock")) == []


def test_a_dry_run_holds_nothing(folder):
    with claimed(Path("out"), Path("out/results.json")):
        bench("tiny", "--table", "1", "--out", "out", "--dry-run")


def add_many(file, rounds):
    for seed in range(20):
        add_run(file, "tiny", run_of(small(rounds=rounds), [1.0] * rounds, seed=seed))


def test_several_that_write_results_at_once_lose_no_run(tmp_path):
    """In threads: each opens the lock for itself, as processes do."""
    file = tmp_path / "results.json"
    with ThreadPoolExecutor(3) as writers:
        list(writers.map(lambda rounds: add_many(file, rounds), (1, 2, 3)))
    assert len(read_runs(file)) == 60
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_lock_is_free_again_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), holding(tmp_path / "results.json"):
            raise RuntimeError
