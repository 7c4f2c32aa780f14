"""`fedstill predict` as a user sees it: every readable sample labeled once, the same in every file, the rest named."""

import csv
import json

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from quick import first_quick
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.cli.progress import Progress

FIXED = ["id", "label", "confidence", "confidence_raw"]
DIGITS = [f"p_{digit}" for digit in range(10)]
IMAGES = {  # a file and the row of the test set that is drawn into it
    "first.png": 0,
    "a/second.png": 1,
    "a/deep/er/third.png": 2,
    "a/deep/Fourth.PNG": 3,
    "b/fifth, with a comma.png": 4,
    "b/sixth.bmp": 5,
    "z.png": 6,
}


def experiment(source, **changes):
    sections = {
        "data": {"source": source, "unlabeled": "test"},
        "method": {"name": "feddf", "student": {"steps": 10}},
        **changes,
    }
    return fedstill.Experiment(
        rounds=4,
        cohort=4,
        partition={"scheme": "lda", "clients": 5, "alpha": 1.0},
        model={"name": "mlp", "hidden": [16], "init": "torch"},
        local={"batch_size": 20, "lr": 0.2, "epochs": 2},
        **sections,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    fedstill.run(experiment("digits"), run_dir=folder, pictures=False)
    return folder


@pytest.fixture
def pictures(tmp_path):
    """Digits as files in nested folders, a broken one among them, and a file that is no image."""
    root, digits = tmp_path / "pictures", fedstill.load("digits").test
    for name, row in IMAGES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.x[row, 0].numpy()).save(path)
    (root / "b" / "broken.png").write_bytes((root / "first.png").read_bytes()[:40])
    (root / "notes.txt").write_text("read me")
    return root


def call(*words, code=0):
    outcome = CliRunner().invoke(app, ["predict", *map(str, words)])
    assert outcome.exit_code == code, outcome.output
    assert "Traceback" not in outcome.output
    return outcome


def read_csv(folder):
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_files(folder, classes):
    """CSV and parquet hold the same; labels are those of the largest probability; rows sum to one."""
    rows, table = read_csv(folder), pyarrow.parquet.read_table(folder / "predictions.parquet")
    numbers = [name for name in table.column_names if name.startswith(("p_", "confidence"))]
    assert list(rows[0]) == table.column_names
    for name in ("id", "label"):
        assert [row[name] for row in rows] == table[name].to_pylist()
    for name in numbers:
        assert [np.float32(row[name]) for row in rows] == table[name].to_pylist()
    shares = np.array([[float(row[f"p_{name}"]) for name in classes] for row in rows])
    np.testing.assert_allclose(shares.sum(1), 1.0, atol=1e-6)
    assert [row["label"] for row in rows] == [classes[answer] for answer in shares.argmax(1)]
    assert [float(row["confidence"]) for row in rows] == shares.max(1).tolist()
    return rows


def test_every_readable_image_of_a_folder_is_labeled_once_and_the_others_are_named(run, pictures, tmp_path):
    outcome = call(run, pictures, "--out", tmp_path / "out")
    rows = check_files(tmp_path / "out", [str(digit) for digit in range(10)])
    assert list(rows[0]) == FIXED + DIGITS
    assert [row["id"] for row in rows] == sorted(IMAGES), "none lost, none invented, in the order of the names"
    told = outcome.stderr.splitlines()
    assert told == [
        "fedstill: skipped, because it cannot be read: b/broken.png",
        "fedstill: skipped, because it cannot be read: notes.txt",
    ]
    assert "7 rows labeled" in outcome.stdout
    assert "2 that could not be read" in outcome.stdout


def test_an_image_is_labeled_as_the_same_digit_of_the_test_set_is(run, pictures, tmp_path):
    call(run, "--out", tmp_path / "own")
    call(run, pictures, "--out", tmp_path / "new")
    own, new = read_csv(tmp_path / "own"), {row["id"]: row for row in read_csv(tmp_path / "new")}
    assert len(own) == 359
    for name, place in IMAGES.items():
        assert new[name]["label"] == own[place]["label"]
        assert float(new[name]["confidence_raw"]) == pytest.approx(float(own[place]["confidence_raw"]), abs=1e-6)


def test_the_runs_own_unlabeled_set_keeps_its_names_and_goes_to_the_run_folder(run):
    outcome = call(run)
    rows = check_files(run, [str(digit) for digit in range(10)])
    assert len({row["id"] for row in rows}) == 359
    assert (run / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "not calibrated: the rows are the test set itself" in outcome.stdout
    right = [row["label"] == str(int(y)) for row, y in zip(rows, fedstill.load("digits").test.y, strict=True)]
    assert f"accuracy           {100 * np.mean(right):.1f} % on the predicted rows" in outcome.stdout
    assert outcome.stderr == ""


@pytest.mark.parametrize("method", first_quick(["feddf", "mrtf"]))
def test_targets_label_the_unlabeled_set_too(method, tmp_path):
    folder = tmp_path / "run"
    small = {"name": method, "student": {"steps": 10}} if method == "feddf" else {"name": method}
    fedstill.run(experiment("digits", method=small), run_dir=folder, pictures=False)
    call(folder, "--from", "targets")
    rows = check_files(folder, [str(digit) for digit in range(10)])
    assert list(rows[0]) == [*FIXED, "kept", *DIGITS]
    assert len(rows) == 359
    facts = json.loads((folder / "predictions.json").read_text())
    assert (facts["from"], facts["kept"], facts["calibrated"], facts["ece_after"]) == ("targets", 359, False, None)
    right = [row["label"] == str(int(y)) for row, y in zip(rows, fedstill.load("digits").test.y, strict=True)]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert facts["accuracy"] == pytest.approx(np.mean(right)) == pytest.approx(last["pseudo_label_accuracy"])


def test_json_says_what_was_chosen_and_is_what_the_file_says(run, pictures, tmp_path):
    outcome = call(run, pictures, "--out", tmp_path, "--format", "json")
    facts, file = json.loads(outcome.stdout), json.loads((tmp_path / "predictions.json").read_text())
    assert file.pop("files") == ["predictions.csv", "predictions.parquet", "reliability.png", "predictions.json"]
    assert facts == file
    assert (facts["from"], facts["count"], facts["round"]) == ("last", 7, 4)
    assert sum(facts["labels"].values()) == 7
    assert facts["skipped"] == ["b/broken.png", "notes.txt"]
    assert facts["calibrated"]
    assert (facts["fitted_on"], facts["fitted_rows"]) == ("the test set", 359)
    assert facts["temperature"] > 0
    for when in ("before", "after"):
        bins = facts[f"reliability_{when}"]["bins"]
        assert sum(one["count"] for one in bins) == 359
        gap = sum(one["count"] * abs(one["accuracy"] - one["confidence"]) for one in bins) / 359
        assert facts[f"ece_{when}"] == pytest.approx(gap)


def test_folders_named_as_classes_tell_the_truth_but_decide_nothing(run, tmp_path):
    digits = fedstill.load("digits").test
    for row in range(40):
        for root, named in (("labeled", f"{int(digits.y[row])}/"), ("plain", "")):
            path = tmp_path / root / f"{named}{row:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digits.x[row, 0].numpy()).save(path)
    facts = [
        json.loads(call(run, tmp_path / root, "--out", tmp_path, "--format", "json").stdout)
        for root in ("labeled", "plain")
    ]
    assert facts[0]["measured_on"].startswith("the predicted rows")
    assert facts[1]["measured_on"].startswith("the test set")
    for same in ("labels", "temperature", "confidence"):
        assert facts[0][same] == pytest.approx(facts[1][same])


def test_a_table_is_labeled_by_the_names_of_its_columns(tmp_path):
    generator = np.random.default_rng(0)
    kind = generator.integers(0, 2, 200)
    width, height = kind * 9.0 + generator.normal(size=200), -kind * 9.0 + generator.normal(size=200)
    lines = [f"{w},{h},{('cat', 'dog')[k]}" for w, h, k in zip(width, height, kind, strict=True)]
    (tmp_path / "train.csv").write_text("\n".join(["width,height,label", *lines]))
    fedstill.run(experiment(str(tmp_path / "train.csv"), method="fedavg"), run_dir=tmp_path / "run", pictures=False)
    new = [f"{h},x{row},{w}" for row, (w, h) in enumerate(zip(width[:5], height[:5], strict=True))]
    (tmp_path / "new.csv").write_text("\n".join(["height,id,width", *new]))
    told = call(tmp_path / "run", tmp_path / "new.csv").stdout
    rows = check_files(tmp_path / "run", ["cat", "dog"])
    assert [row["id"] for row in rows] == ["x0", "x1", "x2", "x3", "x4"]
    assert [row["label"] for row in rows] == [("cat", "dog")[k] for k in kind[:5]]
    assert "from               the run's last model\n" in told


def test_rows_of_a_table_keep_the_ids_that_training_was_told_to_leave_out(tmp_path):
    lines = [f"p-{1000 + row},{row % 2},{row % 3},{('cat', 'dog')[row % 2]}" for row in range(60)]
    (tmp_path / "all.csv").write_text("\n".join(["id,width,height,label", *lines]))
    data = {"source": str(tmp_path / "all.csv"), "inputs": ["width", "height"]}
    fedstill.run(experiment("", data=data, method="fedavg"), run_dir=tmp_path / "run", pictures=False)
    call(tmp_path / "run", tmp_path / "all.csv")
    assert [row["id"] for row in read_csv(tmp_path / "run")] == [f"p-{1000 + row}" for row in range(60)]


def test_a_row_that_is_left_out_is_called_a_row(tmp_path):
    lines = [f"{row % 2},{row % 3},{('cat', 'dog')[row % 2]}" for row in range(60)]
    (tmp_path / "all.csv").write_text("\n".join(["width,height,label", *lines]))
    data = {"source": str(tmp_path / "all.csv")}
    fedstill.run(experiment("", data=data, method="fedavg"), run_dir=tmp_path / "run", pictures=False)
    (tmp_path / "new.csv").write_text("width,height\n1,2\nwide,1\n0,1")
    assert "cannot be read: row 1 (column 'width' holds 'wide'" in call(tmp_path / "run", tmp_path / "new.csv").stderr


def mistake(*words):
    outcome = call(*words, code=2)
    (line,) = outcome.stderr.splitlines()
    assert outcome.stdout == ""
    return line


def test_an_empty_folder_a_missing_one_and_one_without_a_readable_image_are_mistakes(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty" in mistake(run, tmp_path / "empty")
    assert mistake(run, "nowhere") == "fedstill: INPUTS: no such file or folder: 'nowhere'", "the hub is not asked"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "one.png").write_bytes(b"no picture")
    assert "bad" in mistake(run, tmp_path / "bad")
    assert "--from" in mistake(run, "--from", "target")
    assert "config.toml" in mistake(tmp_path)


def test_an_interrupted_run_is_to_be_resumed_and_then_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(experiment("digits", method="fedavg").to_toml())

    def interrupted(self, row):
        raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr(Progress, "on_round", interrupted)
        assert CliRunner().invoke(app, ["run", "small.toml", "--out", "parts"]).exit_code == 130
    assert "`fedstill resume parts`" in mistake("parts")
    assert CliRunner().invoke(app, ["resume", "parts"]).exit_code == 0
    assert "359 rows labeled" in call("parts").stdout


def test_many_unreadable_files_are_counted_not_all_named(run, pictures, tmp_path):
    for number in range(15):
        (pictures / f"bad {number:02}.png").write_bytes(b"no picture")
    told = call(run, pictures, "--out", tmp_path).stderr.splitlines()
    assert len(told) == 11
    assert told[-1] == f"fedstill: skipped 7 more, all in {tmp_path}/predictions.json"
    assert len(json.loads((tmp_path / "predictions.json").read_text())["skipped"]) == 17
