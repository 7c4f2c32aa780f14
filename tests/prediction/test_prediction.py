"""Labels from a finished run: whose answer, on what, and which labels may judge how sure it is."""

import dataclasses
import json
import logging
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

import fedstill
from fedstill import prediction
from fedstill.core.errors import FedstillError
from fedstill.experiment.build import build_federation
from fedstill.experiment.run_folder import read_description
from fedstill.loop.checkpoint import load_model, load_tensors, save_tensors, save_weights

ROUNDS = 3


def experiment(**changes):
    sections = {
        "data": {"source": "digits", "unlabeled": "test"},
        "method": {"name": "feddf", "student": {"steps": 10}},
        **changes,
    }
    return fedstill.Experiment(
        rounds=ROUNDS,
        cohort=3,
        checkpoint_every=1,
        partition={"scheme": "lda", "clients": 6, "alpha": 0.5},
        model={"name": "mlp", "hidden": [8], "init": "torch"},
        local={"batch_size": 20, "lr": 0.1},
        engine={"device": "cpu"},
        **sections,
    )


RUNS = {
    "transductive": {},
    "held-out": {"data": {"source": "digits", "unlabeled": 60}},
    "no-targets": {"data": {"source": "digits", "unlabeled": 60}, "method": "fedavg"},
    "nothing": {"data": "digits", "method": "fedavg"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by name; nothing is written into them."""
    root = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        fedstill.run(experiment(**changes), run_dir=root / name, pictures=False)
    return {name: root / name for name in RUNS}


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of a run that a test may damage."""
    return lambda name: shutil.copytree(runs[name], tmp_path / name)


def federation_of(folder):
    return build_federation(read_description(folder))


def scores_by_hand(folder, x):
    """The saved perceptron in numpy: ((x / 255 - mean) / std) W1 + b1, ReLU, W2 + b2."""
    data, saved = federation_of(folder).train, load_file(folder / "last" / "weights.safetensors")
    (w1, b1), (w2, b2) = (
        (saved[name].astype(np.float64), saved[name.replace("weight", "bias")].astype(np.float64))
        for name in sorted(key for key in saved if key.endswith("weight"))
    )
    inputs = ((x.numpy() / 255.0 - data.mean[0]) / data.std[0]).reshape(len(x), -1)
    return np.maximum(inputs @ w1.T + b1, 0) @ w2.T + b2


def save_targets(tensors, folder):
    """Other targets in the place of a run's, as if this run had written them for the same rows and round."""
    _, about = load_tensors(folder / "targets.safetensors")
    save_tensors(folder / "targets.safetensors", {key: torch.from_numpy(leaf) for key, leaf in tensors.items()}, about)


def softmax(scores):
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def with_federation(monkeypatch, **changes):
    """predict sees a federation in which some fields are different."""

    def build(*given):
        federation = build_federation(*given)
        return dataclasses.replace(federation, **{name: change(federation) for name, change in changes.items()})

    monkeypatch.setattr(prediction, "build_federation", build)


def test_the_model_answers_as_its_saved_weights_do_by_hand(runs):
    found = fedstill.predict(runs["held-out"])
    scores = scores_by_hand(runs["held-out"], federation_of(runs["held-out"]).unlabeled)
    assert found.labels == tuple(str(answer) for answer in scores.argmax(1))
    np.testing.assert_allclose(found.confidence_raw, softmax(scores).max(1), atol=2e-5)
    calibrated = softmax(scores / found.calibration.temperature)
    np.testing.assert_allclose(found.probabilities, calibrated, atol=5e-5)
    np.testing.assert_allclose(found.confidence, calibrated.max(1), atol=5e-5)
    assert len(found.ids) == len(set(found.ids)) == 60


def test_targets_are_what_the_server_left_row_for_row(runs):
    saved = load_file(runs["transductive"] / "targets.safetensors")
    found = fedstill.predict(runs["transductive"], from_="targets")
    np.testing.assert_allclose(found.probabilities, saved["probabilities"], atol=1e-6)
    assert found.labels == tuple(str(answer) for answer in saved["probabilities"].argmax(1))
    assert torch.equal(found.confidence, found.confidence_raw)
    assert found.kept.tolist() == saved["kept"].tolist()
    assert (found.source, found.round) == ("targets", ROUNDS)


def test_rows_that_a_threshold_left_out_are_labeled_too_and_marked(copied):
    folder = copied("transductive")
    saved = load_file(folder / "targets.safetensors")
    saved["kept"] = np.arange(len(saved["kept"])) % 3 == 0
    save_targets(saved, folder)
    found = fedstill.predict(folder, from_="targets", out=folder)
    assert len(found.labels) == 359
    assert "the server learnt from 120 of these rows" in found.why
    assert found.summary()["kept"] == 120
    assert [line.split(",")[4] for line in (folder / "predictions.csv").read_text().split()[1:4]] == [
        "True", "False", "False",
    ]  # fmt: skip


def test_rows_apart_from_the_test_set_are_calibrated_on_it(runs):
    found = fedstill.predict(runs["held-out"])
    test = federation_of(runs["held-out"]).test
    scores = scores_by_hand(runs["held-out"], test.x)

    def likelihood(temperature):
        return np.log(softmax(scores / temperature)[np.arange(len(test.y)), test.y.numpy()]).mean()

    best = found.calibration.temperature
    assert likelihood(best) > max(likelihood(0.99 * best), likelihood(1.01 * best))
    assert found.calibration.why == f"temperature {best:.3f}, fitted on the test set (359 rows)"


def test_the_test_set_is_not_calibrated_on_its_own_labels(runs, monkeypatch):
    honest = fedstill.predict(runs["transductive"])
    assert honest.calibration.temperature is None
    assert honest.calibration.why.startswith("not calibrated: the rows are the test set itself")
    assert torch.equal(honest.confidence, honest.confidence_raw)
    with_federation(
        monkeypatch, test=lambda held: dataclasses.replace(held.test, y=held.test.y.flip(0)), unlabeled_truth=no_truth
    )
    other = fedstill.predict(runs["transductive"])
    assert torch.equal(other.probabilities, honest.probabilities)


def no_truth(held):
    return None


def test_a_validation_set_calibrates_the_test_set_too(tmp_path):
    data = {"source": "digits", "unlabeled": "test", "validation": 200}
    fedstill.run(experiment(data=data), run_dir=tmp_path, pictures=False)
    found, (x, y) = fedstill.predict(tmp_path), federation_of(tmp_path).validation
    scores = torch.from_numpy(scores_by_hand(tmp_path, x))
    assert found.calibration.temperature == pytest.approx(fit_by_search(scores.numpy(), y.numpy()), rel=1e-3)
    assert found.calibration.fitted_on == "the validation set"
    assert found.calibration.rows == 200


def fit_by_search(scores, y):
    fine = np.geomspace(0.1, 10, 20001)
    return fine[np.argmax([np.log(softmax(scores / t)[np.arange(len(y)), y]).mean() for t in fine])]


def test_a_handful_of_labels_calibrates_nothing(tmp_path):
    fedstill.run(
        experiment(data={"source": "digits", "validation": 10}, method="fedavg"),
        run_dir=tmp_path / "run",
        pictures=False,
    )
    new = draw(tmp_path / "new", range(9))
    assert "has 10 labeled rows" in fedstill.predict(tmp_path / "run", new).calibration.why


def test_without_known_truth_the_curve_is_that_of_the_rows_of_the_fit(runs, monkeypatch):
    with_federation(monkeypatch, unlabeled_truth=no_truth)
    found = fedstill.predict(runs["held-out"])
    assert found.measured.on == "the test set"
    assert (found.measured.before.rows, found.measured.after.rows) == (359, 359)
    test = federation_of(runs["held-out"]).test
    right = scores_by_hand(runs["held-out"], test.x).argmax(1) == test.y.numpy()
    assert found.measured.before.accuracy == found.measured.after.accuracy == pytest.approx(right.mean())
    assert "a little too small" in found.measured.how


def test_where_a_simulation_knows_the_truth_the_predicted_rows_are_measured(runs, monkeypatch):
    truth = torch.arange(60) % 10
    truth[50:] = -1  # not known
    with_federation(monkeypatch, unlabeled_truth=lambda held: truth)
    found = fedstill.predict(runs["held-out"])
    right = [name == str(int(y)) for name, y in zip(found.labels[:50], truth, strict=False)]
    assert found.measured.before.rows == 50
    assert found.measured.before.accuracy == pytest.approx(np.mean(right))
    assert found.measured.after.confidence == pytest.approx(float(found.confidence[:50].mean()), abs=1e-6)
    assert found.measured.on.startswith("the predicted rows")
    with_federation(monkeypatch, unlabeled_truth=lambda held: truth.flip(0))
    assert torch.equal(fedstill.predict(runs["held-out"]).probabilities, found.probabilities), "it decides nothing"


def test_targets_are_never_called_calibrated(runs, monkeypatch):
    with_federation(monkeypatch, unlabeled_truth=lambda held: held.test.y)
    found = fedstill.predict(runs["transductive"], from_="targets")
    assert found.calibration.temperature is None
    assert found.measured.after is None
    assert found.measured.before.rows == 359
    with_federation(monkeypatch, unlabeled_truth=no_truth)
    assert fedstill.predict(runs["transductive"], from_="targets").measured is None


def test_rows_without_names_are_numbered(runs, monkeypatch):
    with_federation(monkeypatch, unlabeled_ids=lambda held: None)
    assert fedstill.predict(runs["held-out"]).ids == tuple(str(row) for row in range(60))
    with_federation(monkeypatch, unlabeled_ids=lambda held: tuple(f"x{row}" for row in range(60)))
    assert fedstill.predict(runs["held-out"]).ids[-1] == "x59"


def test_nothing_is_written_unless_a_folder_is_named(runs, tmp_path):
    before = sorted(runs["held-out"].rglob("*"))
    fedstill.predict(runs["held-out"])
    assert sorted(runs["held-out"].rglob("*")) == before
    fedstill.predict(runs["held-out"], out=tmp_path / "new" / "place")
    assert {path.name for path in (tmp_path / "new" / "place").iterdir()} == {
        "predictions.csv", "predictions.parquet", "predictions.json", "reliability.png",
    }  # fmt: skip


def test_an_old_curve_does_not_stay_beside_new_labels_that_have_none(copied, monkeypatch):
    folder = copied("transductive")
    with_federation(monkeypatch, unlabeled_truth=lambda held: held.test.y)
    fedstill.predict(folder, out=folder)
    assert (folder / "reliability.png").exists()
    with_federation(monkeypatch, unlabeled_truth=no_truth)
    fedstill.predict(folder, from_="targets", out=folder)
    assert not (folder / "reliability.png").exists()


@pytest.mark.parametrize(("package", "lost"), [("matplotlib", "reliability.png"), ("pyarrow", "predictions.parquet")])
def test_a_missing_extra_costs_one_line_and_one_file(runs, tmp_path, monkeypatch, caplog, package, lost):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with caplog.at_level(logging.WARNING):
        fedstill.predict(runs["held-out"], out=tmp_path)
    assert [record.message.split(":")[0] for record in caplog.records] == [f"no {lost}"]
    assert "pip install" in caplog.text
    assert not (tmp_path / lost).exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_of_a_gpu_is_read_on_a_machine_without_one(copied, monkeypatch):
    folder = copied("held-out")
    there = fedstill.predict(folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('device = "cpu"', 'device = "cuda"'))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.equal(fedstill.predict(folder).probabilities, there.probabilities)


def test_a_run_that_stopped_early_says_which_model_answers(copied):
    folder = copied("held-out")
    (folder / "checkpoints" / "round-000003.zip").unlink()
    weights, about = load_model(folder / "last")
    save_weights(folder / "last", weights, {**about, "round": "2"})
    (note,) = fedstill.predict(folder).notes
    assert "round 2 of 3" in note
    assert f"fedstill resume {folder}" in note


def mistake(*words, **options):
    with pytest.raises(FedstillError) as told:
        fedstill.predict(*words, **options)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_run_without_a_model_is_to_be_resumed(copied):
    folder = copied("held-out")
    shutil.rmtree(folder / "last")
    assert f"fedstill resume {folder}" in mistake(folder)


def test_a_comparison_is_not_one_run(copied):
    folder = copied("held-out")
    shutil.copytree(folder, folder / "feddf" / "seed-0")
    (folder / "results.json").write_text("{}")
    assert "feddf/seed-0" in mistake(folder)


def test_a_run_without_unlabeled_data_asks_for_some(runs):
    told = mistake(runs["nothing"])
    assert "data.unlabeled" in told
    assert "INPUTS" in told


def test_targets_that_are_not_there_are_missed(runs):
    assert "its method forms no targets" in mistake(runs["no-targets"], from_="targets")
    assert "own unlabeled set only" in mistake(runs["transductive"], "folder", from_="targets")


def test_targets_of_other_rows_are_not_handed_out(copied):
    folder = copied("transductive")
    saved = load_file(folder / "targets.safetensors")
    save_targets({name: leaf[:-1] for name, leaf in saved.items()}, folder)
    assert "the unlabeled data have changed" in mistake(folder, from_="targets")
    (folder / "targets.safetensors").write_bytes(b"no tensors")
    assert "cannot be read" in mistake(folder, from_="targets")
    assert len(fedstill.predict(folder).ids) == 359, "the model needs no targets"


def test_weights_of_another_network_are_refused(copied):
    folder = copied("held-out")
    tensors, about = load_tensors(folder / "last" / "weights.safetensors")
    save_tensors(folder / "last" / "weights.safetensors", {name: leaf[:1] for name, leaf in tensors.items()}, about)
    assert "holds no mlp of this run" in mistake(folder)


def test_words_that_mean_nothing_are_refused(runs, tmp_path):
    assert "'last'" in mistake(runs["held-out"], from_="lst")
    (tmp_path / "file").touch()
    assert "is a file" in mistake(runs["held-out"], out=tmp_path / "file")
    assert "holds no run" in mistake(tmp_path)


# Places in `predict`: what a name means, what may be written where, and which labels are not of the predicted rows.


def experiment_on(**data):
    return fedstill.Experiment(
        rounds=1,
        cohort=3,
        data={
            "source": "digits",
            **{key: value if isinstance(value, int) else str(value) for key, value in data.items()},
        },
        partition={"scheme": "lda", "clients": 6, "alpha": 0.5},
        model={"name": "mlp", "hidden": [8], "init": "torch"},
        local={"batch_size": 20, "lr": 0.1},
        method={"name": "feddf", "student": {"steps": 5}} if "unlabeled" in data else "fedavg",
    )


def finished_run(folder, **data):
    fedstill.run(experiment_on(**data), run_dir=folder, pictures=False)
    return folder


def draw(folder, rows, classes=False):
    """Rows of the digits' test set as files, in folders of their classes if asked for."""
    digits = fedstill.load("digits").test
    for row in rows:
        path = folder / (str(int(digits.y[row])) if classes else "") / f"{row:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.x[row, 0].numpy()).save(path)
    return folder


@pytest.mark.parametrize("name", ["digits", "fashion-mini"])
def test_a_folder_with_the_name_of_an_embedded_set_is_that_folder(tmp_path, monkeypatch, name):
    folder = finished_run(tmp_path / "run")
    draw(tmp_path / name, range(3))
    monkeypatch.chdir(tmp_path)
    found = fedstill.predict(folder, name)
    assert found.ids == ("000.png", "001.png", "002.png")
    assert found.what == f"'{name}'"


def test_predictions_are_not_written_among_the_samples(tmp_path, monkeypatch):
    photos, new = draw(tmp_path / "photos", range(5)), draw(tmp_path / "new", range(5))
    folder = finished_run(tmp_path / "run", unlabeled=photos)
    for out in (new, new / "labels" / "here"):
        assert f"'{out}' lies in INPUTS '{new}'" in mistake(folder, new, out=out)
    for inputs in (None, new):
        assert f"lies in data.unlabeled '{photos}'" in mistake(folder, inputs, out=photos / "labels")
    monkeypatch.chdir(new)
    assert "lies in INPUTS" in mistake(folder, new, out="labels")
    (tmp_path / "other").symlink_to(new)
    assert "lies in INPUTS" in mistake(folder, new, out=tmp_path / "other")
    assert sorted(os.listdir(new)) == sorted(os.listdir(photos)) == [f"{row:03}.png" for row in range(5)]
    fedstill.predict(folder, new, out=tmp_path / "new labels")
    assert (tmp_path / "new labels" / "predictions.csv").exists(), "a name that begins alike is another folder"


def test_predictions_in_a_run_folder_among_the_samples_are_no_samples(tmp_path):
    folder = finished_run(tmp_path / "photos" / "run")
    draw(tmp_path / "photos", range(5))
    for _ in range(2):
        assert len(fedstill.predict(folder, tmp_path / "photos", out=folder).ids) == 5


@pytest.mark.parametrize("part", [".", "..", "3"])
def test_new_rows_that_may_hold_the_labeled_ones_are_not_calibrated_on_them(tmp_path, part):
    test = draw(tmp_path / "data" / "test", range(120), classes=True)
    folder = finished_run(tmp_path / "run", test=test)
    apart = fedstill.predict(folder, draw(tmp_path / "new", range(130, 140)))
    assert apart.calibration.fitted_on == "the test set"
    found = fedstill.predict(folder, test / part)
    assert found.calibration.temperature is None
    assert found.calibration.why.startswith("not calibrated: the labeled rows may be among the predicted ones")
    assert str((test / part).resolve()) in found.calibration.why


def test_an_unlabeled_set_that_is_the_test_folder_is_not_calibrated_on_it(tmp_path):
    test = draw(tmp_path / "test", range(120), classes=True)
    folder = finished_run(tmp_path / "run", test=test, unlabeled=test)
    assert "may be among the predicted ones" in fedstill.predict(folder, from_="last").calibration.why
    new = draw(tmp_path / "new", range(130, 140))
    assert fedstill.predict(folder, new).calibration.fitted_on == "the test set"


def test_validation_rows_of_the_source_do_not_calibrate_the_source(tmp_path):
    source = draw(tmp_path / "source", range(200), classes=True)
    folder = finished_run(tmp_path / "run", source=source, validation=30)
    assert fedstill.predict(folder, draw(tmp_path / "new", range(9))).calibration.fitted_on == "the validation set"
    assert "may be among the predicted ones" in fedstill.predict(folder, source).calibration.why
    test = draw(tmp_path / "test", range(200, 320), classes=True)
    other = finished_run(tmp_path / "other", source=source, validation=30, test=test)
    assert fedstill.predict(other, source).calibration.fitted_on == "the test set"
    assert fedstill.predict(other, test).calibration.fitted_on == "the validation set"


def test_what_could_not_be_read_of_the_runs_own_folder_is_named(tmp_path):
    photos = draw(tmp_path / "photos", range(5))
    (photos / "broken.png").write_bytes(b"no picture")
    (photos / "notes.txt").write_text("read me")
    folder = finished_run(tmp_path / "run", unlabeled=photos)
    fedstill.predict(folder, out=folder)
    facts = json.loads((folder / "predictions.json").read_text())
    assert (facts["count"], facts["skipped"]) == (5, ["broken.png", "notes.txt"])


def test_new_samples_are_labeled_when_the_runs_own_are_gone(tmp_path):
    photos, new = draw(tmp_path / "photos", range(5)), draw(tmp_path / "new", range(7))
    folder = finished_run(tmp_path / "run", unlabeled=photos, unlabeled_limit=4)
    before = fedstill.predict(folder, new)
    shutil.rmtree(photos)
    after = fedstill.predict(folder, new)
    assert len(after.ids) == 7
    assert after.probabilities.equal(before.probabilities)
    assert "photos" in mistake(folder)


def test_where_nothing_can_be_written_one_line_says_so(tmp_path):
    folder, new = finished_run(tmp_path / "run"), draw(tmp_path / "new", range(3))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "below", "/proc/nothing/here"):
        assert mistake(folder, new, out=out).startswith(f"--out: cannot write '{os.path.dirname(out)}")
    for name in ("predictions.csv", "predictions.parquet", "predictions.json", "reliability.png"):
        taken = tmp_path / f"taken by {name}"
        (taken / name / "something").mkdir(parents=True)
        assert name in mistake(folder, new, out=taken)
        assert not list(taken.glob(".writing-*")), "no half a file is left"


@pytest.mark.parametrize("place", ["file/below", "/proc/nothing/here"])
def test_a_run_in_a_folder_that_cannot_be_made_is_one_line(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(FedstillError, match="cannot write into") as told:
        finished_run(tmp_path / place)
    assert "\n" not in str(told.value)
