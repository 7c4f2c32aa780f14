"""MrTF's benchmark: every cell can be built, every number and setting is the paper's, what is missing is named."""

from __future__ import annotations

import json

import pytest
from papers import BENCHMARKS
from recipe_cases import PaperCase, parameters

from fedstill.bench.recipe import with_data
from fedstill.bench.results import cell_key
from fedstill.core.errors import FedstillError
from fedstill.methods.lookup import write

MRTF = PaperCase("mrtf")
PRESETS = ("correct", "paper", "released")
STUDENT = {"lr": 3e-4, "lr_schedule": "constant", "batch_size": 64, "clip": "none"}
CODE = BENCHMARKS / "mrtf" / "released.py"
NAMES = ("2", "3", "figure-7", "figure-8", "figure-9", "figure-10", "figure-11")
AT_HAND = {"cifar10", "mnist", "shakespeare"}
LITERAL = {"refine_sharpness": 4.0, "refine_share": "all", "student": {"lr_schedule": "constant"}}
SENT = {**LITERAL, "feedback": True}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_table_and_figure_is_there_under_every_preset(preset):
    assert tuple(MRTF.recipe.presets) == PRESETS
    assert tuple(MRTF.recipe.tables[preset]) == (*NAMES, *(["feedback", "defaults"] if preset == "correct" else []))


def test_methods_of_a_column_differ_in_nothing_but_the_method():
    assert MRTF.columns_that_differ_in_more_than_the_method() == []


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cell_is_in_its_table_once(preset):
    for table in MRTF.recipe.tables[preset].values():
        places = [(cell.row, cell.column) for cell in table.cells]
        assert len(places) == len(set(places)), table.name


def test_every_server_is_asked_about_the_test_set_itself():
    """Transductive: the unlabeled data are the inputs to be predicted (Section 3.1)."""
    assert {cell.experiment.data.unlabeled for cell in MRTF.all_cells()} == {"test"}


def test_models_are_averaged_evenly():
    """Section 3.2: theta_{t+1} is the plain mean over S_t."""
    sections = {(one.server.aggregate, one.server.buffers) for one in (cell.experiment for cell in MRTF.all_cells())}
    assert sections == {('average(weighting="uniform")', "average")}


def test_table_3_has_the_setting_of_section_5_5():
    """CIFAR-10, alpha = 1, K = 100, E = 5, T = 200, VGG8; 10 clients a round as everywhere."""
    one = MRTF.experiment("3", "mrtf", "sigma-0")
    assert (one.rounds, one.cohort, one.data.source) == (200, 10, "uoft-cs/cifar10")
    assert (one.partition.scheme, one.partition.clients, one.partition.options) == ("mrtf", 100, {"alpha": 1.0})
    local = one.local
    assert (local.epochs, local.batch_size, local.optimizer, local.lr, local.momentum) == (5, 64, "sgd", 0.03, 0.9)
    assert (local.weight_decay, local.clip, local.lr_decay) == (1e-5, 100.0, 1.0)
    assert (one.model.name, local.augment) == ("vgg8", ("crop", "flip"))


def test_table_3_adds_noise_to_the_updates_and_none_at_sigma_0():
    assert [MRTF.method("3", row, "sigma-0") for row in ("fedavg", "feddf", "mrtf")] == [
        {"name": "fedavg"},
        {"name": "feddf", "student": STUDENT},
        {"name": "mrtf", **SENT},
    ]
    assert MRTF.method("3", "fedavg", "sigma-0.01") == "fedavg+update_noise(sigma=0.01)"
    assert (
        MRTF.method("3", "feddf", "sigma-0.001") == f"{write('feddf', {'student': STUDENT})}+update_noise(sigma=0.001)"
    )
    assert MRTF.method("3", "mrtf", "sigma-0.1") == (
        'mrtf(refine_sharpness=4.0, refine_share="all", student.lr_schedule="constant", feedback=true)'
        "+update_noise(sigma=0.1)"
    )
    assert MRTF.recipe.tables["correct"]["3"].columns == ("sigma-0", "sigma-0.001", "sigma-0.01", "sigma-0.1")


def test_figure_11_takes_the_modules_away_one_by_one_in_50_rounds():
    table = MRTF.recipe.tables["correct"]["figure-11"]
    assert table.rows == ("pa", "al", "st", "st+rd", "st+rd+clr")
    column, off = "cifar10-dir-0.1", False
    assert {row: MRTF.method("figure-11", row, column) for row in table.rows} == {
        "pa": {"name": "fedavg"},
        "al": {"name": "mrtf", **SENT, "stabilise": off, "rectify": off, "refine": off},
        "st": {"name": "mrtf", **SENT, "rectify": off, "refine": off},
        "st+rd": {"name": "mrtf", **SENT, "refine": off},
        "st+rd+clr": {"name": "mrtf", **SENT},
    }
    one = MRTF.experiment("figure-11", "st", column)
    assert (one.rounds, one.cohort, one.partition.clients, one.partition.options) == (50, 10, 100, {"alpha": 0.1})


def test_figure_7_has_four_data_sets_in_four_splits():
    """Part I: K = 100, R = 10 %, E = 3, T = 200 for digits and 1500 for CIFAR-10."""
    table = MRTF.recipe.tables["correct"]["figure-7"]
    splits = ("label-5", "label-3", "dir-1", "dir-0.1")
    assert table.columns == tuple(f"{name}-{s}" for name in ("mnist", "mnistm", "svhn", "cifar10") for s in splits)
    for cell in table.cells:
        one = cell.experiment
        assert (one.cohort, one.partition.clients, one.local.epochs, one.local.batch_size) == (10, 100, 3, 64)
        assert one.rounds == (1500 if one.data.source.endswith("cifar10") else 200)
    assert MRTF.experiment("figure-7", "fedavg", "svhn-label-3").partition.options == {"classes_per_client": 3}


def test_figure_8_has_cifar_100_and_three_networks():
    """Part II: K = 100, R = 10 %, E = 20, T = 500; 30 classes and alpha = 0.1 are named in the text."""
    table = MRTF.recipe.tables["correct"]["figure-8"]
    assert {"vgg8-label-30", "vgg8-dir-0.1", "resnet8-label-30", "resnet20-dir-0.1"} <= set(table.columns)
    assert {(cell.experiment.rounds, cell.experiment.local.epochs) for cell in table.cells} == {(500, 20)}
    assert {cell.experiment.data.label for cell in table.cells} == {"fine_label"}


def test_figure_9_has_leaf_s_clients_and_rates():
    """Table 1: K = 359 and 112, M = 16k and 84k; rates 0.004 and 1.47, batches of 10."""
    femnist, plays = (MRTF.experiment("figure-9", "mrtf", data) for data in ("femnist", "shakespeare"))
    assert (femnist.partition.clients, femnist.data.test_limit, femnist.rounds) == (359, 16_000, 500)
    assert (plays.partition.clients, plays.data.test_limit, plays.rounds) == (112, 84_000, 200)
    assert (femnist.local.lr, plays.local.lr) == (0.004, 1.47)
    assert (femnist.local.epochs, plays.local.steps) == (5, 50)
    assert {femnist.local.batch_size, plays.local.batch_size} == {10}
    assert plays.partition.options["keys"] == ["play", "role"]


def test_figure_10_has_the_clients_and_epochs_of_part_iv():
    table = MRTF.recipe.tables["correct"]["figure-10"]
    work = {(c.experiment.partition.clients, c.experiment.local.epochs, c.experiment.rounds) for c in table.cells}
    small, large = {(100, 2, 200), (100, 10, 100), (100, 50, 50)}, {(1000, 5, 1000), (1000, 50, 500), (1000, 100, 200)}
    assert work == small | large
    assert {cell.experiment.cohort for cell in table.cells} == {10}, "10 % of 100 and 1 % of 1000"
    assert table.rows == ("fedavg", "feddf", "mrtf")


def test_table_2_tests_on_the_other_domain():
    there = MRTF.experiment("2", "mrtf", "svhn-to-mnistm-dir-0.1")
    back = MRTF.experiment("2", "mrtf", "mnistm-to-svhn-dir-1")
    assert (there.data.source, there.data.test) == ("ufldl-stanford/svhn:cropped_digits", "Mike0307/MNIST-M")
    assert (back.data.source, back.data.test) == ("Mike0307/MNIST-M", "ufldl-stanford/svhn:cropped_digits")
    assert (there.rounds, there.cohort, there.local.epochs, there.partition.clients) == (200, 10, 5, 100)
    assert (there.partition.options["alpha"], back.partition.options["alpha"]) == (0.1, 1.0)
    assert {there.data.size, back.data.size} == {32}


def test_the_text_has_neither_weight_decay_nor_clipping_nor_a_bound_on_u():
    one = MRTF.experiment("3", "mrtf", "sigma-0", "paper")
    assert (one.local.weight_decay, one.local.clip) == (0.0, None)
    assert MRTF.method("3", "mrtf", "sigma-0", "paper") == {"name": "mrtf", **SENT, "bounded": False}
    assert MRTF.method("3", "feddf", "sigma-0", "paper") == {"name": "feddf", "student": STUDENT}


def test_the_released_code_holds_a_fifth_out_and_refines_every_hundredth_of_the_rounds():
    one = MRTF.experiment("3", "mrtf", "sigma-0", "released")
    assert one.partition.options == {"alpha": 1.0, "held_out": 0.2}
    assert one.evaluate_every == 2, "max(1, T / 100)"
    assert MRTF.method("3", "mrtf", "sigma-0", "released") == {"name": f"{CODE}:mrtf", "every": 2}
    assert MRTF.method("3", "feddf", "sigma-0", "released") == {"name": f"{CODE}:feddf"}
    assert MRTF.method("figure-11", "st+rd", "cifar10-dir-0.1", "released") == {
        "name": f"{CODE}:mrtf", "refine": False,
    }  # fmt: skip
    label = MRTF.experiment("figure-7", "mrtf", "mnist-label-5", "released")
    assert (label.partition.options["held_out"], label.local.batch_size, label.local.epochs) == (0.2, 32, 5)
    assert label.method.options["teacher_batch"] == 320, "ten times the clients' batch"


def test_networks_have_the_sizes_of_the_papers():
    """Parameters of the card's table of models, counted from the layers by hand."""
    colour, grey = (3, 32, 32), (1, 28, 28)
    sizes = {
        ("figure-7", "mnist-dir-1", grey, 10): 1_985_930,
        ("figure-7", "mnistm-dir-1", colour, 10): 66_766,
        ("figure-7", "svhn-dir-1", colour, 10): 188_810,
        ("3", "sigma-0", colour, 10): 4_444_170,
        ("figure-8", "vgg8-dir-1", colour, 100): 4_490_340,
        ("figure-8", "resnet8-dir-1", colour, 100): 83_892,
        ("figure-8", "resnet20-dir-1", colour, 100): 278_324,
        ("figure-9", "femnist", grey, 62): 6_603_710,
    }
    for (table, column, shape, classes), count in sizes.items():
        assert parameters(MRTF.experiment(table, "fedavg", column), shape, classes) == count, column
    released = MRTF.experiment("figure-9", "fedavg", "femnist", "released")
    assert parameters(released, grey, 62) == 608_702


def test_the_refined_model_is_sent_reported_or_sent_after_gentler_steps():
    named = {
        row: MRTF.method("feedback", row, "cifar10-dir-1") for row in ("mrtf-sent", "mrtf-reported", "feddf-gentle")
    }
    assert named["mrtf-sent"] == MRTF.method("3", "mrtf", "sigma-0")
    assert named["mrtf-reported"]["feedback"] is False
    assert named["feddf-gentle"]["student"]["lr"] == 3e-5
    shared = MRTF.experiment("feedback", "mrtf-sent", "cifar10-dir-0.1")
    assert shared == MRTF.experiment("figure-11", "st+rd+clr", "cifar10-dir-0.1")


def test_runs_are_shared_between_tables_and_presets():
    plain = cell_key(MRTF.experiment("3", "fedavg", "sigma-0"))
    assert plain != cell_key(MRTF.experiment("3", "fedavg", "sigma-0.01"))
    noisy = [cell_key(MRTF.experiment("3", row, "sigma-0.01")) for row in ("fedavg", "feddf", "mrtf")]
    assert len({plain, *noisy}) == 4
    full = MRTF.experiment("figure-11", "st+rd+clr", "cifar10-dir-1")
    assert cell_key(full.replace(rounds=200)) == cell_key(MRTF.experiment("3", "mrtf", "sigma-0"))


@pytest.mark.parametrize(
    ("table", "column", "row", "last"),
    [
        ("2", "svhn-to-mnistm-dir-1", "fedavg", 40.26),
        ("2", "svhn-to-mnistm-dir-0.1", "feddf", 35.91),
        ("2", "svhn-to-mnistm-dir-0.1", "mrtf", 41.70),
        ("2", "mnistm-to-svhn-dir-1", "mrtf", 35.32),
        ("2", "mnistm-to-svhn-dir-0.1", "feddf", 28.84),
        ("3", "sigma-0", "fedavg", 79.46),
        ("3", "sigma-0", "mrtf", 82.31),
        ("3", "sigma-0.001", "fedavg", 76.98),
        ("3", "sigma-0.01", "fedavg", 69.08),
        ("3", "sigma-0.01", "mrtf", 76.54),
        ("3", "sigma-0.1", "mrtf", 47.11),
    ],
)
def test_numbers_are_those_of_the_paper(table, column, row, last):
    assert MRTF.expected[table][column][row] == {"last": last}


def test_what_the_paper_does_not_print_is_not_expected():
    expected = MRTF.expected
    assert set(expected) == {"2", "3"}
    assert "fedavg" not in expected["3"]["sigma-0.1"]
    assert not any("feddf" in rows for rows in expected["3"].values())
    assert {len(rows) for rows in expected["2"].values()} == {3}


def test_data_that_are_not_there_are_named(tmp_path):
    for name in AT_HAND:
        (tmp_path / name).mkdir()
    found, missing = set(), set()
    for cell in MRTF.all_cells():
        try:
            with_data(cell.experiment, tmp_path)
            found.add(cell.experiment.data.source)
        except FedstillError as error:
            missing.add(str(error).split("'")[1])
    assert missing == {"svhn", "MNIST-M", "cifar100", "femnist"}
    assert {source.rpartition("/")[2] for source in found} == AT_HAND


def test_every_documented_run_is_still_that_of_its_cell():
    if not MRTF.runs():
        pytest.skip("nothing has been run yet")
    keys = {cell_key(cell.experiment) for cell in MRTF.all_cells()}
    assert {run["key"] for run in MRTF.runs()} <= keys


def test_commands_of_the_readme_name_tables_columns_and_methods_that_exist():
    assert {table for table, _ in MRTF.documented_commands()} == {*NAMES, "feedback", "defaults"}


SMALL = (
    "data.source=digits", "model.name=mlp", "model.hidden=[8]", "rounds=2", "partition.clients=6", "cohort=3",
    "local.epochs=1", "local.augment=[]", "engine.device=cpu", "engine.threads=1",
)  # fmt: skip


@pytest.mark.slow
def test_a_small_table_3_runs_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["--table", "3", "--columns", "sigma-0.01", "--methods", "fedavg,mrtf", "--jobs", "1"]
    (column,) = json.loads(MRTF.bench(*words, *settings, "--format", "json"))["columns"]
    fedavg, mrtf = column["rows"]
    assert (fedavg["seeds"], mrtf["seeds"]) == (1, 1)
    assert fedavg["paper"] == {"last": 69.08}
    assert fedavg["beside"] == {}
    assert mrtf["beside"]["pseudo_labels"]["mean"] == 359, "every test sample has a target"
    assert 0 <= mrtf["beside"]["pseudo_label_accuracy"]["mean"] <= 100
