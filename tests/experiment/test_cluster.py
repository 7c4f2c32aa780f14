"""Recipes by which workers build a run, and the section [cluster]."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toy import same_bits

from fedstill import Experiment, FedstillError, compare, run
from fedstill.core.types import Method
from fedstill.experiment.build import build_federation
from fedstill.experiment.cluster import in_one_process, population_of, recipe_of
from fedstill.experiment.run_folder import check_same_experiment

SMALL = Experiment(
    rounds=2, cohort=3, data={"source": "digits", "test_limit": 50}, partition={"scheme": "iid", "clients": 6},
    model={"name": "mlp", "hidden": [8]}, engine={"name": "spawned", "device": "cpu", "threads": 1},
    cluster={"engine": "looped"},
)  # fmt: skip
OWN = """
from helper_of_mine import WEIGHT
from fedstill.methods import fedprox


def mine(mu=WEIGHT):
    return fedprox(mu=mu)
"""
OWN_NETWORK = """
from torch import nn


def mine(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """A folder with a method, its neighbour and a network, which the run works in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my_method.py").write_text(OWN)
    Path("helper_of_mine.py").write_text("WEIGHT = 0.3\n")
    Path("my_network.py").write_text(OWN_NETWORK)
    yield SMALL.replace(method="my_method.py:mine+scaffold", model={"name": "my_network.py:mine"})
    sys.modules.pop("helper_of_mine", None)


def test_a_run_without_workers_has_the_usual_population():
    assert population_of(SMALL.replace(engine="looped"), None) is None


def test_one_process_has_the_engine_of_the_workers():
    assert in_one_process(SMALL).engine.name == "looped"
    assert in_one_process(SMALL).engine.threads == 1


def test_a_machine_without_the_files_of_the_experiment_gets_them(own_files, tmp_path, monkeypatch):
    recipe, federation = recipe_of(own_files), build_federation(own_files)
    for file in list(tmp_path.glob("*.py")):
        file.unlink()
    sys.modules.pop("helper_of_mine", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    built = recipe(federation, "cpu")
    assert built.model.name == "mine"
    assert all(isinstance(phase.method, Method) for phase in built.method)
    written = sorted(path.name for path in (tmp_path / "elsewhere").rglob("*.py"))
    assert written == ["helper_of_mine.py", "my_method.py", "my_network.py"]


def test_a_machine_with_the_same_files_uses_them(own_files, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    recipe_of(own_files)(build_federation(own_files), "cpu")
    assert not (tmp_path / "elsewhere").exists()


def test_a_network_that_was_made_by_hand_cannot_travel():
    network = recipe_of(SMALL)(build_federation(SMALL), "cpu").model
    assert network.recipe is not None
    with pytest.raises(FedstillError, match=r"made by hand and cannot be built in another process"):
        recipe_of(SMALL, replace(network, recipe=None))


def test_the_engine_of_workers_is_an_engine():
    with pytest.raises(FedstillError, match=r"cluster\.engine = 'ray' has workers of its own"):
        SMALL.replace(cluster={"engine": "ray"})
    with pytest.raises(FedstillError, match=r"unknown engine 'spawn'; did you mean 'spawned'"):
        SMALL.replace(engine="spawn")


@pytest.mark.slow
def test_own_methods_and_networks_run_on_spawned_workers_and_go_on_with_more_of_them(own_files):
    one = run(in_one_process(own_files))
    first = run(own_files, run_dir="out")
    assert same_bits(first.weights, one.weights)
    more = own_files.replace(cluster={"engine": "looped", "actors": 3}, rounds=3)
    check_same_experiment(more, Path("out"))
    longer = run(more, run_dir="out", resume=True)
    assert same_bits(longer.weights, run(in_one_process(more)).weights)


@pytest.mark.ray
def test_own_methods_run_on_ray(own_files):
    on_ray = own_files.replace(engine={**own_files.engine.model_dump(), "name": "ray"})
    assert same_bits(run(on_ray).weights, run(in_one_process(own_files)).weights)


@pytest.mark.ray
def test_runs_of_a_comparison_stand_on_ray(tmp_path):
    both = SMALL.replace(engine={"name": "ray", "device": "cpu", "threads": 1}, compare={"jobs": 2})
    spread = compare(both, ["fedavg", "fedprox"], seeds=1, run_dir=tmp_path / "two")
    alone = compare(in_one_process(SMALL), ["fedavg", "fedprox"], seeds=1, run_dir=tmp_path / "one")
    assert [row.last for row in spread.summaries] == [row.last for row in alone.summaries]
