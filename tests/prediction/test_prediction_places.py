"""Places in `predict`: what a name means, what may be written where, and which labels are not of the predicted rows."""

import json
import logging
import os
import shutil

import pytest
from PIL import Image

import fedstill
from fedstill.core.errors import FedstillError


def experiment(**data):
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


@pytest.fixture(autouse=True)
def no_log_left():
    yield
    logging.getLogger("fedstill.run").handlers.clear()


def run(folder, **data):
    fedstill.run(experiment(**data), run_dir=folder, pictures=False)
    return folder


def draw(folder, rows, classes=False):
    """Rows of the digits' test set as files, in folders of their classes if asked for."""
    digits = fedstill.load("digits").test
    for row in rows:
        path = folder / (str(int(digits.y[row])) if classes else "") / f"{row:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.x[row, 0].numpy()).save(path)
    return folder


def mistake(*words, **options):
    with pytest.raises(FedstillError) as told:
        fedstill.predict(*words, **options)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("name", ["digits", "fashion-mini"])
def test_a_folder_with_the_name_of_an_embedded_set_is_that_folder(tmp_path, monkeypatch, name):
    folder = run(tmp_path / "run")
    draw(tmp_path / name, range(3))
    monkeypatch.chdir(tmp_path)
    found = fedstill.predict(folder, name)
    assert found.ids == ("000.png", "001.png", "002.png")
    assert found.what == f"'{name}'"


def test_predictions_are_not_written_among_the_samples(tmp_path, monkeypatch):
    photos, new = draw(tmp_path / "photos", range(5)), draw(tmp_path / "new", range(5))
    folder = run(tmp_path / "run", unlabeled=photos)
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
    folder = run(tmp_path / "photos" / "run")
    draw(tmp_path / "photos", range(5))
    for _ in range(2):
        assert len(fedstill.predict(folder, tmp_path / "photos", out=folder).ids) == 5


@pytest.mark.parametrize("part", [".", "..", "3"])
def test_new_rows_that_may_hold_the_labeled_ones_are_not_calibrated_on_them(tmp_path, part):
    test = draw(tmp_path / "data" / "test", range(120), classes=True)
    folder = run(tmp_path / "run", test=test)
    apart = fedstill.predict(folder, draw(tmp_path / "new", range(130, 140)))
    assert apart.calibration.fitted_on == "the test set"
    found = fedstill.predict(folder, test / part)
    assert found.calibration.temperature is None
    assert found.calibration.why.startswith("not calibrated: the labeled rows may be among the predicted ones")
    assert str((test / part).resolve()) in found.calibration.why


def test_an_unlabeled_set_that_is_the_test_folder_is_not_calibrated_on_it(tmp_path):
    test = draw(tmp_path / "test", range(120), classes=True)
    folder = run(tmp_path / "run", test=test, unlabeled=test)
    assert "may be among the predicted ones" in fedstill.predict(folder, from_="model").calibration.why
    new = draw(tmp_path / "new", range(130, 140))
    assert fedstill.predict(folder, new).calibration.fitted_on == "the test set"


def test_validation_rows_of_the_source_do_not_calibrate_the_source(tmp_path):
    source = draw(tmp_path / "source", range(200), classes=True)
    folder = run(tmp_path / "run", source=source, validation=30)
    assert fedstill.predict(folder, draw(tmp_path / "new", range(9))).calibration.fitted_on == "the validation set"
    assert "may be among the predicted ones" in fedstill.predict(folder, source).calibration.why
    test = draw(tmp_path / "test", range(200, 320), classes=True)
    other = run(tmp_path / "other", source=source, validation=30, test=test)
    assert fedstill.predict(other, source).calibration.fitted_on == "the test set"
    assert fedstill.predict(other, test).calibration.fitted_on == "the validation set"


def test_what_could_not_be_read_of_the_runs_own_folder_is_named(tmp_path):
    photos = draw(tmp_path / "photos", range(5))
    (photos / "broken.png").write_bytes(b"no picture")
    (photos / "notes.txt").write_text("read me")
    folder = run(tmp_path / "run", unlabeled=photos)
    fedstill.predict(folder, out=folder)
    facts = json.loads((folder / "predictions.json").read_text())
    assert (facts["count"], facts["skipped"]) == (5, ["broken.png", "notes.txt"])


def test_new_samples_are_labeled_when_the_runs_own_are_gone(tmp_path):
    photos, new = draw(tmp_path / "photos", range(5)), draw(tmp_path / "new", range(7))
    folder = run(tmp_path / "run", unlabeled=photos, unlabeled_limit=4)
    before = fedstill.predict(folder, new)
    shutil.rmtree(photos)
    after = fedstill.predict(folder, new)
    assert len(after.ids) == 7
    assert after.probabilities.equal(before.probabilities)
    assert "photos" in mistake(folder)


def test_where_nothing_can_be_written_one_line_says_so(tmp_path):
    folder, new = run(tmp_path / "run"), draw(tmp_path / "new", range(3))
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
        run(tmp_path / place)
    assert "\n" not in str(told.value)
