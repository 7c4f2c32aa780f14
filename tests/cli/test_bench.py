"""`fedstill bench` as a user sees it: what is run, what is not run again, what is shown."""

import json
from pathlib import Path

import pytest
import torch
from bench_cases import RECIPE, bench, fake_runs, forbid_runs, invoke, run_of, small, write_paper

from fedstill.bench import Cell, workers
from fedstill.bench.plan import Seconds, claimed, make_jobs
from fedstill.bench.results import read_runs
from fedstill.bench.workers import Message
from fedstill.cli import bench as module
from fedstill.cli.bench import BenchProgress
from fedstill.core.errors import FedstillError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with one paper; nothing is written outside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_paper(tmp_path)
    return tmp_path


@pytest.fixture
def seen(folder, monkeypatch):
    """Nothing is trained, and data on the hub cannot be had; the list of (method, seed) that were run."""

    def load(experiment):
        if experiment.data.source == "owner/no-such-set":
            raise FedstillError("the hub does not give 'owner/no-such-set'")

    monkeypatch.setattr(workers, "load_source", load)
    monkeypatch.setattr(workers, "build_federation", lambda experiment, source: None)
    return fake_runs(monkeypatch)


def results(folder, out="runs/bench/tiny"):
    return {(run["row"], run["seed"]): run for run in read_runs(folder / out / "results.json")}


def test_a_table_is_run_written_down_and_shown_beside_the_papers_numbers(folder):
    outcome = bench("tiny", "--table", "1", "--seeds", "2", "--set", "rounds=2")
    found = results(folder)
    assert set(found) == {(method, seed) for method in ("fedavg", "fedprox") for seed in (0, 1)}
    for (method, seed), run in found.items():
        assert run["method"] == {"fedavg": "fedavg", "fedprox": "fedprox(mu=1.0)"}[method]
        (place,) = (folder / "runs/bench/tiny").glob(f"{method}-*{run['key']}")
        rows = [json.loads(line) for line in (place / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()]
        assert run["accuracy"] == [round(100 * row["accuracy"], 2) for row in rows]
        assert (place / f"seed-{seed}" / "last" / "weights.safetensors").is_file()
        assert not (place / f"seed-{seed}" / "checkpoints").exists(), "a finished run needs none"
    assert found["fedavg", 0]["accuracy"] != found["fedavg", 1]["accuracy"]
    lines = outcome.stdout.splitlines()
    assert lines[:2] == ["tiny, table 1: Accuracy (preset paper, changed: rounds=2)", "On digits."]
    shown = next(line for line in lines if line.startswith("fedprox"))
    assert f"{sum(max(found['fedprox', seed]['accuracy']) for seed in (0, 1)) / 2:.2f} ±" in shown
    assert " 41.50 " in shown
    assert "4 runs of 2 rounds, one at a time on cpu, time unknown" in outcome.stderr
    assert "4/4 runs" in outcome.stderr


def test_a_second_call_runs_nothing(folder, seen, monkeypatch):
    first = bench("tiny", "--table", "1")
    file = folder / "runs/bench/tiny/results.json"
    text, written = file.read_text(), file.stat().st_mtime_ns
    forbid_runs(monkeypatch)
    again = bench("tiny", "--table", "1")
    assert again.stdout == first.stdout
    assert "nothing to run: 2 runs done" in again.stderr
    assert (file.read_text(), file.stat().st_mtime_ns) == (text, written)
    bench("tiny", "--table", "2", "--columns", "digits")


def test_more_seeds_run_only_the_new_ones(seen):
    bench("tiny", "--table", "1")
    seen.clear()
    bench("tiny", "--table", "1", "--seeds", "2")
    assert sorted(seen) == [("fedavg", 1), ("fedprox", 1)]


def test_finished_folders_are_taken_when_the_results_are_lost(folder, seen, monkeypatch):
    bench("tiny", "--table", "1")
    before = results(folder)
    (folder / "runs/bench/tiny/results.json").unlink()
    forbid_runs(monkeypatch)
    bench("tiny", "--table", "1")
    assert results(folder) == before


@pytest.mark.slow
def test_an_interrupted_bench_goes_on_and_ends_as_if_nothing_had_happened(folder, monkeypatch):
    bench("tiny", "--table", "1", "--out", "whole")
    on_round, left = workers.Ticker.on_round, [4]  # the second run has one round behind it

    def interrupted(self, row):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return on_round(self, row)

    monkeypatch.setattr(workers.Ticker, "on_round", interrupted)
    stopped = bench("tiny", "--table", "1", "--out", "parts", code=130)
    assert "go on with the same command" in stopped.stderr.splitlines()[-1]
    ((row, _),) = results(folder, "parts")
    bench("tiny", "--table", "1", "--out", "parts")
    (log,) = (log for log in (folder / "parts").glob("*/seed-0/log.txt") if not log.parts[-3].startswith(row))
    assert "resuming after round 1" in log.read_text()
    whole, parts = results(folder, "whole"), results(folder, "parts")
    assert {place: run["accuracy"] for place, run in parts.items()} == {
        place: run["accuracy"] for place, run in whole.items()
    }


def test_a_column_whose_data_are_not_in_the_folder_is_skipped_with_one_line(folder, seen):
    (folder / "sets").mkdir()
    outcome = bench("tiny", "--table", "2", "--data", "sets")
    (line,) = (line for line in outcome.stderr.splitlines() if "skipped" in line)
    assert line.startswith("fedstill: skipped missing: no 'no-such-set' in sets: put it there")
    assert {run["column"] for run in results(folder).values()} == {"digits"}
    outcome = bench("tiny", "--table", "2", "--columns", "missing", "--data", "sets", "--out", "other", code=1)
    assert outcome.stdout == "", "nothing could run: no table, and no files are named"
    assert outcome.stderr.splitlines()[-1] == "fedstill: nothing to run: 0 runs done, 2 skipped"
    assert not (folder / "other").exists()


def test_data_that_the_hub_does_not_give_are_told_once_with_the_cure_and_stop_no_other_run(folder, seen):
    outcome = bench("tiny", "--table", "2", "--seeds", "2", code=1)
    assert {run["column"] for run in results(folder).values()} == {"digits"}
    (line,) = (line for line in outcome.stderr.splitlines() if "no-such-set" in line)
    assert "--data DIR takes it from a folder of yours" in line
    assert outcome.stderr.splitlines()[-1] == "fedstill: 4 runs failed; the same command tries again"
    assert bench("tiny", "--table", "2", "--columns", "missing", code=1).stdout == ""


def test_a_dry_run_says_how_long_it_would_take_and_leaves_nothing(folder, seen):
    with claimed(folder / "out", folder / "out/results.json"):
        outcome = bench("tiny", "--table", "1", "--seeds", "3", "--out", "out", "--dry-run")
        unknown = "6 runs of 3 rounds, one at a time on cpu, time unknown (no such run is recorded)\n"
        assert outcome.stdout == unknown
    bench("tiny", "--table", "1")
    file = folder / "runs/bench/tiny/results.json"
    file.unlink()
    answer = json.loads(bench("tiny", "--table", "1", "--seeds", "3", "--dry-run", "--format", "json").stdout)
    text = "4 runs of 3 rounds, one at a time on cpu, about 24 s"
    assert answer == {"runs": 4, "seconds": 24.0, "text": text}, "finished folders tell how long it takes"
    assert not file.exists()
    assert len(seen) == 2


def test_other_rounds_are_not_set_off_against_the_paper(folder, seen):
    words = ["tiny", "--table", "1", "--set", "rounds=2", "--set", "local.lr=0.2", "--format", "json"]
    answer = json.loads(bench(*words).stdout)
    assert answer["settings"] == ["rounds=2", "local.lr=0.2"]
    for row in answer["columns"][0]["rows"]:
        assert row["difference"] == {"best": None, "last_ten": None, "last_round": None}
        assert row["paper"]["best"] in (33.02, 41.5)
    same_rounds = json.loads(bench("tiny", "--table", "1", "--set", "local.lr=0.2", "--format", "json").stdout)
    assert same_rounds["columns"][0]["rows"][0]["difference"]["best"] is not None


def test_json_has_ours_the_papers_and_the_differences(folder, seen):
    answer = json.loads(bench("tiny", "--table", "1", "--format", "json").stdout)
    assert (answer["paper"], answer["table"], answer["preset"]) == ("tiny", "1", "paper")
    fedavg = answer["columns"][0]["rows"][0]
    assert (fedavg["row"], fedavg["best"]["mean"], fedavg["paper"]) == ("fedavg", 30.0, {"best": 33.02, "speedup": 1.0})
    assert fedavg["difference"]["best"] == pytest.approx(30.0 - 33.02)


def test_without_a_table_the_tables_are_listed_with_what_is_done(seen):
    bench("tiny", "--table", "1", "--methods", "fedavg", "--seeds", "2")
    lines = bench("tiny").stdout.splitlines()
    assert lines[0] == "tiny: A tiny paper"
    assert "preset paper (shown): as printed" in lines
    start = lines.index("table 1: Accuracy")
    assert lines[start + 1] == "  1 of 2 cells have a run, 2 runs with all seeds"
    assert lines[start + 2 : start + 4] == ["  columns: digits", "  methods: fedavg, fedprox"]
    tables = json.loads(bench("tiny", "--format", "json").stdout)["tables"]
    found = [tuple(table[key] for key in ("name", "runs", "done", "cells_done")) for table in tables]
    assert found == [("1", 2, 2, 1), ("2", 4, 2, 1)]


def test_names_are_listed_whole(folder):
    recipe = folder / "benchmarks/tiny/recipe.py"
    columns = [f"digits-with-a-long-name-{number}" for number in range(9)] + ["very-" * 30 + "long"]
    more = ", ".join(f'*(cell(row, "{column}") for row in OPTIONS)' for column in columns)
    recipe.write_text(recipe.read_text().replace("DIGITS + MISSING", f"DIGITS + ({more},)"))
    listed = bench("tiny").stdout
    assert all(column in listed.replace(",", "").split() for column in columns)


def test_changed_settings_stay_out_of_the_documented_results(folder, seen):
    (folder / "docs" / "results").mkdir(parents=True)
    bench("tiny", "--table", "1", "--methods", "fedavg", "--set", "rounds=2")
    assert len(results(folder)["fedavg", 0]["accuracy"]) == 2
    assert not (folder / "docs/results/tiny.json").exists()
    bench("tiny", "--table", "1", "--methods", "fedavg")
    (run,) = read_runs(folder / "docs/results/tiny.json")
    assert run["rounds"] == 3


def test_rows_that_differ_in_engine_alone_are_two_runs_in_two_folders(folder, seen):
    exact = 'DIGITS += (Cell("exact", "digits", DIGITS[0].experiment.replace(engine={"precision": "float64"})),)'
    recipe = folder / "benchmarks/tiny/recipe.py"
    recipe.write_text(RECIPE.replace("MISSING = ", f"{exact}\nMISSING = "))
    words = ("tiny", "--table", "1", "--methods", "fedavg,exact", "--out", "out")
    answer = json.loads(bench(*words, "--format", "json").stdout)
    assert seen == [("fedavg", 0)] * 2
    assert len(list((folder / "out").glob("fedavg-*/seed-0/model"))) == 2
    rows = {row["row"]: row for row in answer["columns"][0]["rows"]}
    assert (rows["fedavg"]["engines"], rows["exact"]["engines"]) == ([""], ["precision = float64"])
    assert "digits, 3 rounds, precision = float64 (exact)\n" in bench(*words).stdout


@pytest.mark.parametrize("engine", ["ray", "spawned"])
def test_several_runs_at_a_time_are_whole_runs_and_recorded_as_such(folder, seen, monkeypatch, engine):
    asked_for = []

    class Pool:
        def do(self, jobs, hear):
            asked_for.append([job.experiment.engine.name for job in jobs])
            workers.do_jobs(jobs, hear, at_once=1)

    def pool_of(asked, at_once, *_, **__):
        asked_for.append((asked.engine.name, asked.cluster.address, at_once))
        return Pool()

    monkeypatch.setattr(workers, "pool_of", pool_of)
    words = ("tiny", "--table", "1", "--out", "out", "--set", "cluster.address=here:1")
    bench(*words, "--jobs", "2", "--set", f"engine.name={engine}")
    where = {"ray": "ray", "spawned": "auto"}  # processes of this machine need no section
    assert asked_for == [(where[engine], "here:1", 2), ["auto", "auto"]]
    assert [run.get("engine") for run in results(folder, "out").values()] == [None, None]
    assert "nothing to run: 2 runs done" in bench("tiny", "--table", "1", "--out", "out").stderr


@pytest.mark.ray
def test_runs_on_ray_have_the_records_of_runs_here(folder):
    words = ("tiny", "--table", "1", "--seeds", "1", "--device", "cpu")
    bench(*words, "--out", "one")
    bench(*words, "--out", "two", "--jobs", "2", "--set", "engine.name=ray")
    one, two = ({key: run["accuracy"] for key, run in results(folder, out).items()} for out in ("one", "two"))
    assert one == two
    assert {run["at_once"] for run in results(folder, "two").values()} == {2}


def test_a_second_bench_in_the_same_folder_is_refused_but_may_look(folder, seen):
    with claimed(folder / "out", folder / "out/results.json"):
        outcome = invoke("tiny", "--table", "1", "--out", "out")
        assert outcome.exit_code == 2
        assert "another bench works in 'out'" in outcome.stderr
        bench("tiny", "--table", "1", "--out", "other", "--results", "out/results.json")
        shown = bench("tiny", "--table", "1", "--out", "out")
        assert "nothing to run: 2 runs done" in shown.stderr, "looking is free"


@pytest.mark.parametrize(
    ("words", "named", "cure"),
    [
        (["tny"], "'tny'", "'tiny'"),
        (["tiny", "--table", "7"], "'7'", "1, 2"),
        (["tiny", "--table", "1", "--columns", "digit"], "'digit'", "'digits'"),
        (["tiny", "--methods", "fedavg"], "--methods", "--table"),
        (["tiny", "--table", "1", "--preset", "relased"], "'relased'", "'released'"),
        (["tiny", "--table", "1", "--preset", "released"], "'released'", "2"),
        (["tiny", "--table", "1", "--seeds", "0"], "--seeds", "1"),
        (["tiny", "--table", "1", "--jobs", "0"], "--jobs", "1"),
        (["tiny", "--table", "1", "--device", "gpu"], "gpu", "cuda"),
        (["tiny", "--table", "1", "--data", "nowhere"], "--data", "nowhere"),
        (["tiny", "--table", "1", "--set", "roudns=3"], "roudns", "'rounds'"),
        (["tiny", "--table", "1", "--results", "benchmarks/tiny/recipe.py"], "recipe.py", "--results"),
        (["tiny", "--table", "1", "--out", "/proc/xx"], "--out", "/proc"),
        (["tiny", "--table", "1", "--out", "out", "--results", "/proc/x.json"], "--results", "/proc"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_with_the_nearest_right_word(folder, words, named, cure):
    """/proc is a folder that no user may write to, not even root."""
    outcome = invoke(*words)
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert named in line
    assert cure in line
    assert outcome.stdout == ""
    assert not (folder / "runs").exists()


CELLS = [Cell("fedavg", "digits", small(rounds=100)), Cell("fedntd", "letters", small(rounds=100, method="fedntd"))]
JOBS = make_jobs(CELLS, preset="paper", seeds=1, device="cpu", out=Path("out"))


@pytest.fixture
def now(monkeypatch):
    """The clock, to be moved by hand."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    return clock


def progress_of(jobs, *spent, terminal=False):
    pairs = zip(jobs, spent, strict=False)
    runs = [run_of(job.experiment, [1.0], seconds=seconds, column=job.column) for job, seconds in pairs]
    return BenchProgress(jobs, Seconds(runs, device="cpu x86_64", at_once=1), terminal=terminal)


def done(number, **changes):
    run = run_of(JOBS[number].experiment, [10.0, 20.0], column=JOBS[number].column, **{"rounds": 2, **changes})
    return Message(number, run=run)


def test_a_finished_run_is_a_line_with_its_numbers_and_the_time_left(now, capsys):
    with progress_of(JOBS, 100.0, 300.0) as progress:
        now[0] = 50.0
        progress.hear(done(0, seconds=50.0, device="another"))
        progress.hear(Message(1, error="out of memory"))
    first, second = capsys.readouterr().err.splitlines()
    # a quarter of the estimated work took 50 s
    assert first == "1/2 runs  fedavg digits seed 0: best 20.00 %, last 10 15.00 %, 50 s  2 min left"
    assert second == "2/2 runs, 1 failed  fedntd letters seed 0 failed: out of memory"
    assert progress.failed == 1


def test_a_run_that_ends_corrects_the_time_of_the_others(now):
    """Estimated as long as the second, the first took 100 s; the second's share of the work is then a half."""
    twins = make_jobs([CELLS[0]], preset="paper", seeds=2, device="cpu", out=Path("out"))
    with progress_of(twins) as progress:
        now[0] = 100.0
        progress.hear(done(0, seconds=100.0, rounds=100))
        assert progress.seconds.of(twins[1]) == 100.0
        assert progress.left == "2 min left"


def test_rounds_of_an_earlier_start_do_not_count_as_speed(now):
    with progress_of(JOBS[:1], 100.0) as progress:
        progress.hear(Message(0, round=50))
        assert progress.left == ""
        now[0] = 10.0
        progress.hear(Message(0, round=75))
        assert progress.left == "10 s left"


def test_without_an_estimate_rounds_are_the_measure(now):
    with progress_of(JOBS) as progress:
        progress.hear(Message(0, round=0))
        now[0] = 9.0
        progress.hear(Message(0, round=20))
        assert progress.done == pytest.approx(0.1)
        assert progress.left == "81 s left"


def test_silence_is_broken_once_in_a_while(now, capsys):
    with progress_of(JOBS, 100.0, 300.0) as progress:
        progress.hear(Message(0, doing="simclr: epoch 3/100"))
        now[0] = 61.0
        progress.hear(Message(0, doing="simclr: epoch 4/100"))
        progress.hear(Message(0, round=1))
        now[0] = 122.0
        progress.hear(Message(0, round=2))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "0/2 runs  fedavg digits seed 0, simclr: epoch 4/100"
    assert second.startswith("0/2 runs  fedavg digits seed 0, round 2/100")


def test_a_terminal_gets_one_bar_and_a_line_a_run(now, capsys):
    with progress_of(JOBS, 100.0, 300.0, terminal=True) as progress:
        progress.hear(Message(0, round=50))
        task = progress.bar.tasks[0]
        assert (task.completed, task.total) == (0.125, 1.0)
        assert (task.fields["label"], task.fields["count"]) == ("fedavg digits seed 0, round 50/100", "0/2 runs")
        progress.hear(done(0))
        assert task.fields["count"] == "1/2 runs"
    shown = capsys.readouterr()
    assert "fedavg digits seed 0: best 20.00 %" in shown.err
    assert shown.out == ""


def test_runs_that_take_no_time_at_all_are_counted_too(now):
    with progress_of(JOBS, 0.0, 0.0) as progress:
        progress.hear(Message(0, round=100))
        assert progress.done == 0.5


def test_the_same_reason_is_told_once(now, capsys):
    with progress_of(JOBS) as progress:
        for number in (0, 1):
            progress.hear(Message(number, error="no such data"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("fedavg digits seed 0 failed: no such data")
    assert second.endswith("fedntd letters seed 0 failed: for the same reason")


def rewrite_code(folder, code):
    """Let the record and the folder of fedavg say that other sources have made them."""
    for file in [folder / "runs/bench/tiny/results.json", *folder.glob("runs/bench/tiny/fedavg*/seed-0/bench.json")]:
        content = json.loads(file.read_text())
        for made in content.get("runs", [content]):
            if made.get("row", "fedavg") == "fedavg":
                made["code"] = code
        file.write_text(json.dumps(content))


def test_a_run_of_other_code_is_named_and_done_again_when_asked_for(folder, seen):
    words = ("tiny", "--table", "1")
    assert "recorded with" not in bench(*words).stderr
    rewrite_code(folder, {"loop/round.py": "00000000"})
    seen.clear()
    told = bench(*words).stderr
    assert "fedavg digits seed 0 recorded with other code: 1 module changed: loop/round.py" in told
    assert "fedprox" not in told
    assert seen == []
    bench(*words, "--rerun-changed")
    assert seen == [("fedavg", 0)]
    assert "recorded with" not in bench(*words).stderr


def test_an_old_record_says_that_its_code_is_unknown(folder, seen):
    bench("tiny", "--table", "1")
    file = folder / "runs/bench/tiny/results.json"
    content = json.loads(file.read_text())
    for run in content["runs"]:
        del run["code"]
    file.write_text(json.dumps(content))
    seen.clear()
    told = bench("tiny", "--table", "1", "--rerun-changed").stderr
    assert "fedavg digits seed 0, fedprox digits seed 0 recorded without its code: unknown" in told
    assert seen == [], "unknown is not changed"
