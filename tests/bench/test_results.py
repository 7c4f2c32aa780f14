"""The same cell is the same run wherever it stands, and the results file loses nothing."""

import hashlib
import json
import re

import pytest
from bench_cases import run_of, small
from papers import BENCHMARKS

from fedstill.bench.recipe import load_recipe
from fedstill.bench.results import FORMER_DEFAULTS, add_run, cell_key, merge, read_runs, write_runs
from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.methods.options import defaults


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"name": "another"},
        {"engine": {"name": "looped", "device": "cpu", "threads": 1}},
        {"checkpoint_every": 3},
        {"track": ["tensorboard"]},
        {"target": 0.5},
        {"compare": {"seeds": 9}},
        {"evaluate_every": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_cell_is_the_same_whatever_does_not_change_its_numbers(changes):
    assert cell_key(small(**changes)) == cell_key(small())


@pytest.mark.parametrize("place", ["somewhere/cifar10", "/data/sets/cifar10", "uoft-cs/cifar10"])
def test_where_the_data_lie_is_no_part_of_a_cell(place):
    assert cell_key(small(data=place)) == cell_key(small(data="cifar10"))
    assert cell_key(small(data={"source": "mnist", "unlabeled": place})) == cell_key(
        small(data={"source": "mnist", "unlabeled": "cifar10"})
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 5},
        {"data": "fashion-mini"},
        {"data": {"source": "digits", "unlabeled": 10}},
        {"partition": {"scheme": "lda", "alpha": 0.1}},
        {"method": {"name": "fedprox", "mu": 0.1}},
        {"model": {"name": "mlp", "hidden": [8]}},
        {"local": {"lr": 0.02}},
        {"cohort": 5},
    ],
    ids=str,
)
def test_what_changes_the_numbers_changes_the_cell(changes):
    assert cell_key(small(**changes)) != cell_key(small())


def test_a_key_that_is_new_with_a_default_leaves_old_results_valid():
    class Later(Experiment):
        invented_later: int = 3

    table = small().model_dump()
    assert cell_key(Later.model_validate(table)) == cell_key(small())
    assert cell_key(Later.model_validate({**table, "invented_later": 4})) != cell_key(small())


def test_runs_come_back_as_they_were_written_one_a_line(tmp_path):
    file = tmp_path / "deep" / "results.json"
    runs = [run_of(small(rounds=2), [10.0, 12.34], seed=seed) for seed in (1, 0)]
    write_runs(file, "tiny", runs)
    assert read_runs(file) == [runs[1], runs[0]], "sorted by seed"
    assert json.loads(file.read_text())["paper"] == "tiny"
    lines = file.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["seed"] for line in lines[1:-1]] == [0, 1]
    assert read_runs(tmp_path / "none.json") == []


def test_a_run_is_there_once_and_the_later_one_wins(tmp_path):
    old, new = run_of(small(rounds=1), [10.0]), run_of(small(rounds=1), [20.0])
    other = run_of(small(rounds=9, evaluate_every=9), [30.0])
    assert [run["accuracy"] for run in merge([old, other], [new])] in ([[20.0], [30.0]], [[30.0], [20.0]])
    write_runs(tmp_path / "results.json", "tiny", [old])
    add_run(tmp_path / "results.json", "tiny", other)  # as another process would, meanwhile
    add_run(tmp_path / "results.json", "tiny", new)
    assert sorted(run["accuracy"] for run in read_runs(tmp_path / "results.json")) == [[20.0], [30.0]]


def test_the_order_of_finishing_does_not_show():
    runs = [run_of(small(rounds=rounds), [1.0], seed=seed) for rounds in (3, 4) for seed in (0, 1)]
    runs += [{**run, "engine": {"chunk": 2, "precision": "bf16"}} for run in runs]
    assert merge(runs) == merge(runs[::-1])
    assert len(merge(runs)) == 8


def test_runs_of_different_engines_stand_side_by_side(tmp_path):
    plain = run_of(small(rounds=1), [10.0])
    other = {**plain, "accuracy": [20.0], "engine": {"chunk": 2, "compile": True}}
    later = {**other, "accuracy": [30.0], "engine": {"compile": True, "chunk": 2}}
    for run in (other, plain, later):
        add_run(tmp_path / "results.json", "tiny", run)
    assert read_runs(tmp_path / "results.json") == [plain, later]


@pytest.mark.parametrize("place", ["ufldl-stanford/svhn:cropped_digits", "/data/svhn", "svhn"])
def test_a_configuration_of_the_hub_is_no_part_of_the_name_of_data(place):
    assert cell_key(small(data=place)) == cell_key(small(data="svhn"))
    crossed = {"source": "mnist", "test": place}
    assert cell_key(small(data=crossed)) == cell_key(small(data={**crossed, "test": "svhn"}))
    assert cell_key(small(data=crossed)) != cell_key(small(data="mnist"))


def test_what_a_run_logs_beside_its_accuracy_comes_back(tmp_path):
    logged = {"pseudo_labels": [0, 7], "pseudo_label_accuracy": [None, 71.43]}
    run = run_of(small(rounds=2), [10.0, 20.0], beside=logged)
    write_runs(tmp_path / "results.json", "tiny", [run])
    assert read_runs(tmp_path / "results.json") == [run]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accuracy": [10.0]}, "accuracy has 1 values for 4 evaluated rounds"),
        ({"accuracy": None}, "accuracy = None"),
        ({"accuracy": "10"}, "accuracy = '10'"),
        ({"accuracy": [1.0, 2.0, 3.0, "x"]}, "accuracy.3 = 'x'"),
        ({"accuracy": [1.0, 2.0, 3.0, float("nan")]}, "accuracy.3 = nan"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"seed": -1}, "seed = -1"),
        ({"rounds": None}, "rounds = None"),
        ({"evaluated": 0}, "evaluated = 0"),
        ({"seconds": "long"}, "seconds = 'long'"),
        ({"device": 3}, "device = 3"),
        ({"engine": "bf16"}, "engine = 'bf16'"),
        ({"prepared": -1.0}, "prepared = -1.0"),
        ({"beside": {"pseudo_labels": [1, 2, 3, "four"]}}, "beside.pseudo_labels.3 = 'four'"),
        ({"beside": {"pseudo_labels": [1]}}, "pseudo_labels has 1 values for 4 evaluated rounds"),
    ],
    ids=str,
)
def test_a_record_that_no_table_can_use_is_named(tmp_path, changes, reason):
    good = run_of(small(), [1.0, 2.0, 3.0, 4.0])
    bad = {**run_of(small(), [1.0, 2.0, 3.0, 4.0], column="cifar10", seed=7), **changes}
    (tmp_path / "own.json").write_text(json.dumps({"paper": "tiny", "runs": [good, bad]}))
    with pytest.raises(FedstillError, match=re.escape(f"run 2 (fedavg cifar10 {bad['seed']}): {reason}")):
        read_runs(tmp_path / "own.json")


def test_a_folder_is_no_file_of_results(tmp_path):
    with pytest.raises(FedstillError, match=r"--results.*is no file of results"):
        read_runs(tmp_path)


def test_results_of_another_paper_are_not_taken_over(tmp_path):
    write_runs(tmp_path / "theirs.json", "huge", [run_of(small(rounds=1), [10.0])])
    with pytest.raises(FedstillError, match="'huge', not of 'tiny'"):
        read_runs(tmp_path / "theirs.json", "tiny")


@pytest.mark.parametrize("text", ["", "[]", '{"runs": 3}', '{"runs": [{"key": "a"}]}'])
def test_a_file_that_holds_something_else_is_not_overwritten(tmp_path, text):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(FedstillError, match=r"results\.json"):
        add_run(file, "tiny", run_of(small(), [1.0]))
    assert file.read_text() == text


def test_a_cell_is_the_same_wherever_its_methods_file_lies(tmp_path):
    keys = set()
    for folder in ("here", "there"):
        file = tmp_path / folder / "own.py"
        file.parent.mkdir()
        file.write_text("from fedstill.methods import fedavg as mine\n")
        keys.add(cell_key(Experiment(method=f"{file}:mine")))
    assert len(keys) == 1


LITERAL = 'mrtf(refine_sharpness=4.0, refine_share="all", student.lr_schedule="constant"{})'
NAMED_BEFORE = {  # sections as cells wrote them when runs were recorded -> the same runs after the defaults changed
    "one method": ({"method": {"name": "mrtf"}}, LITERAL.format("")),
    "other options stay": (
        {"method": {"name": "mrtf", "feedback": True, "student": {"lr": 3e-5}}},
        LITERAL.format(", feedback=true, student.lr=3e-5"),
    ),
    "a mixture": (
        {"method": {"name": "mrtf(feedback=true)+update_noise(sigma=0.1)"}},
        LITERAL.format(", feedback=true") + "+update_noise(sigma=0.1)",
    ),
}


@pytest.mark.parametrize(("before", "method"), NAMED_BEFORE.values(), ids=list(NAMED_BEFORE))
def test_a_run_keeps_its_name_when_a_default_changes_and_its_cell_writes_the_former_value(before, method):
    wanted = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:10]
    assert cell_key(Experiment(method=method)) == wanted


def test_a_changed_default_is_another_cell_and_the_same_one_whether_it_is_written_or_not():
    literal, plain = Experiment(method=LITERAL.format("")), Experiment(method="mrtf")
    assert cell_key(literal) != cell_key(plain)
    assert cell_key(Experiment(method='mrtf(refine_share="disagreement")')) == cell_key(plain)
    for name in ("mlp", "vgg8"):
        keys = {init: cell_key(Experiment(model={"name": name, "init": init})) for init in ("paper", "torch")}
        assert keys["torch"] == cell_key(Experiment(model=name)) != keys["paper"]


def test_every_former_default_is_an_option_whose_default_has_changed():
    for (kind, name), options in FORMER_DEFAULTS.items():
        now = defaults(kind, name)
        for option, former in options.items():
            key, _, field = option.partition(".")
            assert (now[key][field] if field else now[key]) != former


@pytest.mark.parametrize("paper", ["mrtf", "d2cfl"])
def test_every_recorded_run_is_still_a_cell_of_its_recipe(paper):
    tables = [table for preset in load_recipe(BENCHMARKS / paper).tables.values() for table in preset.values()]
    cells = {cell_key(cell.experiment) for table in tables for cell in table.cells}
    runs = read_runs(BENCHMARKS.parent / "docs" / "results" / f"{paper}.json", paper)
    assert runs
    assert {run["key"] for run in runs} <= cells
