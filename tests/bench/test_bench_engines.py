"""Runs with another engine: none stands for another's, and none costs another its models."""

import importlib.util
import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from bench_cases import RECIPE, bench, count_runs, forbid_runs, interrupt_after, recipe_of, run_of, small

from fedstill.bench.plan import begun_as, make_orders, run_folder
from fedstill.bench.recipe import Cell
from fedstill.bench.results import cell_key, read_runs

FEDAVG = ("tiny", "--table", "1", "--methods", "fedavg", "--out", "out")
EXACT = (*FEDAVG, "--set", "engine.precision=float64")


def engines(folder):
    return [run.get("engine", {}) for run in read_runs(folder / "out/results.json")]


def places(folder):
    """Engine of its config -> folder of a run."""
    found = sorted((folder / "out").glob("fedavg-*/seed-0"))
    return {tomllib.loads((place / "config.toml").read_text())["engine"]["precision"]: place for place in found}


def test_a_cell_that_asks_for_an_engine_takes_no_other_s_run(folder, monkeypatch):
    bench(*FEDAVG)
    seen = count_runs(monkeypatch)
    shown = bench(*EXACT).stdout
    assert seen == [("fedavg", 0)]
    assert engines(folder) == [{}, {"precision": "float64"}]
    assert "digits, 3 rounds, precision = float64\n" in shown
    assert bench(*EXACT).stdout == shown
    assert "float64" not in bench(*FEDAVG).stdout, "the default has its own run"
    assert seen == [("fedavg", 0)], "nothing more"


def test_the_default_takes_any_run_and_says_of_which_engine(folder, monkeypatch):
    bench(*EXACT)
    forbid_runs(monkeypatch)
    assert "digits, 3 rounds, precision = float64\n" in bench(*FEDAVG).stdout
    assert engines(folder) == [{"precision": "float64"}]


def test_folders_of_other_engines_stay_and_are_taken_for_their_own_engine_only(folder, monkeypatch):
    bench(*FEDAVG)
    bench(*EXACT)
    both = places(folder)
    assert all((place / "last" / "weights.safetensors").is_file() for place in both.values())
    key = read_runs(folder / "out/results.json")[0]["key"]
    assert both["auto"].parent.name == f"fedavg-{key}"
    assert both["float64"].parent.name.startswith(f"fedavg-{key}-")
    (folder / "out/results.json").unlink()
    seen = count_runs(monkeypatch)
    bench(*EXACT)
    assert engines(folder) == [{"precision": "float64"}]
    bench(*FEDAVG)
    assert engines(folder) == [{}, {"precision": "float64"}], "a finished folder of its own comes first"
    bench(*FEDAVG, "--set", "engine.name=looped")
    assert seen == [("fedavg", 0)], "only the looped one"


def test_results_that_are_lost_do_not_make_another_engine_s_folder_the_papers(folder, monkeypatch):
    bench(*EXACT)
    (folder / "out/results.json").unlink()
    seen = count_runs(monkeypatch)
    bench(*FEDAVG)
    assert seen == [("fedavg", 0)]
    assert set(places(folder)) == {"auto", "float64"}


def test_a_begun_run_goes_on_with_its_own_engine_only(folder, monkeypatch):
    interrupt_after(monkeypatch, 2)
    bench(*FEDAVG, code=130)
    bench(*EXACT)
    both = places(folder)
    assert "resuming" not in (both["float64"] / "log.txt").read_text()
    (folder / "out/results.json").unlink()
    bench(*FEDAVG, "--set", "engine.threads=1")
    assert "resuming after round 2" in (both["auto"] / "log.txt").read_text(), "threads are no engine"


@pytest.mark.parametrize("before", [(), ("--set", "engine.threads=2")])
def test_threads_do_not_make_another_run(folder, monkeypatch, before):
    bench(*FEDAVG, *before)
    (folder / "out/results.json").unlink()
    forbid_runs(monkeypatch)
    bench(*FEDAVG, "--set", "engine.threads=1")
    assert engines(folder) == [{}]


def test_rows_that_differ_in_engine_alone_are_two_runs(folder, monkeypatch):
    recipe = folder / "benchmarks/tiny/recipe.py"
    exact = 'DIGITS += (Cell("exact", "digits", DIGITS[0].experiment.replace(engine={"precision": "float64"})),)'
    recipe.write_text(RECIPE.replace("MISSING = ", f"{exact}\nMISSING = "))
    seen = count_runs(monkeypatch)
    words = ("tiny", "--table", "1", "--methods", "fedavg,exact", "--out", "out")
    answer = json.loads(bench(*words, "--format", "json").stdout)
    assert seen == [("fedavg", 0)] * 2
    rows = {row["row"]: row for row in answer["columns"][0]["rows"]}
    assert (rows["fedavg"]["engines"], rows["exact"]["engines"]) == ([""], ["precision = float64"])
    entry = json.loads(bench("tiny", "--results", "out/results.json", "--format", "json").stdout)["tables"][0]
    assert (entry["runs"], entry["done"], entry["cells_done"]) == (3, 2, 2)


@pytest.mark.parametrize("engine", [{"precision": "bf16"}, {"chunk": 2, "compile": True}])
def test_the_folder_s_name_holds_the_engine(tmp_path, engine):
    plain, other = small(), small(engine=engine)
    key = cell_key(plain)
    assert cell_key(other) == key
    first, second = (run_folder(tmp_path, experiment, key).parent.name for experiment in (plain, other))
    assert first == f"fedavg-{key}"
    assert second.startswith(f"{first}-")
    assert len(second) == len(first) + 7
    same = small(engine={**engine, "device": "cpu", "threads": 3})
    assert run_folder(tmp_path, same, key).parent.name == second


def test_a_run_under_an_old_name_goes_where_it_belongs(tmp_path):
    """Names of folders did not hold the engine: the default must not delete what it finds under its own."""
    cells = [Cell("fedavg", "digits", small(engine=engine)) for engine in ({}, {"precision": "float64"})]
    plain, other = make_orders(cells, preset="paper", seeds=1, device="cpu", out=tmp_path)
    plain.folder.mkdir(parents=True)
    (plain.folder / "config.toml").write_text(other.experiment.to_toml())
    (plain.folder / "model").write_text("trained")
    assert begun_as(plain) == plain.experiment
    assert not plain.folder.exists()
    assert (other.folder / "model").read_text() == "trained"


@pytest.mark.parametrize("left_over", [False, True], ids=["no folder", "a start that failed"])
def test_a_run_of_an_engine_is_gone_on_with_under_its_old_name(tmp_path, left_over):
    cells = [Cell("fedavg", "digits", small(engine=engine)) for engine in ({}, {"precision": "float64"})]
    plain, other = make_orders(cells, preset="paper", seeds=1, device="cpu", out=tmp_path)
    plain.folder.mkdir(parents=True)
    (plain.folder / "config.toml").write_text(other.experiment.to_toml())
    (plain.folder / "model").write_text("trained")
    if left_over:
        other.folder.mkdir(parents=True)
        (other.folder / "error.txt").write_text("no room")
    assert begun_as(other) == other.experiment
    assert (other.folder / "model").read_text() == "trained"
    assert not plain.folder.exists()
    plain.folder.mkdir(parents=True)
    (plain.folder / "config.toml").write_text(plain.experiment.to_toml())
    shutil.rmtree(other.folder)
    assert begun_as(other) == other.experiment
    assert plain.folder.exists(), "a run of the default is not another engine's"


@pytest.fixture
def pages(monkeypatch):
    """tools/make_result_pages.py"""
    file = Path(__file__).parents[2] / "tools" / "make_result_pages.py"
    spec = importlib.util.spec_from_file_location("pages_of_results", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_page_shows_runs_of_the_cell_s_engine_and_names_those_that_it_does_not_show(pages, monkeypatch):
    methods = ("fedavg", "fedntd", "fedprox")
    cells = [Cell(method, "digits", small(rounds=1, method=method)) for method in methods]
    runs = [run_of(cell.experiment, [10.0]) for cell in cells]
    other = {**runs[0], "accuracy": [90.0], "engine": {"precision": "bf16"}}
    paper = pages.Paper(Path("tiny"), recipe_of(*cells), {}, [other, *runs])
    ((_, picture),) = pages.pictures(paper, "paper")
    assert picture.curves["fedavg"] == [([1], [0.1])], "one line a seed"
    monkeypatch.setattr(pages, "papers", lambda: [paper])
    (stray,) = pages.strays()
    assert stray.endswith("of another engine than the one shown)")
