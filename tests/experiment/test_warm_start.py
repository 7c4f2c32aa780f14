"""A run that begins from the last model of another run or from a bundle, and every start that does not fit."""

from __future__ import annotations

import shutil

import pytest
import torch

import fedstill
from fedstill import Experiment, FedstillError
from fedstill.loop.checkpoint import load_weights


def table_of(path, columns, words=("no", "yes")):
    """A table of 60 rows whose class is the sign of its first number."""
    rows = [[(7 * row + place) % 11 - 5 for place in range(len(columns))] for row in range(60)]
    lines = [",".join([*columns, "label"]), *(",".join([*map(str, row), words[row[0] > 0]]) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def experiment(source, **changes):
    sections = {
        "rounds": 2,
        "cohort": 2,
        "data": {"source": source},
        "partition": {"scheme": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [4]},
        "local": {"lr": 0.1},
    }
    return Experiment.model_validate({**sections, **changes})


def started(folder, **options):
    return {"name": "mlp", "hidden": [4], "start": str(folder), **options}


@pytest.fixture
def bundle(first):
    """The bundle of the finished run, far from its folder; the folder is gone."""
    fedstill.export(first, out="first.safetensors")
    weights = load_weights(first / "last")
    shutil.rmtree(first)
    return weights


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The folder of a finished run."""
    monkeypatch.chdir(tmp_path)
    source = table_of(tmp_path / "a.csv", ["a", "b"])
    fedstill.run(experiment(source), run_dir="first", pictures=False)
    return tmp_path / "first"


def test_a_run_starts_from_the_last_model_of_another(first):
    start = load_weights(first / "last")
    still = experiment("a.csv", rounds=1, model=started("first"), local={"lr": 1e-30})
    weights = fedstill.run(still, run_dir="second", pictures=False).weights
    assert all(torch.equal(weights.params[name], start.params[name]) for name in start.params)
    assert fedstill.Experiment.from_toml("second/config.toml").model.start == str(first)


def test_a_network_without_adapters_is_the_base_of_one_with_them(first):
    """Its base stays what it was; the factors of two seeds begin and end as others."""
    base = load_weights(first / "last")
    ends = []
    for seed in (0, 1):
        adapted = experiment("a.csv", seed=seed, rounds=1, model=started("first", adapters=1))
        ends.append(fedstill.run(adapted, pictures=False).weights)
        assert torch.equal(ends[-1].buffers["encoder.1.weight"], base.params["encoder.1.weight"])
        assert not torch.equal(ends[-1].params["head.weight"], base.params["head.weight"])
    assert not torch.equal(ends[0].params["encoder.1.down"], ends[1].params["encoder.1.down"])


def test_a_bundle_of_a_network_with_adapters_predicts_as_its_run(first):
    adapted = experiment("a.csv", rounds=1, model=started("first", adapters=1))
    fedstill.run(adapted, run_dir="second", pictures=False)
    fedstill.export("second", out="second.safetensors")
    run, bundle = (fedstill.predict(place, "a.csv") for place in ("second", "second.safetensors"))
    assert (run.probabilities == bundle.probabilities).all()


def test_the_scale_of_the_inputs_may_differ(first, tmp_path):
    other = tmp_path / "b.csv"
    other.write_text((tmp_path / "a.csv").read_text() + "90,80,yes\n")
    fedstill.run(experiment(str(other), model=started(first)))


@pytest.mark.parametrize(
    ("columns", "words", "options", "line"),
    [
        (["a", "b"], ("no", "maybe"), {}, "classes differ: without 'yes' with new 'maybe'"),
        (["b", "a"], ("no", "yes"), {}, "the column names are in another order"),
        (["a", "b", "c"], ("no", "yes"), {}, "columns differ: with new 'c'"),
        (["a", "b"], ("no", "yes"), {"hidden": [5]}, r"layer 'encoder.\d.weight' has the shape \(4, 2\), not \(5, 2\)"),
        (["a", "b"], ("no", "yes"), {"hidden": [4, 4]}, "it has no layer 'encoder.3.weight'"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_by_its_first_difference(first, tmp_path, columns, words, options, line):
    source = table_of(tmp_path / "b.csv", columns, words)
    with pytest.raises(FedstillError, match=rf"^model.start = '.*' .*: {line}.*leave model.start out$"):
        fedstill.run(experiment(source, model=started(first, **options)), run_dir="second")
    assert not (tmp_path / "second").exists()


def test_a_start_that_is_no_finished_run_is_refused(first):
    for place, line in {"nowhere": "holds no model", ".": "holds no model", "both": "holds a comparison"}.items():
        if place == "both":
            fedstill.compare(experiment("a.csv", rounds=1), ["fedavg"], seeds=1, run_dir="both")
        with pytest.raises(FedstillError, match=rf"^model.start = '{place}' {line}"):
            fedstill.run(experiment("a.csv", model=started(place)))


def test_a_resume_notices_another_start_and_predict_does_not_need_it(first):
    fedstill.run(experiment("a.csv", model=started("first")), run_dir="second", pictures=False)
    fedstill.resume_run("first")  # it is finished, so its model stays
    fedstill.resume_run("second", rounds=3)
    fedstill.resume_run("first", rounds=3)
    with pytest.raises(FedstillError, match=r"last/weights.safetensors' has changed since the run began"):
        fedstill.resume_run("second", rounds=4)
    shutil.rmtree(first)
    assert len(fedstill.predict("second", "a.csv").labels) == 60


def test_a_run_starts_from_the_model_of_a_bundle(bundle, tmp_path):
    still = experiment("a.csv", rounds=1, model=started("first.safetensors"), local={"lr": 1e-30})
    weights = fedstill.run(still, run_dir="second", pictures=False).weights
    assert all(torch.equal(weights.params[name], bundle.params[name]) for name in bundle.params)
    assert fedstill.Experiment.from_toml("second/config.toml").model.start == str(tmp_path / "first.safetensors")


@pytest.mark.parametrize(
    ("columns", "options", "line"),
    [
        (["b", "a"], {}, "was trained for another task: the column names are in another order"),
        (["a", "b"], {"hidden": [5]}, r"holds another network: layer 'encoder.\d.weight' has the shape \(4, 2\), not"),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused_by_its_first_difference(bundle, tmp_path, columns, options, line):
    source = table_of(tmp_path / "b.csv", columns)
    with pytest.raises(FedstillError, match=rf"^model.start = 'first.safetensors' {line}.*leave model.start out$"):
        fedstill.run(experiment(source, model=started("first.safetensors", **options)), run_dir="second")
    assert not (tmp_path / "second").exists()


def test_a_bundle_that_cannot_be_read_is_refused_with_the_key(bundle, tmp_path):
    content = (tmp_path / "first.safetensors").read_bytes()
    for name, damaged in {"cut": content[:-1], "changed": content[:-1] + b"\0", "empty": b""}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(damaged)
        with pytest.raises(FedstillError, match=r"^model.start: .*unchanged copy$"):
            fedstill.run(experiment("a.csv", model=started(f"{name}.safetensors")))
    with pytest.raises(FedstillError, match=r"^model.start: cannot read the bundle 'nothing.safetensors' \(No such"):
        fedstill.run(experiment("a.csv", model=started("nothing.safetensors")))


def test_a_resume_notices_another_bundle_and_predict_does_not_need_it(bundle, tmp_path):
    fedstill.run(experiment("a.csv", model=started("first.safetensors")), run_dir="second", pictures=False)
    fedstill.run(experiment("a.csv", rounds=1), run_dir="other", pictures=False)
    kept = (tmp_path / "first.safetensors").read_bytes()
    fedstill.resume_run("second", rounds=3)
    fedstill.export("other", out="first.safetensors")
    with pytest.raises(FedstillError, match=r"first.safetensors' has changed since the run began"):
        fedstill.resume_run("second", rounds=4)
    (tmp_path / "first.safetensors").write_bytes(kept)
    fedstill.resume_run("second", rounds=4)
    (tmp_path / "first.safetensors").unlink()
    with pytest.raises(FedstillError, match=r"first.safetensors' is gone"):
        fedstill.resume_run("second", rounds=5)
    assert len(fedstill.predict("second", "a.csv").labels) == 60
