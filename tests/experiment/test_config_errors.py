"""The commonest mistakes of a type in Python: each is one line that says what to write instead."""

import pytest
import torch
from run_helpers import fedavg, linear_model, toy_federation
from running import federate

from fedstill import Experiment, Phase, Training, build_method, build_model, compare, run
from fedstill.core.errors import FedstillError
from fedstill.experiment.compare import choose_methods, table_notes
from fedstill.experiment.config import checked_experiment
from fedstill.loop.history import History, Result

SMALL = Experiment(
    rounds=1,
    cohort=2,
    partition={"scheme": "iid", "clients": 4},
    model={"name": "mlp", "hidden": [4]},
    local={"steps": 1},
    method={"name": "fedprox", "mu": 0.5},
)


def mine():
    return fedavg()


def federated(**changes):
    given = {"method": fedavg(), "model": linear_model(), "federation": toy_federation(), "training": Training()}
    return federate(**{**given, **changes}, rounds=1, cohort=2, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"model": torch.nn.Linear(4, 3)}, r"model: Linear is no fedstill\.Model: give fedstill\.from_module\("),
        ({"model": torch.nn.Linear}, r"model: .* fedstill\.from_module\("),
        ({"model": "mlp"}, r"model: str is no fedstill\.Model: give fedstill\.build_model\("),
        ({"method": "scaffold"}, r"method: str .* give fedstill\.build_method\('scaffold'\)"),
        ({"method": mine}, r"method: function is no fedstill\.Method"),
        ({"method": [fedavg()]}, r"method: list is no fedstill\.Method or sequence of Phase"),
        ({"federation": SMALL}, r"federation: Experiment .* give fedstill\.build_federation\("),
        ({"training": {"lr": 0.1}}, r"training: dict .* give fedstill\.Training\("),
        ({"training": Training(epochs=1.5)}, r"local\.epochs = 1\.5 must be a whole number"),
    ],
)
def test_federate_says_what_to_give_instead(wrong, line):
    with pytest.raises(FedstillError, match=line):
        federated(**wrong)


@pytest.mark.parametrize("method", [build_method("fedavg"), [Phase(fedavg(), until=1), Phase(fedavg())]])
def test_methods_in_turn_may_stand_in_any_sequence(method):
    assert len(federated(method=method).history.rows) == 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("visits.toml", r"read it with fedstill\.Experiment\.from_toml\('visits\.toml'\)"),
        ({"rounds": 3}, r"dict is no fedstill\.Experiment: .* fedstill\.Experiment\(\*\*table\)"),
        (3, r"int is no fedstill\.Experiment"),
    ],
)
def test_a_path_or_a_table_is_no_experiment_yet(given, line):
    with pytest.raises(FedstillError, match=line):
        compare(given, ["fedavg"])
    with pytest.raises(FedstillError, match=line):
        run(given)
    assert checked_experiment(SMALL) is SMALL


@pytest.mark.parametrize("methods", [[mine], mine, ["fedavg", mine]])
def test_compare_takes_methods_by_their_names(methods):
    with pytest.raises(FedstillError, match=r"instead of the function mine give 'fedavg' or 'FILE\.py:mine'"):
        compare(SMALL, methods)


def test_compare_takes_methods_in_one_text_as_the_command_line_does():
    text = "fedavg, fedprox(mu=0.1),scaffold"
    assert list(choose_methods(SMALL, text)) == ["fedavg", "fedprox(mu=0.1)", "scaffold"]


def test_every_wrong_method_of_a_comparison_is_named_at_once():
    with pytest.raises(FedstillError) as error:
        choose_methods(SMALL, "fedporx,scaffold,fedavg(mu=1),fedavg+fedavg")
    assert len(error.value.lines) == 3
    assert "did you mean 'fedprox'" in error.value.lines[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"hidden": 32}, r"model\.hidden = 32 must be a list: e\.g\. hidden=\(1024, 1024, 128\)"),
        ({"hidden": "32"}, r"model\.hidden = '32' must be a list"),
    ],
)
def test_widths_of_a_network_are_a_list(options, line):
    with pytest.raises(FedstillError, match=line):
        build_model("mlp", input_shape=(4,), classes=3, **options)


def test_a_result_is_shown_without_its_weights():
    weights = linear_model().init(0)
    history = History([{"round": 1, "accuracy": 0.75}, {"round": 2, "accuracy": 0.5}])
    shown = "Result(method='fedavg', rounds=2, accuracy_last=0.5, accuracy_best=0.75, run_dir=None)"
    assert repr(Result(history, weights, weights, "fedavg", 1.0)) == shown


def test_a_bare_name_that_has_the_experiments_options_is_noted_below_the_table():
    compared = compare(SMALL, ["fedavg", "fedprox", "fedprox(mu=0.1)"], seeds=1)
    told = "fedprox is fedprox(mu=0.5): without options it has the options of the experiment's [method] section."
    assert table_notes(compared.results) == [told]


def test_options_that_are_the_defaults_anyway_are_not_noted():
    compared = compare(Experiment(**SMALL.replace(method="fedprox").resolved()), ["fedprox"], seeds=1)
    assert table_notes(compared.results) == []
