"""A network of one's own, named in an experiment file as a method is: run, compared, resumed and predicted with."""

import shutil
import tomllib

import pytest

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.experiment.build import build, build_federation
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import build_network, prototypes_of
from fedstill.experiment.run import resume_run
from fedstill.loop.federate import check_built

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, input_shape, classes, *, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[-1] ** 2, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def narrow(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes - 1))


def reader(input_shape, classes, vocabulary):
    return nn.Sequential(nn.Embedding(vocabulary, 2), nn.Flatten(), nn.Linear(2 * input_shape[0], classes))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def experiment(model, **changes):
    given = {
        "rounds": 2,
        "cohort": 2,
        "data": {"source": "digits", "unlabeled": 20},
        "partition": {"scheme": "iid", "clients": 4},
        "model": model,
        "local": {"steps": 2},
        "method": "feddf(student.steps=2)",
    }
    return fedstill.Experiment(**{**given, **changes})


def network(model):
    given = experiment(model)
    return build_network(given, build_federation(given))


def test_it_is_given_what_it_asks_for_and_its_own_options():
    wide = network({"name": "net.py:Net", "width": 16})
    assert (wide.name, sorted(wide.head_names)) == ("Net", ["head.bias", "head.weight"])
    assert wide.init(0).params["head.weight"].shape == (10, 16)
    assert network("net.py:fixed").init(0).params["1.weight"].shape == (10, 64)


def test_a_run_is_resumed_from_anywhere_and_predicts(folder, monkeypatch):
    done = fedstill.run(experiment("net.py:Net"), run_dir=folder / "short")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    again = resume_run(folder / "short")
    assert again.history.rows[-1]["accuracy"] == done.history.rows[-1]["accuracy"]
    assert len(fedstill.predict(folder / "short").labels) == 20


def test_methods_are_compared_with_it():
    found = fedstill.compare(experiment("net.py:Net"), ["fedavg", "feddf(student.steps=2)"])
    assert {summary.method for summary in found.summaries} == {"fedavg", "feddf(student.steps=2)"}


def test_it_can_be_one_of_several_prototypes(folder):
    mixed = {"name": "mixed", "prototypes": ["net.py:Net", "mlp(hidden=[4])", "net.py:Net(width=4)"]}
    done = fedstill.run(experiment(mixed), run_dir=folder / "mixed")
    assert done.prototypes == ("Net_1", "mlp", "Net_2")
    assert str(folder / "net.py") in (folder / "mixed" / "config.toml").read_text(), "found from anywhere"


def test_it_may_read_text(folder):
    words = ["good fine well", "bad sad ill"] * 10
    rows = "\n".join(f"{text},{'yes' if i % 2 else 'no'}" for i, text in enumerate(words))
    (folder / "texts.csv").write_text(f"text,label\n{rows}\n")
    data = {"source": "texts.csv", "tokens": 4, "vocabulary": 30}
    done = fedstill.run(experiment("net.py:reader", data=data, method="fedavg"))
    assert len(done.history.rows) == 2


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("net.py:Nett", r"model\.name = 'net\.py:Nett': no function 'Nett' in net\.py: did you mean 'Net'"),
        ("nett.py:Net", r"model\.name = 'nett\.py:Net': no file 'nett\.py': give FILE\.py:function"),
        ({"name": "net.py:Net", "wdth": 3}, r"unknown key 'model\.wdth' for net\.py:Net: did you mean 'width'"),
        ("nett", r"model\.name = 'nett' is unknown: .* \(your own: FILE\.py:function\)"),
    ],
)
def test_mistakes_in_its_name_are_told_before_the_data_are_read(model, line):
    with pytest.raises(FedstillError, match=line):
        experiment(model)


def test_logits_of_the_wrong_number_are_told():
    with pytest.raises(FedstillError, match="narrow"):
        network("net.py:narrow")


def test_a_network_that_is_gone_is_told(folder):
    fedstill.run(experiment("net.py:Net"), run_dir=folder / "short")
    shutil.move(folder / "net.py", folder / "moved.py")
    with pytest.raises(FedstillError, match=r"no file '.*net\.py'"):
        resume_run(folder / "short")


# [model] name = "mixed" in a file: how prototypes are written, and what is told when they are wrong.


def experiment_of(prototypes, *, clients=6, **own):
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
    given = experiment_of(["mlp(hidden=[8])", "cnn", "mlp(hidden=[4])"], report="cnn")
    model = build_network(given, build_federation(given))
    assert model.groups.member == ("mlp_1", "cnn", "mlp_2") * 2
    assert model.groups.report == "cnn"
    assert model.init(0).params["mlp_2/head.weight"].shape == (10, 4)


def test_it_survives_a_file():
    given = experiment_of(['mlp(hidden=[8], init="torch")', "cnn"])
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
        experiment_of(prototypes, **own)
    assert "\n" not in str(error.value)


def test_prototypes_are_missing():
    with pytest.raises(FedstillError, match=r"model\.prototypes is missing: mixed needs it"):
        Experiment(model="mixed")


def test_more_prototypes_than_clients_are_refused():
    given = experiment_of(["mlp", "cnn", "resnet8"], clients=2)
    with pytest.raises(FedstillError, match="no client runs the prototype 'resnet8'"):
        build_network(given, build_federation(given))


def test_a_network_that_reads_text_is_no_prototype_for_images():
    given = experiment_of(["mlp", "char_lstm"])
    with pytest.raises(FedstillError, match="'char_lstm' reads text"):
        build_network(given, build_federation(given))


@pytest.mark.parametrize("method", ["fedbe", "mrtf", "d2cfl"])
def test_a_method_that_mixes_parameters_into_its_teachers_needs_one_architecture(method):
    given = experiment_of(["mlp(hidden=[8])", "mlp(hidden=[4])"]).replace(method=method, data={"unlabeled": "test"})
    with pytest.raises(FedstillError, match="one architecture on all clients") as error:
        check_built(build(given, build_federation(given)))
    assert "feddf" in str(error.value)
    assert "\n" not in str(error.value)
