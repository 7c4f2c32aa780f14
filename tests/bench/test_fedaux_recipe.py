"""FedAUX's benchmark: every cell can be built, every number and setting is the paper's, one extractor serves many."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
from papers import BENCHMARKS
from recipe_cases import PaperCase, parameters

from fedstill import run
from fedstill.bench.recipe import with_data
from fedstill.bench.results import cell_key, method_text
from fedstill.core.errors import FedstillError
from fedstill.methods.lookup import build_method, parse, write
from fedstill.server import pretrain

FEDAUX = PaperCase("fedaux")
PRESETS = ("correct", "paper", "released")
NAMES = ("1", "2", "3", "figure-4", "figure-6", "figure-7", "figure-8", "figure-9")
OURS = ("privacy", "options", "clients", "defaults")
AT_HAND = {"cifar10", "tiny_imagenet", "ag_news", "shakespeare"}
PRETRAINED = "simclr(training.epochs=100, training.seed=0)"


@cache
def parts_of(text: str) -> dict[str, dict]:
    (stretch,) = parse(text)
    return {part.name.rpartition(":")[2]: part.options for part in stretch.parts}


def fedaux_options(table, row, column, preset="correct"):
    return parts_of(FEDAUX.method(table, row, column, preset))["fedaux"]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_table_and_figure_is_there_under_every_preset(preset):
    assert tuple(FEDAUX.recipe.presets) == PRESETS
    assert tuple(FEDAUX.recipe.tables[preset]) == (*NAMES, *(OURS if preset == "correct" else ()))


def test_methods_of_a_column_differ_in_nothing_but_the_method():
    assert FEDAUX.columns_that_differ_in_more_than_the_method() == []


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cell_is_in_its_table_once(preset):
    for table in FEDAUX.recipe.tables[preset].values():
        places = [(cell.row, cell.column) for cell in table.cells]
        assert len(places) == len(set(places)), table.name


def test_clients_train_as_section_vi_a_says():
    """Adam, 1e-3, batches of 32; one epoch but for the one-shot table; text, `clients` and `defaults` are ours."""
    for preset in PRESETS:
        for name, table in FEDAUX.recipe.tables[preset].items():
            for cell in table.cells if name not in ("clients", "defaults") else ():
                local = cell.experiment.local
                assert (local.optimizer, local.batch_size, local.augment) == ("adam", 32, ())
                assert local.lr == (5e-4 if name == "figure-7" else 1e-3)
                assert local.epochs == (40 if name == "3" else 1)
                assert local.part == ("head" if name == "figure-9" else "all")
                assert cell.experiment.partition.scheme == "fedaux"


@pytest.mark.parametrize(
    ("table", "column", "rounds", "clients", "cohort", "alpha"),
    [
        ("1", "stl10-alpha-0.01-c-0.4", 100, 20, 8, 0.01),
        ("1", "tiny-alpha-100-c-0.8", 100, 20, 16, 100.0),
        ("1", "cifar100-alpha-0.01-c-0.2", 100, 20, 4, 0.01),
        ("2", "svhn-alpha-100", 100, 40, 16, 100.0),
        ("3", "stl10-shufflenet-alpha-10.24", 1, 100, 100, 10.24),
        ("figure-6", "tiny-mixed-n80-alpha-0.01", 100, 80, 32, 0.01),
        ("figure-9", "stl10-alpha-0.16", 100, 80, 32, 0.16),
    ],
)
def test_tables_have_the_clients_rounds_and_skew_of_the_paper(table, column, rounds, clients, cohort, alpha):
    one = FEDAUX.experiment(table, "fedaux", column)
    assert (one.rounds, one.partition.clients, one.cohort_size(clients)) == (rounds, clients, cohort)
    assert one.partition.options == {"alpha": alpha}
    assert one.data.source == "uoft-cs/cifar10"


def test_the_auxiliary_set_is_what_the_column_is_named_after():
    found = {
        cell.column.split("-")[0]: cell.experiment.data.unlabeled
        for name in NAMES
        if name != "figure-7"
        for cell in FEDAUX.cells(name)
    }
    assert found == {
        "stl10": "stl10", "cifar100": "uoft-cs/cifar100", "svhn": "ufldl-stanford/svhn:cropped_digits",
        "tiny": "tiny_imagenet",
    }  # fmt: skip


def test_table_1_has_every_baseline_with_and_without_pre_training():
    rows = FEDAUX.recipe.tables["correct"]["1"].rows
    plain = ("fedavg", "fedprox", "feddf", "fedbe")
    assert rows == (*plain, *(f"{name}+p" for name in plain), "fedaux")
    for row in rows:
        text = method_text(FEDAUX.experiment("1", row, "stl10-alpha-0.01-c-0.2"))
        assert text.endswith(f"+{PRETRAINED}") == (row not in plain)
        assert text.startswith(row.split("+")[0])


def test_distillation_is_one_epoch_of_adam_at_5e_5_in_batches_of_128():
    feddf = FEDAUX.method("1", "feddf", "stl10-alpha-0.01-c-0.2")
    student = {"epochs": 1, "lr": 5e-5, "lr_schedule": "constant", "clip": "none"}
    assert feddf == {"name": "feddf", "distill_share": 0.8, "student": student}
    aux = fedaux_options("1", "fedaux", "stl10-alpha-0.01-c-0.2")
    assert aux == {"form": "sum", "lam": 0.01, "student": student}
    be = FEDAUX.method("1", "fedbe", "stl10-alpha-0.01-c-0.2")
    assert (be["student"]["epochs"], be["student"]["optimizer"], be["student"]["lr"], be["samples"]) == (
        1,
        "adam",
        5e-5,
        10,
    )


def test_tiny_imagenet_is_gone_through_until_the_server_has_made_the_steps_that_stl_10_gives():
    """0.8 of 100,000 in batches of 128 are 625 steps; 0.8 of 20,000 need five epochs for them."""
    for row in ("feddf", "fedbe"):
        assert FEDAUX.method("1", row, "tiny-alpha-0.01-c-0.4")["student"]["epochs"] == 5
    for table, column in (("1", "tiny-alpha-0.01-c-0.4"), ("3", "tiny-shufflenet-alpha-0.01")):
        assert fedaux_options(table, "fedaux", column)["student"]["epochs"] == 5
        assert fedaux_options(table, "fedaux", column, "paper")["student"]["epochs"] == 1, "as the text says"
    assert fedaux_options("figure-4", "kde", "tiny")["student"]["epochs"] == 5


def test_the_released_code_keeps_adam_and_evaluates_by_the_batch():
    for cell in FEDAUX.cells("1", "released"):
        assert cell.experiment.local.keep_optimizer
        assert cell.experiment.evaluate.endswith("train_mode.py:in_train_mode")
    column = "stl10-alpha-0.01-c-0.2"
    assert FEDAUX.method("1", "feddf", column, "released") == {"name": f"{BENCHMARKS}/fedaux/released.py:feddf"}
    assert FEDAUX.method("1", "fedavg", column, "released") == {"name": "fedavg"}
    server = FEDAUX.experiment("1", "fedavg", column, "released").server
    assert (server.aggregate, server.buffers) == ('average(weighting="uniform")', "local")


def test_one_pre_training_is_asked_for_by_all_that_could_share_it():
    """Other words would be another extractor: one for pictures, one for each set of texts."""
    asked = {}
    for cell in FEDAUX.all_cells():
        parts = parts_of(method_text(cell.experiment))
        for name in {"simclr", "next_token"} & set(parts):
            texts = cell.experiment.data.unlabeled if name == "next_token" else "any"
            asked.setdefault((name, texts), set()).add(json.dumps(parts[name]))
    assert {len(words) for words in asked.values()} == {1}
    assert asked["simclr", "any"] == {'{"training": {"epochs": 100, "seed": 0}}'}
    assert asked["next_token", 3000] == {'{"training": {"epochs": 30, "seed": 0}}'}
    assert len(asked) == 4


def test_figure_4_compares_the_scorers_of_the_paper_without_noise():
    table = FEDAUX.recipe.tables["paper"]["figure-4"]
    assert table.rows == ("uniform", "kde", "isolation_forest", "one_class_svm", "two_class_svm", "logistic")
    for cell in table.cells:
        own = parts_of(method_text(cell.experiment))["fedaux"]
        assert own["scorer"] == cell.row
        assert "epsilon" not in own
        assert (cell.experiment.rounds, cell.experiment.partition.clients) == (10, 10)


def test_figure_6_gives_a_third_of_the_clients_each_network():
    mixed = FEDAUX.experiment("figure-6", "feddf", "tiny-mixed-n20-alpha-0.01").model
    assert mixed.options == {"prototypes": ["resnet8_wide", "mobilenet_v2(width=0.5)", "shufflenet"]}
    assert FEDAUX.recipe.tables["correct"]["figure-6"].rows == ("feddf", "feddf+p", "fedaux"), "nothing is averaged"


def test_networks_have_the_sizes_of_the_papers():
    """Parameters of the card's table of models."""
    sizes = {"resnet8": 4_903_242, "mobilenet": 604_178, "shufflenet": 887_582}
    for network, count in sizes.items():
        one = FEDAUX.experiment("figure-6", "feddf", f"stl10-{network}-n80-alpha-0.01")
        assert parameters(one, (3, 32, 32), 10) == count


def test_figure_7_looks_after_the_first_round_and_after_the_last():
    table = FEDAUX.recipe.tables["correct"]["figure-7"]
    assert table.rows == ("fedavg+p", "feddf+p", "fedaux")
    first, last = (FEDAUX.experiment("figure-7", "fedaux", f"held-out-alpha-0.01-t{rounds}") for rounds in (1, 20))
    assert (first.rounds, last.rounds) == (1, 20)
    assert first.replace(rounds=20) == last
    assert (last.partition.clients, last.cohort) == (10, 10)
    assert (last.model.name, last.model.options) == ("bert", {"pool": "mean"})
    assert FEDAUX.experiment("figure-7", "fedaux", "held-out-alpha-0.01-t20", "paper").model.options == {}
    assert (last.data.source, last.data.unlabeled, last.data.tokens) == ("fancyzhx/ag_news", 3000, 64)


def test_figure_8_has_the_paper_s_noise_and_its_setting():
    one = FEDAUX.experiment("figure-8", "epsilon-0.04", "stl10-lambda-0.01", "released")
    assert (one.rounds, one.partition.clients, one.cohort, one.partition.options) == (10, 40, 0.4, {"alpha": 0.01})
    own = fedaux_options("figure-8", "epsilon-0.04", "stl10-lambda-0.01", "released")
    assert (own["epsilon"], own["delta"], own["lam"]) == (0.04, 1e-6, 0.01)
    assert "epsilon" not in fedaux_options("figure-8", "no-noise", "stl10-lambda-0.01", "paper")


def test_figure_9_trains_the_head_on_clients_and_server():
    for row in ("feddf+p", "fedbe+p", "fedaux"):
        parts = parts_of(FEDAUX.method("figure-9", row, "tiny-alpha-0.01"))
        assert parts[row.split("+")[0]]["student"]["part"] == "head"
    assert FEDAUX.method("figure-9", "fedavg+p", "tiny-alpha-0.01") == f"fedavg+{PRETRAINED}"


def releases(experiment):
    return build_releases(method_text(experiment))


@cache
def build_releases(text):
    (phase,) = parse(text)
    part = next(part for part in phase.parts if part.name.endswith("fedaux"))
    name = f"{BENCHMARKS}/fedaux/{part.name}" if ":" in part.name else part.name
    return build_method(name, part.options)[0].method.releases


def test_the_cost_of_privacy_is_asked_for_where_the_promise_holds():
    table = FEDAUX.recipe.tables["correct"]["privacy"]
    assert table.rows == ("sum", "mean", "mean-epsilon-8", "mean-epsilon-1", "mean-epsilon-0.1", "feddf+p")
    assert {column.partition("-lambda-")[2] for column in table.columns} == {"0.1", "0.01", "0.001", "0.0001"}
    figure = FEDAUX.experiment("figure-8", "no-noise", "tiny-lambda-0.001")
    assert cell_key(FEDAUX.experiment("privacy", "sum", "tiny-lambda-0.001")) == cell_key(figure), "the same setting"
    for cell in table.cells:
        if cell.row != "feddf+p":
            (release,) = releases(cell.experiment)
            assert (release.multiplier is not None) == ("epsilon" in cell.row), cell.row


def test_how_clients_train_is_all_that_differs_in_the_table_of_clients():
    first = FEDAUX.experiment("clients", "fedaux", "tiny-adam-0.001")
    assert cell_key(first) == cell_key(FEDAUX.experiment("1", "fedaux", "tiny-alpha-0.01-c-0.4")), "run once"
    found = {}
    for name in ("adam-0.0001", "adam-goes-on", "sgd-0.01"):
        other = FEDAUX.experiment("clients", "fedaux", f"tiny-{name}")
        assert other.replace(local=asdict(first.local)) == first
        found[name] = (other.local.optimizer, other.local.lr, other.local.keep_optimizer)
    assert found == {
        "adam-0.0001": ("adam", 1e-4, False),
        "adam-goes-on": ("adam", 1e-3, True),
        "sgd-0.01": ("sgd", 0.01, False),
    }


def test_no_cell_of_the_paper_s_own_figures_claims_privacy():
    for preset in PRESETS:
        for cell in FEDAUX.cells("figure-8", preset):
            assert all(release.multiplier is None for release in releases(cell.experiment))


@pytest.mark.parametrize(
    ("table", "column", "row", "best"),
    [
        ("1", "stl10-alpha-0.01-c-0.2", "fedavg", 19.9),
        ("1", "stl10-alpha-0.01-c-0.4", "fedaux", 71.2),
        ("1", "stl10-alpha-0.01-c-0.8", "feddf+p", 48.1),
        ("1", "stl10-alpha-100-c-0.2", "fedbe+p", 89.1),
        ("1", "stl10-alpha-100-c-0.8", "fedprox", 82.0),
        ("1", "tiny-alpha-0.01-c-0.8", "fedavg", 28.9),
        ("2", "stl10-alpha-0.01", "fedaux", 76.8),
        ("2", "cifar100-alpha-0.01", "feddf+p", 41.6),
        ("2", "svhn-alpha-100", "feddf", 80.9),
        ("3", "stl10-mobilenet-alpha-0.01", "feddf+p", 46.7),
        ("3", "stl10-shufflenet-alpha-0.01", "fedaux", 66.9),
        ("3", "stl10-shufflenet-alpha-10.24", "fedprox+p", 71.9),
        ("3", "tiny-shufflenet-alpha-0.16", "fedprox", 29.4),
        ("figure-6", "stl10-resnet8-n80-alpha-0.01", "feddf", 30.4),
        ("figure-6", "stl10-resnet8-n80-alpha-0.01", "fedaux", 78.1),
        ("figure-8", "stl10-lambda-0.01", "epsilon-0.04", 70.8),
    ],
)
def test_numbers_are_those_of_the_paper(table, column, row, best):
    assert FEDAUX.expected[table][column][row] == {"best": best}


def test_beside_tiny_imagenet_stands_only_what_needs_no_auxiliary_set():
    for table in ("1", "3"):
        for column, rows in FEDAUX.expected[table].items():
            wanted = (
                FEDAUX.recipe.tables["correct"][table].rows if column.startswith("stl10") else ("fedavg", "fedprox")
            )
            assert tuple(rows) == wanted, column
    assert not any(column.startswith("tiny") for column in FEDAUX.expected["2"])


def test_data_that_are_not_there_are_named(tmp_path):
    for name in AT_HAND:
        (tmp_path / name).mkdir()
    found, missing = set(), set()
    for cell in FEDAUX.all_cells():
        try:
            with_data(cell.experiment, tmp_path)
            found |= {cell.experiment.data.source, str(cell.experiment.data.unlabeled)}
        except FedstillError as error:
            missing.add(str(error).split("'")[1])
    assert missing == {"stl10", "cifar100", "svhn", "bookcorpus"}
    assert {name.rpartition("/")[2] for name in found} == AT_HAND | {"3000"}


def test_every_documented_run_is_still_that_of_its_cell():
    if not FEDAUX.runs():
        pytest.skip("nothing has been run yet")
    keys = {cell_key(cell.experiment) for cell in FEDAUX.all_cells()}
    assert {run["key"] for run in FEDAUX.runs()} <= keys


def test_commands_of_the_readme_name_tables_columns_and_methods_that_exist():
    assert {table for table, _ in FEDAUX.documented_commands()} == {*NAMES, *OURS}


def small(cell, unlabeled, seed):
    """The cell with its own methods on a few digits; of the pre-training only its length is another."""
    text = write(cell.method.name, cell.method.options).replace(
        PRETRAINED, "simclr(training.epochs=2, training.seed=0, training.batch_size=8, neighbours=0)"
    )
    changes = {
        "data": {"source": "digits", "unlabeled": str(unlabeled)}, "model": {"name": "mlp", "hidden": [8]},
        "partition": {**cell.partition.model_dump(), "clients": 4, "alpha": 1.0}, "engine": {"device": "cpu"},
    }  # fmt: skip
    return cell.replace(rounds=1, cohort=4, seed=seed, method=text, **changes)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A file of unlabeled pictures; nothing is kept outside the test's folder."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    np.savez(tmp_path / "aux.npz", x=random.integers(0, 17, (24, 8, 8)).astype(np.uint8))
    return tmp_path / "aux.npz"


def test_two_seeds_and_all_methods_of_a_table_share_one_pre_training(pictures, monkeypatch):
    """Counted where the epochs are trained: two of them, in the first of eight runs."""
    train, epochs = pretrain._Training._epoch, []
    monkeypatch.setattr(pretrain._Training, "_epoch", lambda self, *given: epochs.append(1) or train(self, *given))
    found = []
    for seed in (0, 1):
        for row in ("fedavg+p", "fedprox+p", "feddf+p", "fedaux"):
            one = small(FEDAUX.experiment("1", row, "tiny-alpha-0.01-c-0.8"), pictures, seed)
            found.append(run(one).history.rows[0]["prepare/simclr_epochs"])
    assert found == [2.0] + [0.0] * 7
    assert len(epochs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("table", [*(name for name in NAMES if name != "figure-7"), *OURS])
def test_every_method_of_a_table_runs_on_a_few_digits(table, preset, pictures):
    """With its own options, part, optimiser and evaluation; a mixture gets small prototypes."""
    if table not in FEDAUX.recipe.tables[preset]:
        pytest.skip("ours: in one preset only")
    done = set()
    for cell in FEDAUX.cells(table, preset):
        one = small(cell.experiment, pictures, 0)
        if cell.experiment.model.name == "mixed":
            one = one.replace(model={"name": "mixed", "prototypes": ["mlp(hidden=[8])", "mlp(hidden=[9])"]})
        one = one.replace(local=replace(one.local, epochs=1))
        if cell_key(one) not in done:
            done.add(cell_key(one))
            (row,) = run(one).history.rows
            assert 0 <= row["accuracy"] <= 1, (cell.row, cell.column)


SMALL = (
    "data.source=digits", "data.unlabeled=200", "model.name=mlp", "model.hidden=[8]", "rounds=2", "partition.clients=6",
    "partition.alpha=0.1", "engine.device=cpu", "engine.threads=1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["correct", "released"])
def test_a_small_table_1_runs_from_end_to_end_in_another_folder(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["--table", "1", "--columns", "stl10-alpha-0.01-c-0.8", "--methods", "fedavg,feddf", "--jobs", "1"]
    (column,) = json.loads(FEDAUX.bench("--preset", preset, *words, *settings, "--format", "json"))["columns"]
    fedavg, feddf = column["rows"]
    assert (fedavg["seeds"], feddf["seeds"]) == (1, 1)
    assert fedavg["paper"] == {"best": 28.9}
    assert feddf["beside"]["pseudo_labels"]["mean"] == 160, "0.8 of 200 rows"
