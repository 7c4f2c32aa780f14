"""[model] name = "mixed" in a file: how prototypes are written, and what is told when they are wrong."""

import tomllib

import pytest

from fedstill.core.errors import FedstillError
from fedstill.experiment.build import build, build_federation
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import build_network, prototypes_of
from fedstill.loop.federate import check_built


def experiment(prototypes, *, clients=6, **own):
    return Experiment(
        partition={"scheme": "iid", "clients": clients},
        cohort=2,
        model={"name": "mixed", "prototypes": prototypes, **own},
    )


def test_networks_of_one_name_are_numbered_in_their_order():
    found = prototypes_of(["cnn", "mlp(hidden=[8])", "lenet5", 'mlp(hidden=[16], init="torch")'])
    assert list(found) == ["cnn", "mlp_1", "lenet5", "mlp_2"]
    assert found["mlp_2"].options == {"hidden": [16], "init": "torch"}


def test_client_k_runs_prototype_k_mod_p():
    given = experiment(["mlp(hidden=[8])", "cnn", "mlp(hidden=[4])"], report="cnn")
    model = build_network(given, build_federation(given))
    assert model.groups.member == ("mlp_1", "cnn", "mlp_2") * 2
    assert model.groups.report == "cnn"
    assert model.init(0).params["mlp_2/head.weight"].shape == (10, 4)


def test_it_survives_a_file():
    given = experiment(['mlp(hidden=[8], init="torch")', "cnn"])
    given = Experiment.model_validate(given.resolved())
    again = Experiment.model_validate(tomllib.loads(given.to_toml()))
    assert again == given
    assert again.model.options["report"] == "ensemble"


@pytest.mark.parametrize(
    ("prototypes", "own", "told"),
    [
        ([], {}, "model.prototypes is empty"),
        (["mlp("], {}, r"model.prototypes: cannot read 'mlp\('"),
        (["mlp+cnn"], {}, r"model.prototypes: cannot read 'mlp\+cnn'"),
        (["cmn"], {}, "model.prototypes, 'cmn': .*did you mean 'cnn'"),
        (["mlp(hiden=[3])"], {}, "model.prototypes, 'mlp': .*hidden"),
        (["mixed"], {}, "a mixture cannot hold another one"),
        (["mlp", "cnn"], {"report": "lenet"}, "model.report = 'lenet' is unknown"),
        (["mlp", "mlp"], {"report": "mlp"}, "did you mean 'mlp_2'"),
        ("mlp", {}, 'model.prototypes = "mlp" must be a list of texts'),
    ],
)
def test_mistakes_are_told_before_any_data_is_read(prototypes, own, told):
    with pytest.raises(FedstillError, match=told) as error:
        experiment(prototypes, **own)
    assert "\n" not in str(error.value)


def test_prototypes_are_missing():
    with pytest.raises(FedstillError, match=r"model\.prototypes is missing: mixed needs it"):
        Experiment(model="mixed")


def test_more_prototypes_than_clients_are_refused():
    given = experiment(["mlp", "cnn", "resnet8"], clients=2)
    with pytest.raises(FedstillError, match="no client runs the prototype 'resnet8'"):
        build_network(given, build_federation(given))


def test_a_network_that_reads_text_is_no_prototype_for_images():
    given = experiment(["mlp", "char_lstm"])
    with pytest.raises(FedstillError, match="'char_lstm' reads text"):
        build_network(given, build_federation(given))


@pytest.mark.parametrize("method", ["fedbe", "mrtf", "d2cfl"])
def test_a_method_that_mixes_parameters_into_its_teachers_needs_one_architecture(method):
    given = experiment(["mlp(hidden=[8])", "mlp(hidden=[4])"]).replace(method=method, data={"unlabeled": "test"})
    with pytest.raises(FedstillError, match="one architecture on all clients") as error:
        check_built(build(given, build_federation(given)))
    assert "feddf" in str(error.value)
    assert "\n" not in str(error.value)
