"""Which runs are left, the folders of runs and of engines, and the lock of the place where a bench writes."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench_cases import run_of, small

from fedstill.bench import Cell
from fedstill.bench.plan import (
    BENCH_LOCK,
    Seconds,
    begun_as,
    circumstances,
    claimed,
    estimate_line,
    finished_run,
    longest_first,
    make_jobs,
    make_plan,
    make_run,
    run_folder,
)
from fedstill.bench.results import add_run, cell_key, holding, read_runs
from fedstill.core.errors import FedstillError

ROWS = [{"round": number, "accuracy": 0.1 * number, "seconds": 2.0} for number in (1, 2, 3, 4)]
EXACT = {"precision": "float64"}


def jobs(out, *engines, methods=("fedavg",), seeds=1, **changes):
    cells = [
        Cell(method, "digits", small(method=method, engine=engine, **changes))
        for method in methods
        for engine in engines or ({},)
    ]
    return make_jobs(cells, preset="paper", seeds=seeds, device="cpu", out=out)


def finish(job, rows=ROWS):
    job.folder.mkdir(parents=True)
    (job.folder / "bench.json").write_text(json.dumps(circumstances("cpu", 1)))
    (job.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def labels(some):
    return [job.label for job in some]


def test_jobs_come_seed_by_seed_and_a_cell_that_stands_twice_is_one(tmp_path):
    assert labels(jobs(tmp_path, {}, {}, methods=("fedavg", "fedntd"), seeds=2)) == [
        "fedavg digits seed 0",
        "fedntd digits seed 0",
        "fedavg digits seed 1",
        "fedntd digits seed 1",
    ]


def test_neither_the_results_nor_a_finished_folder_is_run_again(tmp_path):
    recorded, finished, left = some = jobs(tmp_path, seeds=3)
    finish(finished)
    run = run_of(recorded.experiment, [1.0] * 4)
    found = make_plan(some, [run], None)
    assert (labels(found.left), found.done) == (labels([left]), 2)
    assert [(run["seed"], run["accuracy"]) for run in found.finished] == [(1, [10.0, 20.0, 30.0, 40.0])]
    assert [run["seed"] for run in found.runs] == [0, 1]


def test_a_cell_that_asks_for_an_engine_takes_no_other_s_run_and_the_default_takes_any(tmp_path):
    plain, exact = jobs(tmp_path, {}, EXACT)
    default, other = [run_of(small(), [1.0] * 4)], [run_of(small(), [1.0] * 4, engine=EXACT)]
    assert make_plan([exact], default, None).left == [exact]
    assert make_plan([exact, plain], other, None).left == []
    finish(plain)
    assert len(make_plan([plain], other, None).finished) == 1, "a finished folder of its own comes first"


@pytest.mark.parametrize("file", ["bench.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["{}", "[1]", "3", "", "{", '{"round": 1, "accuracy": "x", "at_once": "x"}'])
def test_a_damaged_folder_is_no_finished_run(tmp_path, file, text):
    (job,) = jobs(tmp_path)
    finish(job)
    assert finished_run(job) is not None
    (job.folder / file).write_text(text)
    assert finished_run(job) is None


def test_a_run_that_stopped_before_its_last_round_is_not_finished(tmp_path):
    (job,) = jobs(tmp_path)
    finish(job, ROWS[:3])
    assert finished_run(job) is None


def test_a_column_whose_data_are_not_in_the_folder_is_skipped_with_one_line(tmp_path):
    some = jobs(tmp_path, methods=("fedavg", "fedntd"), data="owner/no-such-set")
    found = make_plan(some, [], tmp_path)
    assert (found.missing, found.left) == (some, [])
    (line,) = found.skipped
    assert line.startswith(f"skipped digits: no 'no-such-set' in {tmp_path}: put it there")
    (tmp_path / "no-such-set").mkdir()
    placed = make_plan(some, [], tmp_path).left
    assert {job.experiment.data.source for job in placed} == {str(tmp_path / "no-such-set")}
    assert [job.key for job in placed] == [job.key for job in some], "the same cells"
    with pytest.raises(FedstillError, match="--data: no folder"):
        make_plan(some, [], tmp_path / "nowhere")


@pytest.mark.parametrize("engine", [{"precision": "bf16"}, {"chunk": 2, "compile": True}])
def test_the_folder_s_name_holds_the_engine_but_not_device_and_threads(tmp_path, engine):
    plain, other = small(), small(engine=engine)
    key = cell_key(plain)
    assert cell_key(other) == key
    first, second = (run_folder(tmp_path, experiment, key).parent.name for experiment in (plain, other))
    assert first == f"fedavg-{key}"
    assert second.startswith(f"{first}-")
    assert len(second) == len(first) + 7
    same = small(engine={**engine, "device": "cpu", "threads": 3})
    assert run_folder(tmp_path, same, key).parent.name == second


@pytest.mark.parametrize(
    ("begun", "goes_on"),
    [
        (small(data="digits", engine={"device": "cpu", "threads": 2}).to_toml(), True),
        (small(engine={"device": "cuda"}).to_toml(), False),
        ("invented_before = 3\n", False),
    ],
    ids=["the same device", "another device", "written by another version"],
)
def test_a_begun_run_goes_on_unless_it_was_begun_elsewhere(tmp_path, begun, goes_on):
    (job,) = jobs(tmp_path)
    assert begun_as(job) == job.experiment
    job.folder.mkdir(parents=True)
    (job.folder / "config.toml").write_text(begun)
    found = begun_as(job)
    assert (found.engine.threads, job.folder.exists()) == ((2, True) if goes_on else (None, False))


def test_a_record_has_percents_seconds_and_what_rounds_logged_beside_their_accuracy(tmp_path):
    (job,) = jobs(tmp_path, {**EXACT, "chunk": 2, "threads": 1})
    rows = [{**row, "pseudo_label_accuracy": share} for row, share in zip(ROWS, (None, 0.5, 0.75, 1.0), strict=True)]
    rows[0]["seconds_prepared"] = 7.25
    run = make_run(job, rows, 9.0123, circumstances("cpu", 3))
    assert (run["accuracy"], run["seconds"], run["prepared"]) == ([10.0, 20.0, 30.0, 40.0], 9.012, 7.25)
    assert run["beside"] == {"pseudo_label_accuracy": [None, 50.0, 75.0, 100.0]}
    assert (run["engine"], run["at_once"]) == ({"chunk": 2, "precision": "float64"}, 3)
    plain = make_run(jobs(tmp_path)[0], ROWS, 1.0, circumstances("cpu", 1))
    assert not {"beside", "engine", "prepared"} & plain.keys()


@pytest.mark.parametrize(
    ("out", "results", "reason"),
    [
        ("file", "results.json", "--out: cannot write to '.*file'"),
        ("file/deep", "results.json", "--out: cannot write to"),
        ("out", "file/results.json", "--results: cannot write"),
    ],
)
def test_a_place_that_cannot_be_one_is_named_before_the_work(tmp_path, out, results, reason):
    (tmp_path / "file").touch()
    with pytest.raises(FedstillError, match=reason), claimed(tmp_path / out, tmp_path / results):
        pytest.fail("it was claimed")


def test_one_bench_at_a_time_works_in_a_folder(tmp_path):
    with claimed(tmp_path / "out", tmp_path / "results.json"):
        with pytest.raises(FedstillError, match=f"another bench works in .*, pid {os.getpid()}: wait or use another"):
            claimed(tmp_path / "out", tmp_path / "results.json").__enter__()
        with claimed(tmp_path / "other", tmp_path / "results.json"):
            pass
    with claimed(tmp_path / "out", tmp_path / "results.json"):
        pass
    assert list(tmp_path.rglob("*.lock")) == []


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / BENCH_LOCK).write_text(f"{gone.pid}\n")
    with claimed(tmp_path, tmp_path / "results.json"):
        pass
    assert list(tmp_path.rglob("*.lock")) == []


def test_several_that_write_results_at_once_lose_no_run(tmp_path):
    """In threads: each opens the lock for itself, as processes do."""
    file = tmp_path / "results.json"

    def add_many(rounds):
        for seed in range(10):
            add_run(file, "tiny", run_of(small(rounds=rounds), [1.0] * rounds, seed=seed))

    with ThreadPoolExecutor(3) as writers:
        list(writers.map(add_many, (1, 2, 3)))
    assert len(read_runs(file)) == 30
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_lock_is_free_again_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), holding(tmp_path / "results.json"):
            raise RuntimeError


# How long runs take, from recorded seconds, and in which order they come.


DEVICE = "cpu x86_64"  # of run_of


def jobs_on(*methods, seeds=1, rounds=10, column="digits", **changes):
    cells = [Cell(method, column, small(method=method, rounds=rounds, **changes)) for method in methods]
    return make_jobs(cells, preset="paper", seeds=seeds, device="cpu", out=Path("out"))


def seconds(*runs, at_once=1):
    return Seconds(runs, device=DEVICE, at_once=at_once)


def test_a_cell_takes_as_long_as_its_other_seeds_did_and_others_of_its_column_as_long_by_the_round():
    fedavg, fedntd, other = *jobs_on("fedavg"), *jobs_on("fedntd", rounds=20), *jobs_on("fedntd", column="letters")
    known = seconds(*(run_of(fedavg.experiment, [1.0], seconds=spent) for spent in (90.0, 110.0)))
    assert [known.of(job) for job in (fedavg, fedntd, other)] == [100.0, 200.0, None]
    known.add(run_of(fedntd.experiment, [1.0], seconds=500.0))
    assert known.of(fedntd) == 500.0


@pytest.mark.parametrize("changes", [{"device": "cuda NVIDIA H200"}, {"at_once": 4}, {"engine": {"precision": "bf16"}}])
def test_runs_on_another_device_with_another_engine_or_in_other_company_say_nothing(changes):
    (job,) = jobs_on("fedavg")
    assert seconds(run_of(job.experiment, [1.0], **changes)).of(job) is None


def test_seconds_before_the_first_round_are_no_part_of_a_round():
    (job,) = jobs_on("fedavg")
    assert seconds(run_of(job.experiment, [1.0], seconds=71.0, prepared=60.0)).of(job) == 11.0


def test_the_line_says_how_many_where_and_how_long():
    some = jobs_on("fedavg", "fedprox", "fedntd", seeds=4, rounds=200)
    known = seconds(run_of(some[0].experiment, [1.0], seconds=210.0, at_once=3), at_once=3)
    assert estimate_line(some, known, "cuda") == "12 runs of 200 rounds, 3 at a time on cuda, about 14 min"
    some += jobs_on("fedavg", column="letters", rounds=1, cohort=2)
    assert estimate_line(some, known, "cuda").startswith("13 runs of 1 to 200 rounds, ")
    assert estimate_line(some, known, "cuda").endswith("about 14 min (1 not estimated)")
    line = estimate_line(jobs_on("fedavg", rounds=1), seconds(), "cpu")
    assert line == "1 run of 1 round, one at a time on cpu, time unknown (no such run is recorded)"


def test_the_longest_run_is_the_least_that_it_takes():
    short, long = jobs_on("fedavg"), jobs_on("fedntd")
    runs = [run_of(job.experiment, [1.0], seconds=spent, at_once=2) for (job,), spent in ((short, 10.0), (long, 50.0))]
    assert seconds(*runs, at_once=2).total(short + long) == 50.0


def test_seeds_come_in_turn_and_within_one_the_longest_first():
    some = jobs_on("fedavg", "fedntd", "fedprox", seeds=2)
    spent = {"fedavg": 10.0, "fedntd": 30.0, "fedprox": 20.0}
    known = seconds(*(run_of(job.experiment, [1.0], seconds=spent[job.row]) for job in some))
    found = [(job.experiment.seed, job.row) for job in longest_first(some, known)]
    assert found == [(seed, row) for seed in (0, 1) for row in ("fedntd", "fedprox", "fedavg")]
