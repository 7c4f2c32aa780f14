"""Comparisons and runs on disk, read without running anything."""

import json
import shutil

import pytest

from fedstill import Experiment, FedstillError, compare, run
from fedstill.experiment.recorded import read_curves, read_rows, read_summaries
from fedstill.report.table import plain_table

SMALL = Experiment(
    rounds=2,
    cohort=2,
    partition={"scheme": "iid", "clients": 4},
    model={"name": "mlp", "hidden": [8]},
    data={"source": "digits", "test_limit": 50},
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "both"
    return compare(SMALL.replace(compare={"references": True}), ["fedavg", "fedprox"], seeds=2, run_dir=folder)


def test_a_table_on_disk_is_the_table_of_its_comparison(compared):
    assert plain_table(read_summaries(compared.run_dir)) == plain_table(compared.summaries)


def test_curves_on_disk_are_those_of_the_runs(compared, tmp_path):
    curves = read_curves(compared.run_dir)
    for method, results in compared.results.items():
        rows = [result.history.rows for result in results]
        assert curves[method] == [([1, 2], [row["accuracy"] for row in seed]) for seed in rows]
    alone = run(SMALL, run_dir=tmp_path / "run")
    assert read_curves(tmp_path / "run") == {"fedavg": [([1, 2], [row["accuracy"] for row in alone.history.rows])]}
    with pytest.raises(FedstillError, match=r"one run, no comparison"):
        read_summaries(tmp_path / "run")


def test_a_line_that_a_killed_run_did_not_finish_is_left_out_and_another_broken_line_is_named(compared, tmp_path):
    shutil.copytree(compared.run_dir / "fedavg" / "seed-0", tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{second[:30]}")
    assert [row["round"] for row in read_rows(tmp_path / "run")] == [1]
    file.write_text(f"{first[:30]}\n{second}\n")
    with pytest.raises(FedstillError, match=r"metrics\.jsonl' cannot be read in line 1"):
        read_rows(tmp_path / "run")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"methods": 3}', '{"methods": [{}], "runs": []}'])
def test_a_broken_table_is_refused_in_one_line(compared, tmp_path, content):
    shutil.copy(compared.run_dir / "config.toml", tmp_path)
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(FedstillError, match=r"results\.json' (cannot be read|lacks).*fedstill resume"):
        read_summaries(tmp_path)


def test_a_comparison_without_a_finished_method_says_how_to_go_on(compared, tmp_path):
    shutil.copy(compared.run_dir / "config.toml", tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"methods": [], "runs": []}))
    for read in (read_summaries, read_curves):
        with pytest.raises(FedstillError, match="fedstill resume"):
            read(tmp_path)
