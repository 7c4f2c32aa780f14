"""The words of the command line, laid over the table of a file: --set key=value, --methods."""

import re
import tomllib

import pytest

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment, quickstart_table
from fedstill.experiment.overrides import apply_settings, attack_table, parse_method, with_short_forms
from fedstill.methods.lookup import split_methods
from fedstill.storage import toml as toml_io


def test_settings_change_one_key_and_leave_the_table_alone():
    table = {"rounds": 5, "local": {"lr": 0.1, "epochs": 2}}
    changed = apply_settings(table, ["local.lr=0.5", "engine.device=cuda:0"])
    assert changed == {"rounds": 5, "local": {"lr": 0.5, "epochs": 2}, "engine": {"device": "cuda:0"}}
    assert table == {"rounds": 5, "local": {"lr": 0.1, "epochs": 2}}


@pytest.mark.parametrize("settings", [["method.mu=1", "method.name=fedprox"], ["method.name=fedprox", "method.mu=1"]])
def test_another_name_drops_the_old_ones_own_keys_whatever_the_order(settings):
    changed = apply_settings({"method": {"name": "feddyn", "alpha": 0.1}}, settings)
    assert changed["method"] == {"name": "fedprox", "mu": 1}


def test_the_same_name_keeps_its_own_keys_and_clients_stay_with_the_partition():
    table = {"method": {"name": "fedprox", "mu": 1}, "partition": {"scheme": "lda", "clients": 7, "alpha": 1}}
    changed = apply_settings(table, ["method=fedprox", "partition=shards"])
    assert changed["method"] == {"name": "fedprox", "mu": 1}
    assert changed["partition"] == {"scheme": "shards", "clients": 7}


@pytest.mark.parametrize("name", ["partition", "model", "method"])
def test_settings_on_the_quick_start_can_choose_every_name(name):
    choice = {"partition": "iid", "model": "lenet5", "method": "fedavg"}[name]
    Experiment.model_validate(apply_settings(quickstart_table(), [f"{name}={choice}"]))


@pytest.mark.parametrize("last", [["model.hidden=[4]"], []])
def test_a_table_replaces_its_section_and_single_keys_are_set_afterwards(last):
    table = {"model": {"name": "cnn", "norm": "batch"}, "local": {"lr": 0.5, "epochs": 2}}
    whole = ['model={name="mlp", hidden=[8], init="torch"}', "local={lr=0.1}"]
    changed = apply_settings(table, [*last, "local.momentum=0.9", *whole])
    assert changed["model"] == {"name": "mlp", "hidden": [4] if last else [8], "init": "torch"}
    assert changed["local"] == {"lr": 0.1, "momentum": 0.9}


def test_a_key_can_be_set_where_a_word_stands_for_its_section():
    changed = apply_settings({"engine": "looped", "method": "fedprox"}, ["engine.device=cpu", "method.mu=1"])
    assert changed == {"engine": {"name": "looped", "device": "cpu"}, "method": {"name": "fedprox", "mu": 1}}


def test_a_short_form_beside_a_table_without_its_key_is_no_contradiction():
    settings = with_short_forms(['engine={name="looped"}'], {"device": "cpu", "seed": 0})
    assert apply_settings({}, settings) == {"engine": {"name": "looped", "device": "cpu"}, "seed": 0}


def test_none_removes_a_key_so_that_its_default_counts():
    table = {"rounds": 5, "local": {"lr": 0.1, "steps": 10}, "method": {"name": "fedprox", "mu": 0.5}}
    changed = apply_settings(table, ["local.steps=none", "rounds=none", "method.mu=none", "target=none"])
    assert changed == {"local": {"lr": 0.1}, "method": {"name": "fedprox"}}


@pytest.mark.parametrize("key", ["data.scale", "data.unlabeled", "privacy.label_counts", "data.source", "name"])
def test_none_is_a_value_where_the_key_takes_the_word(key):
    *section, name = key.split(".")
    changed = apply_settings({}, [f"{key}=none"])
    assert (changed[section[0]] if section else changed) == {name: "none"}


def test_none_is_a_value_of_a_models_own_key_that_takes_the_word():
    changed = apply_settings({"model": {"name": "resnet8", "norm": "batch", "groups": 4}}, ["model.norm=none"])
    assert changed["model"] == {"name": "resnet8", "norm": "none", "groups": 4}


def test_text_that_is_quoted_is_never_a_removal():
    assert apply_settings({"data": {"label": "y"}}, ['data.label="none"']) == {"data": {"label": "none"}}


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("local.stps=none", "unknown key 'local.stps'"),
        ("method.stps=none", "unknown key 'method.stps'"),
        ("method.name=none", "method.name = 'none' is unknown"),
        ("local=none", 'local = "none" must be a section'),
    ],
)
def test_none_removes_no_key_that_is_unknown_and_no_section(setting, line):
    with pytest.raises(FedstillError, match=f"^{re.escape(line)}"):
        Experiment.model_validate(apply_settings(quickstart_table(), [setting]))


@pytest.mark.parametrize("text", ['{name="mlp", hidden=[8}', "{name=mlp}", '{name="mlp"'])
def test_a_table_that_is_no_toml_is_not_taken_for_a_name(text):
    with pytest.raises(FedstillError, match=f"^{re.escape(f'--set model={text}: this is no TOML table')}"):
        apply_settings(quickstart_table(), [f"model={text}"])


def test_epochs_that_would_do_nothing_beside_steps_are_refused():
    line = "local.epochs = 50 would do nothing: local.steps = 10 counts; add --set local.steps=none"
    with pytest.raises(FedstillError, match=line):
        apply_settings(quickstart_table(), ["local.epochs=50"])
    with pytest.raises(FedstillError, match="leave one of them out"):
        apply_settings({}, ["local.epochs=50", "local.steps=10"])


@pytest.mark.parametrize("settings", [["local.epochs=50", "local.steps=none"], ["local.steps=none", "local.epochs=50"]])
def test_epochs_count_once_steps_are_removed(settings):
    local = Experiment.model_validate(apply_settings(quickstart_table(), settings)).local
    assert (local.epochs, local.steps) == (50, None)


def test_a_runs_file_that_holds_both_epochs_and_steps_is_read_and_changed():
    written = tomllib.loads(toml_io.dumps(Experiment.quickstart().resolved()))
    assert {"epochs", "steps"} <= written["local"].keys()
    assert Experiment.model_validate(apply_settings(written, ["local.lr=0.5", "local.epochs=none"])).local.steps == 10


def test_methods_are_split_outside_parentheses_and_lists():
    assert split_methods("a, b(x=1,y=[1,2]) ,c") == ["a", "b(x=1,y=[1,2])", "c"]


def test_a_method_takes_its_options_or_else_those_of_the_experiment():
    experiment = Experiment(method={"name": "fedprox", "mu": 0.5})
    assert parse_method("fedprox", experiment).options == {"mu": 0.5}
    assert parse_method("fedprox(mu=0.1)", experiment).options == {"mu": 0.1}
    assert parse_method("fedprox()", experiment).options == {}
    assert parse_method("fedavg", experiment).options == {}


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("sign", {"name": "sign"}),
        ("scale:20", {"name": "scale(factor=20.0)"}),
        ("sign:0.3:8", {"name": "sign(factor=8.0)", "share": 0.3}),
        (
            "backdoor(target=1, adaptive=true):0.1+sure",
            {"name": "backdoor(target=1, adaptive=true)+sure", "share": 0.1},
        ),
    ],
)
def test_an_attack_in_short_is_its_section(text, table):
    assert attack_table(text) == table
    assert Experiment(attack=attack_table(text)).attack.name == table["name"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sing:0.2", "did you mean 'sign'"),
        ("sign:much", "'much' is neither a share below 1 nor a factor"),
        ("sign:-3", "'-3' is neither a share below 1 nor a factor"),
        ("sign:0.2+sure:0.3", "several shares"),
        ("label_flip:20", "unknown key 'attack.factor' for label_flip"),
        (":0.2", "write a kind of attack"),
    ],
)
def test_an_attack_that_cannot_be_read_is_told_in_one_line(text, line):
    with pytest.raises(FedstillError, match=re.escape(line)):
        attack_table(text)
