"""`fedstill bench` as a user sees it: what is run, what is not run again, what is told."""

import json
import tomllib

import pytest
from bench_cases import bench, count_runs, forbid_runs, interrupt_after, invoke

from fedstill.bench import workers
from fedstill.bench.results import read_runs


def results(folder, out="runs/bench/tiny"):
    return {(run["row"], run["seed"]): run for run in read_runs(folder / out / "results.json")}


def test_a_table_is_run_written_down_and_shown_beside_the_papers_numbers(folder):
    outcome = bench("tiny", "--table", "1", "--seeds", "2")
    found = results(folder)
    assert set(found) == {(method, seed) for method in ("fedavg", "fedprox") for seed in (0, 1)}
    for (method, seed), run in found.items():
        assert (run["rounds"], run["evaluated"], len(run["accuracy"])) == (3, 1, 3)
        assert run["method"] == {"fedavg": "fedavg", "fedprox": "fedprox(mu=1.0)"}[method]
        (place,) = (folder / "runs/bench/tiny").glob(f"{method}-*{run['key']}")
        rows = [json.loads(line) for line in (place / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()]
        assert run["accuracy"] == [round(100 * row["accuracy"], 2) for row in rows]
    assert found["fedavg", 0]["accuracy"] != found["fedavg", 1]["accuracy"]
    lines = outcome.stdout.splitlines()
    assert lines[:2] == ["tiny, table 1: Accuracy (preset paper)", "On digits."]
    best = sum(max(found["fedprox", seed]["accuracy"]) for seed in (0, 1)) / 2
    shown = next(line for line in lines if line.startswith("fedprox"))
    assert f"{best:.2f} ±" in shown
    assert " 41.50 " in shown
    assert f" {best - 41.5:+.2f} " in shown
    assert "4 runs of 3 rounds, about" in outcome.stderr
    assert "4/4 runs" in outcome.stderr


def test_a_second_call_runs_nothing(folder, monkeypatch):
    first = bench("tiny", "--table", "1")
    file = folder / "runs/bench/tiny/results.json"
    text, written = file.read_text(), file.stat().st_mtime_ns
    forbid_runs(monkeypatch)
    again = bench("tiny", "--table", "1")
    assert again.stdout == first.stdout
    assert "nothing to run: 2 runs done" in again.stderr
    assert (file.read_text(), file.stat().st_mtime_ns) == (text, written)


def test_more_seeds_run_only_the_new_ones(folder, monkeypatch):
    bench("tiny", "--table", "1")
    seen = count_runs(monkeypatch)
    bench("tiny", "--table", "1", "--seeds", "2")
    assert sorted(seen) == [("fedavg", 1), ("fedprox", 1)]


def test_the_same_cell_in_another_table_is_not_run_again(folder, monkeypatch):
    bench("tiny", "--table", "1")
    forbid_runs(monkeypatch)
    bench("tiny", "--table", "2", "--columns", "digits")


def test_finished_folders_are_taken_when_the_results_are_lost(folder, monkeypatch):
    bench("tiny", "--table", "1")
    before = results(folder)
    (folder / "runs/bench/tiny/results.json").unlink()
    forbid_runs(monkeypatch)
    bench("tiny", "--table", "1")
    for place, run in results(folder).items():
        assert {**run, "seconds": 0} == {**before[place], "seconds": 0}


def test_an_interrupted_bench_goes_on_and_ends_as_if_nothing_had_happened(folder, monkeypatch):
    bench("tiny", "--table", "1", "--out", "whole")
    interrupt_after(monkeypatch, 4)  # the second run has one round behind it
    stopped = bench("tiny", "--table", "1", "--out", "parts", code=130)
    assert "go on with the same command" in stopped.stderr.splitlines()[-1]
    assert len(results(folder, "parts")) == 1
    seen = count_runs(monkeypatch)
    bench("tiny", "--table", "1", "--out", "parts")
    assert len(seen) == 1, "the finished run is not run again"
    (log,) = (folder / "parts").glob(f"{seen[0][0]}*/seed-0/log.txt")
    assert "resuming after round 1" in log.read_text()
    whole, parts = results(folder, "whole"), results(folder, "parts")
    assert {place: run["accuracy"] for place, run in parts.items()} == {
        place: run["accuracy"] for place, run in whole.items()
    }


def test_a_finished_run_keeps_its_models_and_not_its_checkpoints(folder):
    bench("tiny", "--table", "1", "--methods", "fedavg")
    (place,) = (folder / "runs/bench/tiny").glob("fedavg-*/seed-0")
    assert (place / "last" / "weights.safetensors").is_file()
    assert not (place / "checkpoints").exists()


def test_a_column_whose_data_are_not_there_is_skipped_with_one_line(folder):
    (folder / "sets").mkdir()
    outcome = bench("tiny", "--table", "2", "--data", "sets")
    (line,) = (line for line in outcome.stderr.splitlines() if "skipped" in line)
    assert line.startswith("fedstill: skipped missing: no 'no-such-set' in sets: put it there")
    assert {run["column"] for run in results(folder).values()} == {"digits"}


def test_data_are_taken_from_the_folder_and_are_the_same_cell(folder):
    place = folder / "sets" / "no-such-set"
    place.mkdir(parents=True)
    lines = ["a,b,label", *(f"{i % 7},{i % 5},{i % 2}" for i in range(60))]
    (place / "train.csv").write_text("\n".join(lines) + "\n")
    bench("tiny", "--table", "2", "--columns", "missing", "--methods", "fedavg", "--data", "sets")
    ((_, run),) = results(folder).items()
    (config,) = (folder / "runs/bench/tiny").glob("*/seed-0/config.toml")
    assert tomllib.loads(config.read_text())["data"]["source"] == str(place)
    place.rename(folder / "elsewhere")
    again = bench("tiny", "--table", "2", "--columns", "missing", "--methods", "fedavg", "--data", "sets")
    assert "skipped" not in again.stderr, "what is done needs no data"
    assert f"{max(run['accuracy']):.2f}" in again.stdout


def test_data_that_cannot_be_had_are_told_once_with_the_cure_and_stop_no_other_run(folder):
    outcome = bench("tiny", "--table", "2", "--seeds", "2", code=1)
    assert {run["column"] for run in results(folder).values()} == {"digits"}
    (line,) = (line for line in outcome.stderr.splitlines() if "no-such-set" in line)
    assert line.startswith("fedstill: skipped missing: ")
    assert "give --data DIR" in line
    assert outcome.stderr.splitlines()[-1] == "fedstill: 4 runs failed; the same command tries again"
    assert "4 runs of 3 rounds, about" in outcome.stderr


def test_when_nothing_can_run_no_table_and_no_files_are_named(folder):
    outcome = bench("tiny", "--table", "2", "--columns", "missing", code=1)
    assert outcome.stdout == ""
    assert sum("no-such-set" in line for line in outcome.stderr.splitlines()) == 1
    assert outcome.stderr.splitlines()[-1] == "fedstill: nothing to run: 0 runs done, 2 without data"
    (folder / "sets").mkdir()
    outcome = bench("tiny", "--table", "2", "--columns", "missing", "--data", "sets", "--out", "other", code=1)
    assert outcome.stdout == ""
    assert not (folder / "other").exists()
    assert outcome.stderr.splitlines()[-1] == "fedstill: nothing to run: 0 runs done, 2 skipped"


def test_at_the_end_only_places_that_exist_are_named(folder):
    bench("tiny", "--table", "1", "--results", "kept.json", "--out", "first")
    assert bench("tiny", "--table", "1", "--results", "kept.json", "--out", "first").stdout.endswith("below first.\n")
    again = bench("tiny", "--table", "1", "--results", "kept.json", "--out", "second")
    assert again.stdout.splitlines()[-1] == "Curves and seconds of every run are in kept.json."


def test_a_failing_run_does_not_stop_the_others(folder, monkeypatch):
    run = workers.run

    def failing(experiment, **options):
        if experiment.method.name == "fedavg" and experiment.seed == 0 and options.get("run_dir"):
            raise RuntimeError("out of memory")
        return run(experiment, **options)

    monkeypatch.setattr(workers, "run", failing)
    outcome = bench("tiny", "--table", "1", "--seeds", "2", code=1)
    assert set(results(folder)) == {("fedavg", 1), ("fedprox", 0), ("fedprox", 1)}
    (line,) = (line for line in outcome.stderr.splitlines() if "failed: " in line)
    assert "fedavg digits seed 0 failed: RuntimeError: out of memory" in line
    (told,) = (folder / "runs/bench/tiny").glob("fedavg-*/seed-0/error.txt")
    assert "Traceback" in told.read_text()
    monkeypatch.setattr(workers, "run", run)
    bench("tiny", "--table", "1", "--seeds", "2")
    assert ("fedavg", 0) in results(folder)


def test_a_dry_run_says_how_long_it_would_take_and_leaves_nothing(folder):
    outcome = bench("tiny", "--table", "1", "--seeds", "3", "--dry-run")
    assert outcome.stdout.startswith("6 runs of 3 rounds, about ")
    assert outcome.stdout.rstrip().endswith("one at a time on cpu")
    assert not (folder / "runs").exists()
    answer = json.loads(bench("tiny", "--table", "1", "--dry-run", "--format", "json").stdout)
    assert answer["runs"] == 2
    assert 0 < answer["seconds"] < 60


def test_a_dry_run_counts_finished_folders_but_writes_nothing_down(folder):
    bench("tiny", "--table", "1")
    file = folder / "runs/bench/tiny/results.json"
    file.unlink()
    outcome = bench("tiny", "--table", "1", "--seeds", "2", "--dry-run")
    assert outcome.stdout.startswith("2 runs of 3 rounds, about ")
    assert not file.exists()
    assert "measuring" not in outcome.stderr, "the folders tell how long it takes"


def test_what_is_measured_is_told_before_and_as_it_goes(folder):
    outcome = bench("tiny", "--table", "2", "--dry-run")
    lines = [line for line in outcome.stderr.splitlines() if "measur" in line]
    told = ["measuring a few rounds of 2 settings ...", "measured 1 of 2", "measured 2 of 2"]
    assert lines == [f"fedstill: {line}" for line in told]


@pytest.mark.parametrize("file", ["bench.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["{}", "[1]", "3", "", "{", '{"round": 1, "accuracy": "x", "at_once": "x"}'])
def test_a_damaged_folder_is_run_again(folder, file, text):
    bench("tiny", "--table", "1", "--methods", "fedavg")
    before = results(folder)
    (place,) = (folder / "runs/bench/tiny").glob("fedavg-*/seed-0")
    (folder / "runs/bench/tiny/results.json").unlink()
    (place / file).write_text(text)
    bench("tiny", "--table", "1", "--methods", "fedavg")
    assert results(folder)["fedavg", 0]["accuracy"] == before["fedavg", 0]["accuracy"]


def test_settings_stand_in_the_title_and_other_rounds_are_not_set_off_against_the_paper(folder):
    words = ["tiny", "--table", "1", "--set", "rounds=2", "--set", "local.lr=0.2"]
    outcome = bench(*words)
    assert outcome.stdout.splitlines()[0].endswith("(preset paper, changed: rounds=2, local.lr=0.2)")
    answer = json.loads(bench(*words, "--format", "json").stdout)
    assert answer["settings"] == ["rounds=2", "local.lr=0.2"]
    for row in answer["columns"][0]["rows"]:
        assert row["difference"] == {"best": None, "last_ten": None, "last_round": None}
        assert row["paper"]["best"] in (33.02, 41.5)
    same_rounds = json.loads(bench("tiny", "--table", "1", "--set", "local.lr=0.2", "--format", "json").stdout)
    assert same_rounds["columns"][0]["rows"][0]["difference"]["best"] is not None


def test_json_has_ours_the_papers_and_the_differences(folder):
    answer = json.loads(bench("tiny", "--table", "1", "--format", "json").stdout)
    assert (answer["paper"], answer["table"], answer["preset"]) == ("tiny", "1", "paper")
    (column,) = answer["columns"]
    fedavg = column["rows"][0]
    assert fedavg["row"] == "fedavg"
    assert fedavg["best"]["mean"] == max(results(folder)["fedavg", 0]["accuracy"])
    assert fedavg["paper"] == {"best": 33.02, "speedup": 1.0}
    assert fedavg["difference"]["best"] == pytest.approx(fedavg["best"]["mean"] - 33.02)


def test_without_a_table_the_tables_are_listed_with_what_is_done(folder):
    bench("tiny", "--table", "1", "--methods", "fedavg", "--seeds", "2")
    lines = bench("tiny").stdout.splitlines()
    assert lines[0] == "tiny: A tiny paper"
    assert "preset paper (shown): as printed" in lines
    start = lines.index("table 1: Accuracy")
    assert lines[start + 1 : start + 4] == [
        "  1 of 2 cells have a run, 2 runs with all seeds", "  columns: digits", "  methods: fedavg, fedprox",
    ]  # fmt: skip
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


def test_settings_change_every_cell_and_stay_out_of_the_documented_results(folder):
    (folder / "docs" / "results").mkdir(parents=True)
    bench("tiny", "--table", "1", "--methods", "fedavg", "--set", "rounds=2")
    assert len(results(folder)["fedavg", 0]["accuracy"]) == 2
    assert not (folder / "docs/results/tiny.json").exists()
    bench("tiny", "--table", "1", "--methods", "fedavg")
    (run,) = read_runs(folder / "docs/results/tiny.json")
    assert run["rounds"] == 3


def test_a_setting_that_fits_only_the_chosen_methods_is_taken(folder):
    bench("tiny", "--table", "1", "--methods", "fedprox", "--set", "method.mu=0.5")
    ((_, run),) = results(folder).items()
    assert run["method"] == "fedprox(mu=0.5)"
    outcome = invoke("tiny", "--table", "1", "--set", "method.mu=0.5")
    assert outcome.exit_code == 2
    assert "fedavg in digits: " in outcome.stderr
    assert "method.mu" in outcome.stderr
