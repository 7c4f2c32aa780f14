"""A run is resumed only as what it was, and from anywhere."""

from __future__ import annotations

import re

import pytest
import torch
from quick import first_quick

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


def unstable(**changes):
    """A run whose metrics go up and down, because its rate is far too large."""
    return small(rounds=20, local={"epochs": 1, "lr": 2.0}, method="fedavg", **changes)


def first_wait_of(patience, values):
    """The first round in which the best value is `patience` rounds old."""
    for end in range(patience + 1, len(values) + 1):
        if max(values[:end]) == max(values[: end - patience]):
            return end
    raise AssertionError("the run must get worse somewhere")


@pytest.mark.parametrize("metric", first_quick(["macro_f1", "accuracy"]))
def test_a_run_ends_when_its_metric_stops_improving(tmp_path, metric):
    whole = fedstill.run(unstable())
    end = first_wait_of(3, [row[metric] for row in whole.history.rows])
    assert end < 18
    experiment = unstable(best=metric, early_stop={"patience": 3})  # without a metric it watches `best`
    ended = fedstill.run(experiment, run_dir=tmp_path / "ended")
    assert [row["accuracy"] for row in ended.history.rows] == [row["accuracy"] for row in whole.history.rows[:end]]
    assert f"ended in round {end}, because {metric} did not improve in 3 evaluations" in ended.summary()["ended_early"]
    fedstill.run(experiment.replace(rounds=end - 1), run_dir=tmp_path / "cut")
    resumed = fedstill.resume_run(tmp_path / "cut", rounds=20)
    assert len(resumed.history.rows) == end
    assert resumed.ended_early == ended.ended_early
    for name, tensor in ended.weights.params.items():
        assert torch.equal(tensor, resumed.weights.params[name])


def test_a_run_that_reaches_its_last_round_did_not_end_early():
    patient = fedstill.run(small(early_stop={"patience": 2}))
    assert (len(patient.history.rows), patient.ended_early) == (2, "")


def test_more_rounds_do_not_wake_a_run_that_ended_early_until_the_section_is_removed(tmp_path, caplog):
    folder = tmp_path / "run"
    end = len(fedstill.run(unstable(early_stop={"patience": 1}), run_dir=folder).history.rows)
    assert end < 20
    assert len(fedstill.resume_run(folder, rounds=25).history.rows) == end
    assert "the run ended early and will not go on (early_stop)" in caplog.text
    text = (folder / "config.toml").read_text(encoding="utf-8")
    (folder / "config.toml").write_text(re.sub(r"\[early_stop\][^\[]*", "", text), encoding="utf-8")
    longer, whole = fedstill.resume_run(folder, rounds=25), fedstill.run(unstable().replace(rounds=25))
    assert len(longer.history.rows) == 25
    for name, tensor in whole.weights.params.items():
        assert torch.equal(tensor, longer.weights.params[name])


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


def test_a_picture_that_fails_costs_one_line_and_not_the_result(tmp_path, monkeypatch, caplog, pictures):
    def broken(*given, **how):
        return {}["no such key"]

    monkeypatch.setattr("fedstill.experiment.run.learning_curves", broken)
    result = fedstill.run(small(), run_dir=tmp_path / "run")
    assert len(result.history.rows) == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(r"no curves.png: test_a_picture\w+ \(test_run.py, line \d+\): KeyError: 'no such key'$", line)
    assert (tmp_path / "run" / "partition.png").exists()
