"""Experiments with several architectures, from the file to the labels."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.compose.groups import part_of
from fedstill.engine import build_engine
from fedstill.experiment.build import build_federation
from fedstill.experiment.model import build_network
from fedstill.experiment.run import resume_run
from fedstill.loop.checkpoint import load_weights

PROTOTYPES = ['mlp(hidden=[16], init="torch")', "cnn", 'resnet8(norm="group")']


def experiment(**changes):
    sections = {
        "data": {"source": "digits", "unlabeled": 60},
        "method": {"name": "feddf", "student": {"steps": 10}},
        "partition": {"scheme": "lda", "clients": 7, "alpha": 1.0},
        "model": {"name": "mixed", "prototypes": PROTOTYPES[:2]},
        "rounds": 2,
        "cohort": 4,
        **changes,
    }
    return fedstill.Experiment(local={"batch_size": 20, "lr": 0.1}, **sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mixed"
    fedstill.run(experiment(), run_dir=folder, pictures=False)
    return folder


def test_the_last_model_holds_all_prototypes_and_each_goes_back_into_its_network(folder):
    weights = load_weights(folder / "last")
    network = fedstill.models.MODELS["cnn"]((1, 8, 8), 10)
    part = part_of(weights, "cnn")
    network.load_state_dict({**part.params, **part.buffers})
    assert {name.split("/")[0] for name in weights.params} == {"mlp", "cnn"}


def test_predict_labels_with_the_mean_of_the_prototypes_logits(folder):
    found = fedstill.predict(folder, from_="last")
    federation = build_federation(experiment())
    weights, logits = load_weights(folder / "last"), []
    model = build_network(experiment(), federation)
    for name, one in model.groups.models.items():
        engine = build_engine("looped", "cpu", model=one, federation=federation)
        logits.append(engine.outputs(part_of(weights, name), federation.unlabeled).logits.double())
    answer = torch.stack(logits).mean(0).argmax(1)
    assert found.labels == tuple(federation.train.classes[k] for k in answer.tolist())


def test_predict_can_hand_out_what_all_architectures_were_taught(folder):
    found = fedstill.predict(folder, from_="targets")
    assert found.round == 2
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(60))


def test_the_command_line_says_which_model_is_reported(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"rounds": 1, "model": {"name": "mixed", "prototypes": PROTOTYPES[:2], "report": "cnn"}}
    (tmp_path / "mixed.toml").write_text(experiment(**changes).to_toml())
    outcome = CliRunner().invoke(app, ["run", "mixed.toml", "--out", "out"])
    assert outcome.exit_code == 0, outcome.output
    assert "  reported       cnn\n" in outcome.output
    outcome = CliRunner().invoke(app, ["predict", "out", "--format", "json"])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["count"] == 60


def test_an_unmet_need_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.toml").write_text(experiment(method="fedbe").to_toml())
    outcome = CliRunner().invoke(app, ["run", "mixed.toml", "--out", "out"])
    assert outcome.exit_code == 2
    (line,) = [line for line in outcome.output.splitlines() if "architecture" in line]
    assert "method.name = 'fedbe' needs one architecture on all clients" in line
    assert "Traceback" not in outcome.output


def test_a_run_in_a_folder_goes_on_as_if_it_had_never_stopped(tmp_path):
    small = {"model": {"name": "mixed", "prototypes": ["mlp(hidden=[16])", "mlp(hidden=[8])"]}, "checkpoint_every": 1}
    fedstill.run(experiment(**small), run_dir=tmp_path / "short", pictures=False)
    longer = fedstill.run(experiment(rounds=3, **small), run_dir=tmp_path / "long", pictures=False)
    text = (tmp_path / "short" / "config.toml").read_text()
    (tmp_path / "short" / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    resumed = resume_run(tmp_path / "short")
    assert all(torch.equal(leaf, resumed.weights.params[name]) for name, leaf in longer.weights.params.items())


@pytest.mark.slow
def test_forty_clients_of_three_architectures_take_seconds():
    given = fedstill.Experiment(
        data={"source": "digits", "unlabeled": 200},
        partition={"scheme": "lda", "clients": 40, "alpha": 1.0},
        model={"name": "mixed", "prototypes": PROTOTYPES},
        local={"batch_size": 10, "lr": 0.003, "optimizer": "adam", "epochs": 3},
        method={"name": "feddf", "student": {"steps": 20, "batch_size": 64}},
        engine={"threads": 1},
        cohort=0.4,
        rounds=3,
    )
    began = time.process_time()  # of this process: whatever else the machine does, it does not count
    result = fedstill.run(given)
    spent = time.process_time() - began
    assert [row["accepted"] for row in result.history.rows] == [16] * 3
    assert result.best["accuracy"] > 0.25  # a guess is 0.1
    assert {"accuracy_mlp", "accuracy_cnn", "accuracy_resnet8"} <= result.best.keys()
    assert spent < 20  # 3 s of one core, most of it distillation of the two convolutional networks
