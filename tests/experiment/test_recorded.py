"""Comparisons and runs on disk, read without running anything."""

import json
import shutil

import pytest

from fedstill import Experiment, FedstillError, compare, load_run, run
from fedstill.experiment.recorded import find_records, read_curves, read_record, read_rows, read_summaries
from fedstill.loop.callbacks import Callback
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


class Stopped(Exception):
    pass


class StopAfter(Callback):
    """Breaks a run off, as Ctrl-C does; looks at its state while it runs."""

    def __init__(self, number, folder):
        self.number, self.folder, self.seen = number, folder, []

    def on_round(self, row):
        self.seen.append(read_record(self.folder).state)
        if row["round"] == self.number:
            raise Stopped


def test_a_run_is_running_then_killed_then_finished(tmp_path):
    folder = tmp_path / "run"
    watch = StopAfter(2, folder)
    longer = SMALL.replace(rounds=3, checkpoint_every=1)
    with pytest.raises(Stopped):
        run(longer, run_dir=folder, callbacks=[watch])
    assert watch.seen == ["running", "running"]
    record = read_record(folder)
    assert record.state == "killed"
    assert record.result.endswith("round 1/3")  # the callback broke round 2 off before its row was written
    run(longer, run_dir=folder, resume=True)
    assert read_record(folder).state == "finished"
    assert read_record(folder).result == f"{100 * read_rows(folder)[-1]['accuracy']:.1f} %"


def test_a_run_that_ended_early_is_finished_and_a_comparison_with_a_missing_run_is_not(compared, tmp_path):
    run(SMALL.replace(rounds=9, local={"lr": 2.0}, early_stop={"patience": 1}), run_dir=tmp_path / "early")
    assert len(read_rows(tmp_path / "early")) < 9
    assert read_record(tmp_path / "early").state == "finished"
    assert read_record(compared.run_dir).state == "finished"
    shutil.copytree(compared.run_dir, tmp_path / "part")
    results = json.loads((tmp_path / "part" / "results.json").read_text())
    results["runs"].pop()
    (tmp_path / "part" / "results.json").write_text(json.dumps(results))
    assert read_record(tmp_path / "part").state == "killed"


def test_runs_are_found_newest_first_others_are_skipped_and_broken_ones_named(compared, tmp_path):
    for name in ("20250102T030405-abc", "20260102T030405-abc"):
        shutil.copytree(compared.run_dir / "fedavg" / "seed-0", tmp_path / "deep" / name)
    shutil.copytree(compared.run_dir, tmp_path / "20250601T000000-abc")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("port = 80\n")
    (tmp_path / "empty").mkdir()
    for name, file, content in (
        ("toml", "config.toml", "x = ["),
        ("keys", "config.toml", "no_such_key = 3\n"),
        ("rows", "metrics.jsonl", "{\n{\n"),
    ):
        shutil.copytree(compared.run_dir / "fedavg" / "seed-0", tmp_path / name)
        (tmp_path / name / file).write_text(content)
    shutil.copytree(compared.run_dir / "fedavg" / "seed-0", tmp_path / "gone")
    (tmp_path / "gone" / "config.toml").unlink()
    records, broken = find_records(tmp_path)
    assert [record.folder.relative_to(tmp_path).as_posix() for record in records] == [
        "deep/20260102T030405-abc",
        "20250601T000000-abc",
        "deep/20250102T030405-abc",
    ]
    assert sorted(line.split("'")[1].removeprefix(f"{tmp_path}/") for line in broken) == [
        "gone",
        "keys",
        "rows",
        "toml",
    ]
    assert not any("\n" in line for line in broken)


def test_a_comparison_is_one_entry_and_its_own_folder_lists_its_runs(compared):
    above, _ = find_records(compared.run_dir.parent)
    assert [record.is_comparison for record in above] == [True]
    inside, broken = find_records(compared.run_dir)
    assert {record.folder.relative_to(compared.run_dir).as_posix() for record in inside} == {
        f"{method}/seed-{seed}" for method in ("fedavg", "fedprox") for seed in (0, 1)
    }
    assert broken == []
    size = sum(path.stat().st_size for path in compared.run_dir.rglob("*") if path.is_file())
    assert above[0].size == size


def test_a_run_is_a_data_frame(compared):
    frame = load_run(compared.run_dir / "fedavg" / "seed-1").frame
    rows = compared.results["fedavg"][1].history.rows
    assert list(frame.index) == [1, 2]
    assert frame["accuracy"].tolist() == [row["accuracy"] for row in rows]
    assert set(frame.columns) == set(rows[0]) - {"round"}
