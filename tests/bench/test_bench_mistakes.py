"""Mistakes of a call, of a recipe, of the paper's numbers and of places are one line each."""

import json

import pytest
from bench_cases import RECIPE, bench, invoke, run_of, small, write_paper

from fedstill.bench.results import write_runs


@pytest.mark.parametrize(
    ("words", "named", "cure"),
    [
        (["tny"], "'tny'", "'tiny'"),
        (["tiny", "--table", "7"], "'7'", "1, 2"),
        (["tiny", "--table", "1", "--columns", "digit"], "'digit'", "'digits'"),
        (["tiny", "--table", "1", "--methods", "fedavg,fedporx"], "'fedporx'", "'fedprox'"),
        (["tiny", "--table", "1", "--methods", ""], "--methods", "fedavg,fedprox"),
        (["tiny", "--methods", "fedavg"], "--methods", "--table"),
        (["tiny", "--table", "1", "--preset", "relased"], "'relased'", "'released'"),
        (["tiny", "--table", "1", "--preset", "released"], "'released'", "2"),
        (["tiny", "--table", "1", "--seeds", "0"], "--seeds", "at least 1"),
        (["tiny", "--table", "1", "--jobs", "none"], "--jobs", "auto"),
        (["tiny", "--table", "1", "--jobs", "0"], "--jobs", "from 1"),
        (["tiny", "--table", "1", "--device", "gpu"], "gpu", "cuda"),
        (["tiny", "--table", "1", "--data", "nowhere"], "--data", "nowhere"),
        (["tiny", "--table", "1", "--set", "seed=3"], "seed", "--seeds"),
        (["tiny", "--table", "1", "--set", "roudns=3"], "roudns", "'rounds'"),
        (["tiny", "--table", "1", "--results", "benchmarks/tiny/recipe.py"], "recipe.py", "--results"),
        (["tiny", "--table", "1", "--out", "benchmarks/tiny/recipe.py"], "--out", "is a file"),
        (["tiny", "--table", "1", "--out", "benchmarks/tiny/recipe.py/deep"], "--out", "is a file"),
        (["tiny", "--table", "1", "--results", "benchmarks/tiny/recipe.py/x.json"], "--results", "is a file"),
        (["tiny", "--table", "1", "--results", "benchmarks"], "--results", "is a folder"),
        (["."], "'.'", "no recipe.py"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_with_the_nearest_right_word(folder, words, named, cure):
    outcome = invoke(*words)
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert named in line
    assert cure in line
    assert outcome.stdout == ""
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("RECIPE = 3", "RECIPE = Recipe"),
        ("x = 1\nraise ValueError('no')", "line 2: ValueError: no"),
        (RECIPE.replace('"rounds": 3', '"roudns": 3'), "'rounds'"),
        (RECIPE.replace('"1": Table("1"', '"1": Table("9"'), "stands under '1'"),
        (RECIPE.replace("DIGITS, note", "DIGITS + DIGITS, note"), "fedavg twice"),
        (RECIPE.replace('"released": {"2"', '"relased": {"2"'), "same names"),
        (RECIPE.replace('{"2": TABLES["2"]}', "{}"), "preset 'released' has no table"),
        (RECIPE.replace('DIGITS, note="On digits."', "()"), "table '1' has no cell"),
        (RECIPE.replace('DIGITS, note="On digits."', '(Cell("r", "c", "fedavg"),)'), "'fedavg' is no Experiment"),
        (RECIPE.replace('DIGITS, note="On digits."', '("fedavg",)'), "cells must be a tuple of Cell"),
        (RECIPE.replace('DIGITS, note="On digits."', "DIGITS[0]"), "cells must be a tuple of Cell"),
        (RECIPE.replace('cell(row, "digits")', "cell(row, 3)"), "column 3 must be texts"),
        (RECIPE.replace('{"paper": "as printed", "released": "as in its code"}', '["paper", "released"]'), "dicts"),
        (RECIPE.replace('{"2": TABLES["2"]}', '[TABLES["2"]]'), "a dict of Table"),
        (RECIPE.replace('{"2": TABLES["2"]}', '{"2": DIGITS}'), "a dict of Table"),
        (RECIPE.replace('"A tiny paper"', "3"), "title must be texts"),
        ("raise SystemExit('not here')", "line 1: SystemExit: not here"),
    ],
    ids=lambda text: text[:20] if len(text) < 40 else "",
)
def test_a_mistake_in_a_recipe_is_one_line_too(tmp_path, monkeypatch, recipe, told):
    monkeypatch.chdir(tmp_path)
    write_paper(tmp_path, recipe=recipe, name="wrong")
    outcome = invoke("wrong")
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert "recipe.py" in line
    assert told in line


def test_a_paper_is_found_by_its_path_and_a_number_that_is_none_is_told(folder):
    assert bench("benchmarks/tiny").stdout.startswith("tiny: A tiny paper")
    (folder / "benchmarks/tiny/expected.toml").write_text('["1"."digits"]\nfedavg = 33.02\n')
    line = invoke("tiny", "--table", "1").stderr
    assert "fedavg = { best = 33.02 }" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('["1"."digits"]\nfedavg = { bset = 50.45 }', "'bset': did you mean 'best'"),
        ('["1"."digits"]\nfedavg = { best = true }', "best = True is no number"),
        ('["1"."digits"]\nfedvag = { best = 50.45 }', "no row 'fedvag': did you mean 'fedavg'"),
        ('["1"."digit"]\nfedavg = { best = 50.45 }', "no column 'digit': did you mean 'digits'"),
        ('["3"."digits"]\nfedavg = { best = 50.45 }', "no table '3'"),
    ],
)
def test_a_number_of_the_paper_that_belongs_nowhere_is_told(folder, text, told):
    (folder / "benchmarks/tiny/expected.toml").write_text(text)
    outcome = invoke("tiny")
    assert outcome.exit_code == 2
    (line,) = outcome.stderr.splitlines()
    assert "expected.toml" in line
    assert told in line


@pytest.mark.parametrize("words", [["--out", "/proc/xx"], ["--results", "/proc/x.json"]], ids=" ".join)
def test_a_place_that_cannot_be_written_is_told_before_the_work(folder, words):
    """A folder that no user may write to, not even root."""
    outcome = invoke("tiny", "--table", "1", *words)
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert words[0] in line
    assert "/proc" in line


@pytest.mark.parametrize("jobs", ["x", "0"])
def test_jobs_are_checked_even_when_nothing_is_left_to_run(folder, jobs):
    bench("tiny", "--table", "1", "--methods", "fedavg")
    outcome = invoke("tiny", "--table", "1", "--methods", "fedavg", "--jobs", jobs)
    assert outcome.exit_code == 2
    assert "--jobs" in outcome.stderr


def test_results_of_another_paper_are_not_taken_over(folder):
    write_runs(folder / "theirs.json", "huge", [run_of(small(rounds=1), [10.0])])
    before = (folder / "theirs.json").read_text()
    for words in (["tiny"], ["tiny", "--table", "1"]):
        outcome = invoke(*words, "--results", "theirs.json")
        assert outcome.exit_code == 2
        (line,) = outcome.stderr.splitlines()
        assert "'huge', not of 'tiny'" in line
    assert (folder / "theirs.json").read_text() == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"accuracy": [10.0]}, "1 accuracies for 4 evaluated rounds"),
        ({"accuracy": None}, "accuracy is no list of numbers"),
        ({"accuracy": "10"}, "accuracy is no list of numbers"),
        ({"accuracy": [1.0, 2.0, 3.0, "x"]}, "accuracy is no list of numbers"),
        ({"accuracy": [1.0, 2.0, 3.0, float("nan")]}, "accuracy is no list of numbers"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"rounds": None}, "rounds = None"),
        ({"evaluated": 0}, "evaluated = 0"),
        ({"seconds": "long"}, "seconds = 'long'"),
        ({"device": 3}, "device = 3"),
    ],
    ids=str,
)
def test_a_record_that_no_table_can_use_is_named(folder, changes, told):
    good = run_of(small(), [1.0, 2.0, 3.0, 4.0])
    bad = {**run_of(small(), [1.0, 2.0, 3.0, 4.0], column="cifar10", seed=7), **changes}
    (folder / "own.json").write_text(json.dumps({"paper": "tiny", "runs": [good, bad]}))
    outcome = invoke("tiny", "--table", "1", "--results", "own.json")
    assert outcome.exit_code == 2
    (line,) = outcome.stderr.splitlines()
    assert f"run 2 (fedavg cifar10 {bad['seed']}): {told}" in line
