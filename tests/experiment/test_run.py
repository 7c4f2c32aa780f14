"""A run is resumed only as what it was, and from anywhere."""

from __future__ import annotations

import re

import pytest
import torch

import fedstill
from fedstill import Experiment, run
from fedstill.core.errors import FedstillError
from fedstill.experiment.run_folder import read_description

ISSUE_FILE = """
name = "first"
rounds = 1
cohort = 10
seed = 0
[data]
source = "digits"
unlabeled = "none"
[partition]
scheme = "lda"
clients = 100
alpha = 0.1
[model]
name = "cnn"
[local]
epochs = 1
batch_size = 50
optimizer = "sgd"
lr = 0.01
momentum = 0.9
weight_decay = 1e-5
lr_decay = 0.99
augment = ["crop", "flip"]
[method]
name = "fedprox"
mu = 0.01
[engine]
name = "auto"
device = "auto"
"""


def small(**changes):
    sections = {
        "rounds": 2,
        "cohort": 2,
        "partition": {"scheme": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [4]},
        "local": {"epochs": 1},
        "method": {"name": "fedprox", "mu": 0.1},
    }
    return fedstill.Experiment.model_validate({**sections, **changes})


def test_the_experiment_file_of_the_contract_runs(tmp_path):
    file = tmp_path / "first.toml"
    file.write_text(ISSUE_FILE)
    result = fedstill.run(fedstill.Experiment.from_toml(file))
    assert len(result.history.rows) == 1


def test_the_defaults_run():
    assert len(fedstill.run(fedstill.Experiment(rounds=1)).history.rows) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "fedprox", "mu": 50.0}},
        {"partition": {"scheme": "lda", "clients": 4, "alpha": 1.0}},
        {"seed": 3},
    ],
)
def test_another_experiment_is_not_taken_for_the_one_begun(tmp_path, changes):
    fedstill.run(small(), run_dir=tmp_path / "run")
    with pytest.raises(FedstillError, match=rf"of another experiment: .*{next(iter(changes))}.* was .* and is"):
        fedstill.run(small(rounds=3, **changes), run_dir=tmp_path / "run", resume=True)


def test_more_rounds_are_the_same_run(tmp_path):
    fedstill.run(small(), run_dir=tmp_path / "run")
    assert len(fedstill.run(small(rounds=3), run_dir=tmp_path / "run", resume=True).history.rows) == 3


def test_files_are_written_down_by_their_full_path(tmp_path, monkeypatch):
    lines = ["a,b,label", *(f"{i % 7},{i % 5},{i % 2}" for i in range(40))]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    fedstill.run(small(data={"source": "table.csv"}), run_dir="run")
    assert read_description(tmp_path / "run").data.source == str(tmp_path / "table.csv")


def test_an_empty_description_is_no_run(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(FedstillError, match="holds no run"):
        read_description(tmp_path)


def test_an_engine_of_ones_own_is_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fedstill.engine import build_engine\n\n\n"
        "class Mine:\n"
        "    name = 'mine'\n\n"
        "    def __init__(self, device, **how):\n"
        "        self.inner = build_engine('looped', device, **how)\n"
        "        self.device, self.cohorts = self.inner.device, []\n\n"
        "    def train(self, work, ids, states):\n"
        "        return self.inner.train(work, ids, states)\n"
    )
    table = {
        "rounds": 2,
        "cohort": 2,
        "partition": {"scheme": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [8]},
    }
    own = Experiment(**table, engine={"name": f"{tmp_path}/mine.py:Mine", "device": "cpu"})
    looped = Experiment(**table, engine={"name": "looped", "device": "cpu"})
    weights = [run(one).weights.params for one in (own, looped)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_an_evaluation_without_accuracy_is_told(tmp_path):
    (tmp_path / "mine.py").write_text("def nothing(weights, test, trainer):\n    return {'f1': 0.5}\n")
    with pytest.raises(FedstillError, match="the evaluation gave no 'accuracy'"):
        run(Experiment(rounds=1, cohort=2, model="mlp", evaluate=f"{tmp_path}/mine.py:nothing"))


def test_a_picture_that_fails_costs_one_line_and_not_the_result(tmp_path, monkeypatch, caplog):
    def broken(*given, **how):
        return {}["no such key"]

    monkeypatch.setattr("fedstill.experiment.run.learning_curves", broken)
    result = fedstill.run(small(), run_dir=tmp_path / "run")
    assert len(result.history.rows) == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(r"no curves.png: test_a_picture\w+ \(test_run.py, line \d+\): KeyError: 'no such key'$", line)
    assert (tmp_path / "run" / "partition.png").exists()
