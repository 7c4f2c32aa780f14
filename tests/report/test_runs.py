"""Reading run folders for a report: whole ones, damaged ones, foreign ones."""

from __future__ import annotations

import json

import pytest
from run_folders import row, write_comparison, write_run

from fedstill.core.errors import FedstillError
from fedstill.report.runs import number, read_runs


def test_a_comparison_is_read_by_method_and_the_best_last_accuracy_comes_first(tmp_path):
    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.1, 0.5], [0.2, 0.3]], "feddf": [[0.3, 0.6], [0.9, 0.4]]})
    runs = read_runs([folder])
    assert list(runs.by_method) == ["feddf", "fedavg"]
    assert runs.last("fedavg") == {0: 0.5, 1: 0.3}
    assert not runs.gaps


def test_runs_of_one_method_are_told_apart_by_the_settings_that_differ(tmp_path):
    places = [write_run(tmp_path / f"{lr}", [0.5], local={"lr": lr}) for lr in (0.1, 0.2)]
    assert set(read_runs(places).by_method) == {"fedavg [local.lr=0.1]", "fedavg [local.lr=0.2]"}


def test_the_same_run_in_two_folders_is_shown_twice(tmp_path):
    places = [write_run(tmp_path / name, [0.5]) for name in ("one", "two")]
    assert set(read_runs(places).by_method) == {"fedavg (one)", "fedavg (two)"}


def test_bytes_and_seconds_add_up_over_the_rounds(tmp_path):
    run = read_runs([write_run(tmp_path / "run", [0.1, 0.2, 0.3])]).first
    assert run.summed("seconds") == {1: 0.5, 2: 1.0, 3: 1.5}
    assert run.reached(0.2) == 2
    assert run.reached(0.9) is None


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "audit.jsonl", "contract.json", "partition.json", "calibration.json"]
)
@pytest.mark.parametrize("content", [None, b"", b'{"round": 1', b"\xff\xfe\x00", b"[1, 2]", b"[" * 100_000])
def test_a_missing_or_damaged_file_is_named_and_the_others_are_read(tmp_path, name, content):
    if content == b"" and name in ("audit.jsonl", "metrics.jsonl"):
        content = b"\x00\n"  # an empty file of records is no damage
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    runs = read_runs([folder])
    if (name, content) == ("config.toml", b""):  # a table without keys
        assert runs.first.config == {}
    else:
        assert any(name in gap for gap in runs.gaps)
    assert name == "metrics.jsonl" or runs.first.accuracy == 0.2


def test_a_line_that_was_cut_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accur')
    runs = read_runs([folder])
    assert [one["round"] for one in runs.first.rows] == [1, 2]
    assert any("1 of 3 lines" in gap for gap in runs.gaps)


def test_a_run_that_stopped_early_says_so(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    assert any("1 of 2 rounds" in gap for gap in read_runs([folder]).gaps)


def test_numbers_that_are_none_are_no_numbers():
    strange = [None, "0.5", True, [], float("nan"), float("inf"), 10**400]
    assert [number(value) for value in strange] == [None] * len(strange)
    assert [number(1), number(0.5)] == [1.0, 0.5]


def test_a_round_without_an_accuracy_is_not_evaluated(tmp_path):
    rows = [{**row(1, 0.5, 2), "accuracy": "high"}, row(2, 0.4, 2), {"round": 3}]
    folder = write_run(tmp_path / "run", [], rows=rows)
    assert [one["round"] for one in read_runs([folder]).first.evaluated] == [2]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FedstillError, match="holds no run"):
        read_runs([tmp_path])
    with pytest.raises(FedstillError, match="no folder"):
        read_runs([tmp_path / "none"])


def test_gaps_name_no_path_above_the_folder_that_was_given(tmp_path):
    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.1]]})
    (folder / "method-0" / "seed-0" / "env.json").unlink()
    (gap,) = read_runs([folder]).gaps
    assert gap.startswith("all/method-0/seed-0: env.json")
    assert str(tmp_path) not in gap


def test_a_run_that_results_names_and_that_is_gone_is_a_gap(tmp_path):
    folder = write_comparison(tmp_path / "all", {"fedavg": [[0.1]]})
    results = json.loads((folder / "results.json").read_text())
    results["runs"].append({"method": "feddf", "seed": 0, "run_dir": "../../etc"})
    (folder / "results.json").write_text(json.dumps(results))
    runs = read_runs([folder])
    assert list(runs.by_method) == ["fedavg"]
    assert any("not there" in gap for gap in runs.gaps)
