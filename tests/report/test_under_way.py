"""What is under way: which runs are at work, how far they are, how much time is left."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from run_folders import row, write_comparison, write_run

from fedstill.report.runs import read_runs
from fedstill.report.under_way import RUNNING_FILE, UnderWay, find_work, panel, without
from fedstill.storage import toml
from fedstill.storage.files import lock


@pytest.fixture
def hold():
    """Work in folders, as a process that runs in them."""
    with ExitStack() as held:
        yield lambda *folders: [held.enter_context(lock(folder / RUNNING_FILE, wait=False)) for folder in folders]


def rows(count: int, seconds: float) -> list[dict[str, object]]:
    return [row(number, 0.5, 2, seconds=seconds) for number in range(1, count + 1)]


def look(*folders):
    runs = read_runs(folders)
    return find_work(runs.all, folders), runs


def test_the_time_left_is_the_rounds_left_times_the_seconds_of_a_round(tmp_path, hold):
    folder = write_run(tmp_path / "run", [], rows=rows(30, seconds=2.0))
    (folder / "config.toml").write_text('rounds = 100\nseed = 0\nmethod.name = "fedavg"\n')
    hold(folder)
    (work,), _ = look(folder)
    assert (work.done, work.total) == (30, 100)
    assert work.seconds_left({}) == pytest.approx(70 * 2.0)
    assert work.seconds_left({folder: 1.5}) == pytest.approx(70 * 2.0 - 1.5)
    assert UnderWay([work]).in_words() == "30 of 100 rounds are played: about 2 minutes left."


def test_only_the_latest_rounds_tell_how_long_the_next_ones_take(tmp_path, hold):
    slow, fast = rows(30, seconds=100.0), rows(60, seconds=1.0)[30:]
    folder = write_run(tmp_path / "run", [], rows=[*slow, *fast])
    (folder / "config.toml").write_text("rounds = 70\n")
    hold(folder)
    (work,), _ = look(folder)
    assert work.seconds_left({}) == pytest.approx(10 * 1.0)


def comparison(folder, *, jobs: int = 1):
    """Two methods with two seeds planned: a fast one that has ended once, and a slow one in the middle of its first."""
    write_comparison(folder, {"fast": [[0.5] * 10], "slow": [[0.4] * 4]})
    write = {"name": "trial", "rounds": 10, "compare": {"methods": ["fast", "slow"], "seeds": 2, "jobs": jobs}}
    (folder / "config.toml").write_text(toml.dumps(write))
    for place, seconds, count in (("method-0", 1.0, 10), ("method-1", 3.0, 4)):
        inside = folder / place / "seed-0"
        lines = [json.dumps(one) for one in rows(count, seconds)]
        (inside / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "method-1/seed-0/calibration.json").unlink()
    (folder / "method-1/seed-0/config.toml").write_text('rounds = 10\nseed = 0\nmethod.name = "slow"\n')
    return folder


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_that_have_not_begun_take_as_long_as_their_methods_other_seeds(tmp_path, hold, jobs):
    folder = comparison(tmp_path / "all", jobs=jobs)
    hold(folder, folder / "method-1/seed-0")
    (work,), _ = look(folder)
    assert (work.planned, work.done, work.total) == (4, 14, 40)
    assert work.seconds_left({}) == pytest.approx((6 * 3.0 + 10 * 3.0 + 10 * 1.0) / jobs)


def test_half_a_run_stays_out_of_the_other_sections_and_is_drawn_beside_them(tmp_path, hold):
    folder = comparison(tmp_path / "all")
    hold(folder, folder / "method-1/seed-0")
    work, runs = look(folder)
    under_way = UnderWay(work)
    assert list(without(runs, under_way.left_out)) == ["fast"]
    shown = read_runs([folder / "method-0"])
    made = panel(under_way, shown)
    assert made.charts[0].toggles == ("slow, seed 0", "fast")
    assert made.table.rows == [("slow, seed 0", "4 of 10", "50.0 %", "3")]
    assert made.sentences[0] == "all: 4 runs (1 ended, 1 at work, 2 not begun)."


def test_a_run_that_has_just_begun_does_not_take_its_method_from_the_first_place(tmp_path):
    folder = tmp_path / "all"
    write_comparison(folder, {"slow": [[0.5], [0.5]], "fast": [[0.9], [0.05]]})
    runs = read_runs([folder])
    assert list(runs.by_method) == ["slow", "fast"]
    begun = [run for run in runs.by_method["fast"] if run.seed == 1]
    assert list(without(runs, begun)) == ["fast", "slow"]


def test_a_killed_run_is_not_at_work(tmp_path):
    folder = comparison(tmp_path / "all")
    (folder / ".running").write_text("4242")  # as a killed process leaves it: no lock is on it
    (work,), _ = look(folder)
    assert not work.is_going
    assert panel(UnderWay([work]), None) is None
    words = UnderWay([work]).in_words()
    assert words.startswith("Nothing is at work. Finished: 1 of 4 runs. `fedstill resume FOLDER` goes on")


def test_a_run_that_stopped_early_by_itself_is_over(tmp_path):
    folder = write_run(tmp_path / "run", [0.5] * 3)
    (folder / "config.toml").write_text("rounds = 10\n")
    (work,), _ = look(folder)
    assert work.over == work.runs
    assert UnderWay([work]).share == 1.0
    assert UnderWay([work]).in_words() == "1 run: all is done."


@pytest.mark.parametrize("rounds", ['"many"', "-3", "[1]", "nan", "1e400", "true"])
def test_senseless_numbers_of_rounds_and_seeds_are_nobodys_end(tmp_path, rounds):
    folder = comparison(tmp_path / "all")
    (folder / "config.toml").write_text(f"rounds = {rounds}\ncompare.seeds = {rounds}\ncompare.jobs = {rounds}\n")
    (work,), _ = look(folder)
    assert work.planned >= 2
    assert UnderWay([work]).in_words()
