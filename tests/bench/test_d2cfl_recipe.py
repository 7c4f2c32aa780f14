"""D2C-FL's benchmark: every cell can be built, every setting is the paper's, what is missing is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from recipe_cases import PaperCase, parameters

from fedstill.bench.recipe import with_data
from fedstill.bench.results import cell_key
from fedstill.cli.bench import heading
from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS, class_counts

D2C = PaperCase("d2cfl")
NAMES = (*(f"figure-{number}" for number in range(4, 16)), "options", "defaults")
SPLITS = ("iid", "0.8-bias", "2-class")
LITERAL = {  # Sections 3.2 and 4.1; beside alpha and beta
    "rule": "max", "threshold": 0.75, "labels": "hard", "student_start": "carried", "student_share": "fixed",
    "feedback": True, "student": {"lr": 1e-3, "lr_schedule": "constant", "lr_epoch_decay": 0.95},
}  # fmt: skip
MAIN = tuple(f"cnn-cifar10-{split}" for split in SPLITS)


def test_every_figure_is_there():
    assert tuple(D2C.recipe.presets) == ("correct",)
    assert tuple(D2C.recipe.tables["correct"]) == NAMES


def test_a_figure_is_listed_by_the_name_that_the_command_takes():
    named = [heading(table).split(":")[0] for table in D2C.recipe.tables["correct"].values()]
    assert named == list(NAMES)


def test_methods_of_a_column_differ_in_nothing_but_the_method():
    """But for Figure 8, whose columns hold three splits and one place, and Figure 15, whose rows are optimisers."""
    odd = {text.split()[1] for text in D2C.columns_that_differ_in_more_than_the_method()}
    assert odd == {"figure-8", "figure-15"}


def test_a_cell_is_in_its_table_once():
    for table in D2C.recipe.tables["correct"].values():
        places = [(cell.row, cell.column) for cell in table.cells]
        assert len(places) == len(set(places)), table.name


@pytest.mark.parametrize("column", MAIN)
def test_the_main_experiment_has_the_setting_of_section_4_1(column):
    """100 clients, 10 a round, 100 rounds; 5 epochs, batch 128, Adam 0.001 times 0.95 an epoch; 20,000 images."""
    one = D2C.experiment("figure-9", "d2cfl", column)
    assert (one.rounds, one.cohort, one.partition.clients, one.evaluate_every) == (100, 10, 100, 1)
    local = one.local
    assert (local.epochs, local.batch_size, local.optimizer, local.lr) == (5, 128, "adam", 1e-3)
    assert (local.lr_epoch_decay, local.lr_decay, local.momentum, local.augment) == (0.95, 1.0, 0.0, ())
    assert (one.data.client_rows, one.data.test_share, one.data.unlabeled) == (20_000, 0.2, "central")
    assert (one.data.unlabeled_limit, one.model.name) == (None, "lenet5")
    assert one.partition.options["size"] == 600


@pytest.mark.parametrize(
    ("column", "alpha", "beta", "size"),
    [
        ("cnn-cifar10", 0.2, 0.7, 600),
        ("cnn-cifar100", 0.2, 0.4, 100),
        ("resnet8-cifar10", 0.8, 0.9, 600),
        ("resnet8-cifar100", 0.2, 0.4, 100),
    ],
)
def test_the_rollbacks_are_those_of_the_text(column, alpha, beta, size):
    for number, split in enumerate(SPLITS, 5):
        place = (f"figure-{number}", "d2cfl", f"{column}-{split}")
        assert D2C.method(*place) == {"name": "d2cfl", **LITERAL, "mix_alpha": alpha, "beta": beta}
        assert D2C.experiment(*place).partition.options["size"] == size


def test_the_others_are_as_the_paper_ran_them():
    place = "cnn-cifar10-iid"
    assert D2C.method("figure-5", "fedavg", place) == {"name": "fedavg"}
    for row in ("feddf", "fedbe"):
        options = D2C.method("figure-5", row, place)
        assert (options["labels"], options["warm_up"]) == ("hard", 10)
        assert (options["student"]["epochs"], options["student"]["lr_epoch_decay"]) == (5, 0.95)


def counts_of(column: str, classes: int = 10) -> np.ndarray:
    """Images a client and class, of a pool of 20,000 with equally many of each."""
    partition = D2C.experiment(f"figure-{5 + SPLITS.index(column.split('-', 2)[2])}", "fedavg", column).partition
    labels = np.repeat(np.arange(classes), 20_000 // classes)
    parts = PARTITIONS[partition.scheme](labels, partition.clients, seed=0, **partition.options)
    return class_counts(parts, labels, classes)


def test_clients_have_what_the_splits_say():
    """Section 4.1 and Figure 3; 120 images over nine classes are 13 each and three left over."""
    assert (counts_of("cnn-cifar10-iid") == 60).all()
    bias = np.sort(counts_of("cnn-cifar10-0.8-bias"), axis=1)
    assert (bias[:, -1] == 480).all()
    assert (bias[:, :6] == 13).all()
    assert (bias[:, 6:9] == 14).all()
    pairs = np.sort(counts_of("cnn-cifar10-2-class"), axis=1)
    assert (pairs[:, -2:] == 300).all()
    assert (pairs[:, :-2] == 0).all()


def test_clients_of_cifar_100_have_what_the_splits_say():
    assert (counts_of("cnn-cifar100-iid", 100) == 1).all()
    bias = np.sort(counts_of("cnn-cifar100-0.8-bias", 100), axis=1)
    assert (bias[:, -1] == 80).all()
    assert (bias[:, -21:-1] == 1).all()
    assert (counts_of("cnn-cifar100-2-class", 100).max(axis=1) == 50).all()


def test_networks_have_the_sizes_of_lenet_5_and_of_feddf_s_resnet_8():
    shape = (3, 32, 32)
    for column, classes, count in (
        ("cnn-cifar10-iid", 10, 62_006),
        ("cnn-cifar100-iid", 100, 69_656),
        ("resnet8-cifar10-iid", 10, 78_042),
        ("resnet8-cifar100-iid", 100, 83_892),
    ):
        assert parameters(D2C.experiment("figure-5", "fedavg", column), shape, classes) == count


def test_pseudo_labels_are_looked_at_in_the_runs_of_the_accuracies():
    for number, column in enumerate(MAIN, 5):
        for row in ("fedavg", "feddf", "fedbe", "d2cfl"):
            one, other = (D2C.experiment(table, row, column) for table in ("figure-9", f"figure-{number}"))
            assert cell_key(one) == cell_key(other)


def test_training_in_one_place_is_one_client_with_40_000_images_tested_on_the_same_8_000():
    one = D2C.experiment("figure-8", "centralised-40k", "cnn-cifar10")
    assert (one.partition.scheme, one.partition.clients, one.cohort) == ("iid", 1, 1)
    assert one.data.client_rows == 40_000
    assert one.data.test_share * (60_000 - 40_000) == pytest.approx(0.2 * (60_000 - 20_000)) == 8_000
    assert (one.rounds, one.local) == (100, D2C.experiment("figure-9", "d2cfl", MAIN[0]).local)
    assert D2C.experiment("figure-8", "centralised-50k", "cnn-cifar10").data.client_rows is None
    same = D2C.experiment("figure-8", "d2cfl-2-class", "cnn-cifar10")
    assert cell_key(same) == cell_key(D2C.experiment("figure-7", "d2cfl", MAIN[2]))


def test_figure_13_has_four_fifths_of_the_server_s_images_without_labels():
    for count, limit in ((10_000, 8_000), (20_000, 16_000), (30_000, 24_000), (40_000, None)):
        assert D2C.experiment("figure-13", "d2cfl", f"iid-u-{count}").data.unlabeled_limit == limit
    whole = D2C.experiment("figure-13", "feddf", "2-class-u-40000")
    assert cell_key(whole) == cell_key(D2C.experiment("figure-7", "feddf", MAIN[2]))


def test_figure_14_varies_the_teachers_and_figure_15_the_optimiser():
    options = {cell.row: cell.experiment.method.options.get("past", 10) for cell in D2C.cells("figure-14")}
    assert options == {f"teachers-{count}": count for count in (1, 5, 10, 20)}
    sgd = D2C.experiment("figure-15", "sgd", MAIN[0])
    assert (sgd.local.optimizer, sgd.local.lr, sgd.local.lr_epoch_decay, sgd.local.momentum) == ("sgd", 1e-3, 1.0, 0.0)
    student = {"lr": 1e-3, "lr_schedule": "constant", "optimizer": "sgd", "lr_epoch_decay": 1.0}
    assert sgd.method.options == {**LITERAL, "mix_alpha": 0.2, "beta": 0.8, "student": student}
    assert D2C.experiment("figure-15", "sgd-momentum", MAIN[0]).local.momentum == 0.9


def test_figure_4_has_both_rollbacks_and_fedavg_once_a_split():
    table = D2C.recipe.tables["correct"]["figure-4"]
    pairs = {(c.experiment.method.options["mix_alpha"], c.experiment.method.options["beta"]) for c in table.cells}
    assert {(0.0, 0.0), (0.2, 0.7), (0.8, 1.0)} <= pairs
    assert [pair for pair in pairs if pair[0] == 1.0] == [(1.0, 0.0)]
    assert {cell.experiment.data.unlabeled_limit for cell in table.cells} == {8_000}


@pytest.mark.parametrize(
    ("table", "column", "gain"),
    [
        ("figure-5", "cnn-cifar10-iid", "at most 4"),
        ("figure-6", "cnn-cifar100-0.8-bias", "at most 8"),
        ("figure-6", "resnet8-cifar10-0.8-bias", "at most 3"),
        ("figure-7", "resnet8-cifar10-2-class", 0.5),
        ("figure-7", "resnet8-cifar100-2-class", "at most 4"),
    ],
)
def test_gains_are_those_of_the_text(table, column, gain):
    assert D2C.expected[table][column] == {"d2cfl": {"gain": gain}}


def test_every_column_of_the_accuracies_has_its_gain_and_nothing_else_is_expected():
    expected = D2C.expected
    assert set(expected) == {"figure-5", "figure-6", "figure-7"}
    for table, columns in expected.items():
        assert set(columns) == set(D2C.recipe.tables["correct"][table].columns)


def test_data_that_are_not_there_are_named(tmp_path):
    (tmp_path / "cifar10").mkdir()
    missing = set()
    for cell in D2C.all_cells():
        try:
            with_data(cell.experiment, tmp_path)
        except FedstillError as error:
            missing.add(str(error).split("'")[1])
    assert missing == {"cifar100"}


def test_every_documented_run_is_still_that_of_its_cell():
    if not D2C.runs():
        pytest.skip("nothing has been run yet")
    keys = {cell_key(cell.experiment) for cell in D2C.all_cells()}
    assert {run["key"] for run in D2C.runs()} <= keys


def test_commands_of_the_readme_name_tables_columns_and_methods_that_exist():
    assert {table for table, _ in D2C.documented_commands()} == set(NAMES)


SMALL = (
    "data.source=digits", "data.client_rows=600", "model.name=mlp", "model.hidden=[32]", "rounds=3", "cohort=3",
    "partition.clients=6", "partition.size=100", "local.epochs=5", "local.lr=0.01", "method.past=1",
    "method.threshold=0.3", "engine.device=cpu", "engine.threads=1",
)  # fmt: skip


@pytest.mark.slow
def test_a_small_figure_9_runs_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["--table", "figure-9", "--columns", "cnn-cifar10-iid", "--methods", "d2cfl", "--jobs", "1"]
    (column,) = json.loads(D2C.bench(*words, *settings, "--format", "json"))["columns"]
    (d2cfl,) = column["rows"]
    assert d2cfl["seeds"] == 1
    labels = d2cfl["beside"]["pseudo_labels"]["mean"]
    assert 0 < labels <= 958, "four fifths of the 1,197 rows that are not the clients'"
    assert 0 < d2cfl["beside"]["pseudo_label_accuracy"]["mean"] <= 100
