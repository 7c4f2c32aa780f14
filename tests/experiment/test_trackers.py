"""Trackers see every round's numbers, whatever package is behind them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import run
from fedstill.experiment.trackers import build_trackers, flat, numbers

PARTITION = {"scheme": "iid", "clients": 4}
MODEL = {"name": "mlp", "hidden": [4]}


def experiment(tracker):
    return Experiment(name="tracked", rounds=2, cohort=2, partition=PARTITION, model=MODEL, track=[tracker])


class Recorder:
    """A stand-in for a tracking package: remembers what was called."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def called(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return called

    def named(self, name):
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


def install(monkeypatch, name):
    recorder = Recorder()
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(recorder, attribute)
    monkeypatch.setitem(sys.modules, name, module)
    return recorder


@pytest.mark.parametrize(
    ("tracker", "log", "close"),
    [("mlflow", "log_metrics", "end_run"), ("wandb", "log", "finish"), ("trackio", "log", "finish")],
)
def test_a_tracker_gets_every_round_and_is_closed(monkeypatch, tracker, log, close):
    package = install(monkeypatch, tracker)
    result = run(experiment(tracker))
    logged = package.named(log)
    assert [options["step"] for _, options in logged] == [1, 2]
    assert [arguments[0]["accuracy"] for arguments, _ in logged] == [row["accuracy"] for row in result.history.rows]
    assert len(package.named(close)) == 1


def test_the_configuration_goes_along(monkeypatch):
    package = install(monkeypatch, "wandb")
    run(experiment("wandb"))
    ((_, options),) = package.named("init")
    assert options["project"] == "tracked"
    assert options["config"]["local.lr"] == 0.01


def test_tensorboard_files_hold_the_accuracies(tmp_path):
    event_files = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(experiment("tensorboard"), run_dir=tmp_path / "run", pictures=False)
    events = event_files.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    told = [(event.step, pytest.approx(event.value)) for event in events.Scalars("accuracy")]
    assert told == [(row["round"], row["accuracy"]) for row in result.history.rows]


def test_tensorboard_without_a_folder_is_told():
    pytest.importorskip("tensorboard")
    with pytest.raises(FedstillError, match="run_dir"):
        run(experiment("tensorboard"))


def test_a_missing_package_is_named_before_the_first_round(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(FedstillError, match="pip install trackio"):
        run(experiment("trackio"))


def test_only_plain_numbers_are_tracked():
    row = {"round": 3, "accuracy": 0.5, "class_accuracy": [0.1], "train_loss": None, "ok": True, "cohort": 4}
    assert numbers(row) == {"accuracy": 0.5, "cohort": 4.0}


def test_nested_tables_become_dotted_keys():
    assert flat({"a": 1, "b": {"c": (1, 2), "d": None}}) == {"a": 1, "b.c": [1, 2]}


def test_no_tracker_is_built_when_none_is_named():
    assert build_trackers(SimpleNamespace(track=()), None) == []
