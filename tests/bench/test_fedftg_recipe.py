"""FedFTG's benchmark: every cell can be built, every number and setting is the paper's, what is missing is named."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache

import numpy as np
import pytest
from recipe_cases import PaperCase, parameters

from fedstill import run
from fedstill.bench.recipe import with_data
from fedstill.bench.results import cell_key, method_text
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.types import Need
from fedstill.methods.lookup import build_method, parse, write
from fedstill.partition import PARTITIONS, class_counts
from fedstill.privacy.accountant import analytic_gaussian_multiplier

FEDFTG = PaperCase("fedftg")
PRESETS = ("correct", "paper", "released")
NAMES = ("1", "2", "3", "4", "5", "6", "9", "10", "figure-4", "figure-5", "figure-6", "stems")
OURS = ("small", "forms", "count-noise", "centralised", "options")
BASES = ("fedavg", "fedprox", "feddyn", "moon", "scaffold")
TABLE_1 = (*BASES, "fedgen", "feddf_gen", "scaffold+fedftg")
DEFAULT = "cifar10-beta-0.3"


@cache
def parts_of(text: str) -> dict[str, dict]:
    (stretch,) = parse(text)
    return {part.name.rpartition(":")[2]: part.options for part in stretch.parts}


def parts(table, row, column, preset="correct"):
    return parts_of(method_text(FEDFTG.experiment(table, row, column, preset)))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_table_and_figure_is_there_under_every_preset(preset):
    assert tuple(FEDFTG.recipe.presets) == PRESETS
    assert tuple(FEDFTG.recipe.tables[preset]) == (*NAMES, *(OURS if preset == "correct" else ()))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cell_is_in_its_table_once(preset):
    for table in FEDFTG.recipe.tables[preset].values():
        places = [(cell.row, cell.column) for cell in table.cells]
        assert len(places) == len(set(places)), table.name


def test_methods_of_a_column_differ_in_nothing_but_the_method_and_the_released_fedprox_in_its_weight_decay():
    odd = FEDFTG.columns_that_differ_in_more_than_the_method()
    assert {place.split()[0] for place in odd} == {"released"}
    for preset in PRESETS:
        for table in FEDFTG.recipe.tables[preset].values():
            for cell in table.cells:
                decay = 1.1e-3 if preset == "released" and cell.row.startswith("fedprox") else 1e-3
                assert cell.experiment.local.weight_decay == pytest.approx(decay)
    assert FEDFTG.method("1", "fedprox", DEFAULT, "released") == {"name": "fedavg"}


def test_the_setting_is_that_of_section_4_1():
    """K = 100, C = 0.1, E = 5, T = 1000, batches of 50, 0.1 times 0.998 a round, decay 1e-3; clip 10 is the code's."""
    one = FEDFTG.experiment("1", "fedavg", DEFAULT)
    assert (one.rounds, one.cohort, one.partition.clients, one.evaluate_every) == (1000, 10, 100, 1)
    local = one.local
    assert (local.epochs, local.batch_size, local.optimizer, local.momentum) == (5, 50, "sgd", 0.0)
    assert (local.lr, local.lr_decay, local.weight_decay, local.clip) == (0.1, 0.998, 1e-3, 10.0)
    assert local.augment == ("crop", "flip")
    assert [FEDFTG.experiment("1", "fedavg", DEFAULT, preset).sampling for preset in PRESETS] == [
        "fixed",
        "fixed",
        "poisson",
    ]


def test_baselines_have_the_options_of_section_7_3():
    assert FEDFTG.method("1", "fedprox", DEFAULT) == {"name": "fedprox", "mu": 1e-4}
    assert FEDFTG.method("1", "feddyn", DEFAULT) == {"name": "feddyn", "alpha": 0.01}
    assert FEDFTG.method("1", "moon", DEFAULT) == {"name": "moon", "mu": 1.0, "temperature": 0.5}
    assert {options["moon"]["mu"] for options in map(parts_of, methods_of("options"))} == {0.1, 1.0, 5.0}
    assert FEDFTG.method("1", "fedgen", DEFAULT) == {
        "name": "fedgen",
        "match_weight": 10.0,
        "ratio": 32 / 50,
        "generator": {
            "network": "features",
            "noise": 100,
            "noise_kind": "normal",
            "batch_size": 50,
            "lr": 0.01,
            "lr_decay": 0.998,
        },
    }
    assert FEDFTG.method("1", "feddf_gen", DEFAULT) == {"name": "feddf_gen", "pool": "probabilities"}
    assert FEDFTG.method("1", "scaffold+fedftg", DEFAULT) == 'scaffold(option="II")+fedftg'


def methods_of(table, preset="correct"):
    return [method_text(cell.experiment) for cell in FEDFTG.cells(table, preset)]


def test_noise_has_100_numbers_on_cifar_10_and_256_elsewhere():
    for row, part in (("scaffold+fedftg", "fedftg"), ("feddf_gen", "feddf_gen"), ("fedgen", "fedgen")):
        assert parts("1", row, DEFAULT)[part].get("generator", {}).get("noise", 100) == 100, "the default"
        assert parts("1", row, "cifar100-beta-0.6")[part]["generator"]["noise"] == 256
        assert parts("6", row, "tiny")[part]["generator"]["noise"] == 256


def test_the_paper_and_the_released_code_are_forms_of_the_papers_file():
    printed = parts("1", "scaffold+fedftg", DEFAULT, "paper")
    assert printed["fedftg"] == {
        "discrepancy": "kl",
        "discrepancy_through": "both",
        "student_loss": "reverse_kl",
        "student_scale": "batch",
        "student": {"batch_norm": "train"},
        "generator": {"network": "conv_paper"},
    }
    code = {"clients": "each", "cls_weights": "client", "student": {"batch_norm": "train"}}
    assert parts("1", "scaffold+fedftg", DEFAULT, "released")["fedftg"] == code
    for preset in ("paper", "released"):
        text = FEDFTG.experiment("1", "scaffold+fedftg", DEFAULT, preset).method.name
        assert f"+{FEDFTG.folder / 'released.py'}:fedftg(" in text
    evenly = {cell.experiment.server.aggregate for cell in FEDFTG.cells("1", "paper")}
    assert evenly == {'average(weighting="uniform")'}


def test_every_method_of_every_cell_can_be_built():
    methods = [cell.experiment.method for cell in FEDFTG.all_cells()]
    texts = {write(method.name, method.options) for method in methods}
    assert len(texts) > 60
    for text in texts:
        assert build_method(text)


def test_networks_have_the_sizes_of_the_card():
    sizes = {
        ("stems", "imagenet"): 11_181_642, ("stems", "cifar"): 11_173_962, ("small", "cnn"): 2_156_490,
    }  # fmt: skip
    for (table, column), count in sizes.items():
        assert parameters(FEDFTG.experiment(table, "fedavg", column), (3, 32, 32), 10) == count


def split(column, table="1", row="fedavg"):
    partition = FEDFTG.experiment(table, row, column).partition
    labels = np.repeat(np.arange(10), 5000)
    parts = PARTITIONS[partition.scheme](labels, partition.clients, seed=0, **partition.options)
    return class_counts(parts, labels, 10)


@pytest.mark.parametrize(
    ("column", "client_0"),
    [
        ("cifar10-beta-0.6", [4, 5, 68, 3, 98, 105, 12, 297, 3, 4]),
        pytest.param(DEFAULT, [84, 1, 28, 181, 14, 4, 3, 13, 4, 267], marks=pytest.mark.slow),  # 42 million redraws
    ],
)
def test_a_column_has_the_published_clients(column, client_0):
    """Card 15.3: FedFTG's path, seed 1024; sizes 599 and 99 times 499."""
    counts = split(column)
    assert counts[0].tolist() == client_0
    assert sorted(set(counts.sum(axis=1).tolist())) == [499, 599]


def test_the_ablation_takes_away_what_the_paper_takes_away():
    whole = parts("4", "scaffold+fedftg", DEFAULT)["fedftg"]
    assert whole == {}
    gone = {row: parts("4", row, DEFAULT)["fedftg"] for row in FEDFTG.recipe.tables["correct"]["4"].rows}
    hsm, cls, abe = {"discrepancy": "none"}, {"labels": "uniform"}, {"ensemble": "uniform"}
    assert gone == {
        "scaffold+fedftg": {}, "no-hsm": hsm, "no-cls": cls, "no-abe": abe, "no-hsm-cls": hsm | cls,
        "no-hsm-abe": hsm | abe, "no-cls-abe": cls | abe, "no-hsm-cls-abe": hsm | cls | abe,
        "no-loss-cls": {"generator": {"lam_cls": 0.0}}, "no-loss-dis": {"generator": {"lam_dis": 0.0}},
        "no-loss-cls-dis": {"generator": {"lam_cls": 0.0, "lam_dis": 0.0}}, 
        "mse": {"discrepancy": "mse", "student_loss": "mse"},
    }  # fmt: skip
    assert {cell.experiment.rounds for cell in FEDFTG.cells("4")} == {500}
    small = FEDFTG.recipe.tables["correct"]["small"]
    assert set(small.rows) == {*gone, "fedavg", "fedavg+fedftg", "scaffold"}
    assert {(cell.experiment.model.name, cell.experiment.rounds) for cell in small.cells} == {("cnn", 100)}


def test_features_are_invented_with_the_generator_of_table_7_b():
    assert parts("5", "fedftg-feature", "beta-0.3")["fedftg"] == {
        "input": "feature",
        "generator": {"network": "features"},
    }
    assert parts("5", "fedftg-input", "beta-0.3")["fedftg"] == {}


def test_larger_images_and_vgg11_have_the_generators_of_table_8():
    for table, column in (("6", "mio-tcd"), ("10", "vgg11")):
        assert parts(table, "scaffold+fedftg", column)["fedftg"]["generator"]["network"] == "deconv"
        assert parts(table, "feddf_gen", column)["feddf_gen"]["generator"]["network"] == "deconv"
        assert parts(table, "fedgen", column)["fedgen"]["generator"]["network"] == "features_large"
    assert "generator" not in parts("10", "scaffold+fedftg", "resnet34")["fedftg"]


@pytest.mark.parametrize(
    ("column", "rounds", "clients", "cohort", "size"),
    [("mio-tcd", 50, 100, 10, 112), ("compcars", 100, 50, 5, 112), ("tiny", 1000, 100, 10, 64)],
)
def test_table_6_has_the_clients_rounds_and_sizes_of_section_4_4(column, rounds, clients, cohort, size):
    one = FEDFTG.experiment("6", "fedavg", column)
    assert (one.rounds, one.partition.clients, one.cohort, one.data.size) == (rounds, clients, cohort, size)
    assert one.partition.options["beta"] == 0.6
    assert "moon" not in FEDFTG.recipe.tables["correct"]["6"].rows


def test_rounds_to_an_accuracy_are_those_of_the_runs_of_table_1():
    for table, beta in (("2", "0.3"), ("9", "0.6")):
        goals = {"cifar10": (0.75, 0.8), "cifar100": (0.4, 0.5)}
        for data, targets in goals.items():
            for target in targets:
                aimed = FEDFTG.experiment(table, "moon", f"{data}-beta-{beta}-to-{round(100 * target)}")
                assert aimed.target == target
                assert cell_key(aimed) == cell_key(FEDFTG.experiment("1", "moon", f"{data}-beta-{beta}"))


def test_runs_are_shared_between_tables():
    key = cell_key(FEDFTG.experiment("1", "scaffold+fedftg", DEFAULT))
    same = [
        ("3", "scaffold+fedftg", "beta-0.3"), ("5", "fedftg-input", "beta-0.3"),
        ("figure-4", "scaffold+fedftg", DEFAULT), ("figure-5", "scaffold+fedftg", "beta-0.3"),
        ("figure-5", "scaffold+fedftg", "c-0.1"), ("figure-6", "lam-cls-1", DEFAULT),
        ("figure-6", "noise-100", DEFAULT),
    ]  # fmt: skip
    assert {cell_key(FEDFTG.experiment(*place)) for place in same} == {key}
    assert cell_key(FEDFTG.experiment("figure-6", "lam-cls-0.5", DEFAULT)) != key
    short = cell_key(FEDFTG.experiment("stems", "fedavg+fedftg", "imagenet"))
    assert cell_key(FEDFTG.experiment("forms", "default", DEFAULT)) == short
    assert cell_key(FEDFTG.experiment("count-noise", "fedavg+fedftg", "exact")) == short


def test_the_first_150_rounds_pair_two_methods_with_fedftg_on_both_stems():
    table = FEDFTG.recipe.tables["correct"]["stems"]
    pairs = ("fedavg", "fedavg+fedftg", "scaffold", "scaffold+fedftg")
    assert table.rows == (*pairs, "fedavg+fedftg-bn-train", "scaffold+fedftg-bn-train")
    assert table.columns == ("imagenet", "imagenet-to-75", "cifar", "cifar-to-75")
    assert parts("stems", "scaffold+fedftg-bn-train", "cifar")["fedftg"] == {"student": {"batch_norm": "train"}}
    for cell in (cell for cell in table.cells if cell.row in pairs):
        one = cell.experiment
        assert (one.rounds, one.model.options["stem"]) == (150, cell.column.split("-")[0])
        whole = FEDFTG.experiment("3", cell.row, "beta-0.3")
        assert one.replace(rounds=1000, model=whole.model.model_dump(), target=None, checkpoint_every=100) == whole


def test_noise_on_the_counts_reaches_the_tenth_that_the_paper_speaks_of():
    """A client has 50 samples of a class on average: at epsilon = 1.1 the noise deviates by 9.7 % of that."""
    one = FEDFTG.experiment("count-noise", "scaffold+fedftg", "epsilon-1.1").privacy
    assert (one.label_counts, one.label_epsilon, one.delta) == ("dp", 1.1, 1e-5)
    assert math.sqrt(2) * analytic_gaussian_multiplier(one.label_epsilon, one.delta) / 50 == pytest.approx(
        0.097, abs=1e-3
    )
    none = FEDFTG.experiment("count-noise", "scaffold+fedftg", "none")
    assert none.privacy.label_counts == "none"
    (phase,) = build_method(none.method.name, none.method.options)
    assert Need.LABEL_COUNTS_UPLOADED not in needs_of(phase.method)


def test_every_printed_number_has_a_cell_and_every_cell_its_number():
    expected = FEDFTG.expected
    numbers = {(table, column, row) for table in expected for column, rows in expected[table].items() for row in rows}
    built = {(name, cell.column, cell.row) for name in NAMES if name.isdigit() for cell in FEDFTG.cells(name)}
    assert built - numbers == {("4", DEFAULT, "scaffold+fedftg")}, "lost in the text"
    assert {table for table, _, _ in numbers - built} == {"stems", "centralised"}


@pytest.mark.parametrize(
    ("table", "column", "row", "number"),
    [
        ("1", "cifar10-iid", "feddyn", {"last": 85.19}),
        ("1", DEFAULT, "scaffold+fedftg", {"last": 84.38}),
        ("1", "cifar100-beta-0.6", "feddf_gen", {"last": 51.36}),
        ("2", f"{DEFAULT}-to-75", "fedavg", {"rounds": 153.67}),
        ("2", f"{DEFAULT}-to-80", "moon", {"rounds": 347.0}),
        ("2", "cifar100-beta-0.3-to-50", "scaffold+fedftg", {"rounds": 166.33}),
        ("3", "beta-0.6", "feddyn+fedftg", {"last": 83.17}),
        ("3", "beta-0.3-to-75", "fedavg+fedftg", {"rounds": 122.0}),
        ("4", DEFAULT, "no-hsm-cls-abe", {"last": 81.98}),
        ("4", DEFAULT, "mse", {"last": 10.17}),
        ("5", "beta-0.6", "fedftg-feature", {"last": 84.67}),
        ("6", "compcars", "fedgen", {"last": 45.96}),
        ("9", "cifar10-beta-0.6-to-75", "scaffold", {"rounds": 77.0}),
        ("9", "cifar100-beta-0.6-to-50", "fedgen", {"rounds": 571.33}),
        ("10", "resnet34", "scaffold+fedftg", {"last": 85.0}),
        ("stems", "cifar-to-75", "scaffold", {"rounds": 100.33}),
        ("centralised", "cifar100-cifar", "fedavg", {"last": 73.98}),
    ],
)
def test_numbers_are_those_of_the_paper(table, column, row, number):
    assert FEDFTG.expected[table][column][row] == number


def test_numbers_that_the_paper_prints_twice_are_the_same():
    for column, numbers in (("beta-0.6", "cifar10-beta-0.6"), ("beta-0.3", DEFAULT)):
        for row in (*BASES, "scaffold+fedftg"):
            assert FEDFTG.expected["3"][column][row] == FEDFTG.expected["1"][numbers][row]
    for goal in (75, 80):
        for row in (*BASES, "scaffold+fedftg"):
            assert FEDFTG.expected["3"][f"beta-0.3-to-{goal}"][row] == FEDFTG.expected["2"][f"{DEFAULT}-to-{goal}"][row]


def test_data_that_are_not_there_are_named(tmp_path):
    (tmp_path / "cifar10").mkdir()
    missing = set()
    for cell in FEDFTG.all_cells():
        try:
            with_data(cell.experiment, tmp_path)
        except FedstillError as error:
            missing.add(str(error).split("'")[1])
    assert missing == {"cifar100", "mio_tcd", "compcars", "tiny-imagenet"}


def test_every_documented_run_is_still_that_of_its_cell():
    if not FEDFTG.runs():
        pytest.skip("nothing has been run yet")
    keys = {cell_key(cell.experiment) for cell in FEDFTG.all_cells()}
    assert {run["key"] for run in FEDFTG.runs()} <= keys


def test_commands_of_the_readme_name_tables_columns_and_methods_that_exist():
    assert {table for table, _ in FEDFTG.documented_commands()} == {*NAMES, *OURS}


def on_digits(one):
    """The cell with its own method and counts on a few digits."""
    digits = {"data": "digits", "model": {"name": "mlp", "hidden": [8]}, "engine": {"device": "cpu"}}
    return one.replace(
        rounds=1, cohort=3, partition={"scheme": "feddyn", "clients": 12, "beta": 0.6},
        local={**dataclasses.asdict(one.local), "epochs": 1, "augment": ()}, **digits,
    )  # fmt: skip


def test_fedftg_runs_with_counts_that_are_exact_noisy_or_not_told():
    """Other counts are other labels, and another generator."""
    losses = set()
    for column in ("exact", "epsilon-0.1", "none"):
        (row,) = run(on_digits(FEDFTG.experiment("count-noise", "scaffold+fedftg", column))).history.rows
        assert 0 <= row["accuracy"] <= 1
        losses.add(row["server/generator_loss"])
    assert len(losses) == 3


def quick(text):
    """Generators of 72 million parameters give way to a small one."""
    text = text.replace('generator.network="features"', 'generator.network="dense"')
    return text.replace("fedgen(", "fedgen(generator.steps=2, ")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_of_every_table_runs_on_a_few_digits(preset):
    """But those of Table 8's generators, which need larger images than 8x8."""
    done = set()
    for table in FEDFTG.recipe.tables[preset].values():
        for cell in table.cells:
            text = method_text(cell.experiment)
            if "deconv" in text or "features_large" in text:
                continue
            method = cell.experiment.method
            one = on_digits(cell.experiment).replace(method=quick(write(method.name, method.options)))
            if cell_key(one) not in done:
                done.add(cell_key(one))
                (row,) = run(one).history.rows
                assert 0 <= row["accuracy"] <= 1, (table.name, cell.row)
    assert len(done) > 30


SMALL = (
    "data.source=digits", "model.name=mlp", "model.hidden=[8]", "rounds=2", "partition.clients=12",
    "partition.beta=2.0", "local.epochs=1", "engine.device=cpu", "engine.threads=1",
)  # fmt: skip


@pytest.mark.slow
def test_a_small_table_runs_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["--table", "small", "--methods", "fedavg,fedavg+fedftg", "--jobs", "1"]
    (column,) = json.loads(FEDFTG.bench(*words, *settings, "--format", "json"))["columns"]
    fedavg, fedftg = column["rows"]
    assert (fedavg["seeds"], fedftg["seeds"]) == (1, 1)
    assert fedavg["beside"] == {}
    assert fedftg["beside"]["accuracy_aggregated"]["mean"] > 0
