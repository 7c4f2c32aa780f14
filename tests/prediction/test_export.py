"""A model that is handed over: a bundle answers as its run does, alone, and unchanged or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import fedstill
from fedstill.core.errors import FedstillError
from fedstill.experiment.build import build_federation

WORDS = ("blue", "green", "red")


def table(rows, seed=0):
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame(draw.normal(3.0, 2.0, (rows, 3)).round(4), columns=["age", "dose", "mass"])
    frame["colour"] = draw.choice(WORDS, rows)
    return frame


def labeled(rows):
    frame = table(rows)
    frame["outcome"] = np.where(frame.age + 2 * (frame.colour == "red") > 3.5, "ill", "well")
    return frame


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a table, whose training file is gone."""
    root = tmp_path_factory.mktemp("table")
    labeled(400).to_csv(root / "train.csv", index=False)
    experiment = fedstill.Experiment(
        name="clinic",
        rounds=4,
        cohort=3,
        seed=471_147_114_711,
        data={"source": str(root / "train.csv"), "label": "outcome"},
        partition={"scheme": "lda", "clients": 3, "alpha": 5.0},
        model={"name": "mlp", "hidden": [8], "init": "torch"},
        local={"batch_size": 20, "lr": 0.1},
        engine={"device": "cpu"},
    )
    fedstill.run(experiment, run_dir=root / "run", pictures=False)
    (root / "train.csv").unlink()
    return root / "run"


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "model.safetensors"
    fedstill.export(run, out=path)
    return path


@pytest.fixture
def new(tmp_path):
    frame = table(60, seed=1)
    frame.insert(0, "patient_id", [f"p{row:02}" for row in reversed(range(60))])
    frame.to_csv(tmp_path / "new.csv", index=False)
    return tmp_path / "new.csv"


def mistake(call, *words, **options):
    with pytest.raises(FedstillError) as raised:
        call(*words, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_bundle_answers_as_its_run_does_to_the_last_bit(run, new, tmp_path, which):
    fedstill.export(run, from_=which, out=tmp_path / "m.safetensors")
    of_run = fedstill.predict(run, new, from_=which, out=tmp_path / "a")
    of_bundle = fedstill.predict(tmp_path / "m.safetensors", new, out=tmp_path / "b")
    assert of_bundle.probabilities.equal(of_run.probabilities)
    assert of_bundle.calibration == of_run.calibration
    assert (tmp_path / "a/predictions.csv").read_bytes() == (tmp_path / "b/predictions.csv").read_bytes()


def test_a_bundle_answers_in_another_process_and_folder_without_its_run(bundle, new, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "m.safetensors").write_bytes(bundle.read_bytes())
    words = [sys.executable, "-m", "fedstill", "predict", "m.safetensors", str(new), "--format", "json"]
    place = str(Path(fedstill.__file__).parents[1])
    done = subprocess.run(words, cwd=there, env={**os.environ, "PYTHONPATH": place}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["count"] == 60
    fedstill.predict(bundle, new, out=tmp_path / "here")
    assert (there / "predictions.csv").read_bytes() == (tmp_path / "here/predictions.csv").read_bytes()


def test_a_frame_in_python_gets_the_answers_of_its_file(bundle, new):
    model = fedstill.load(bundle)
    of_frame = model.predict(pandas.read_csv(new).set_index("patient_id"))
    of_file = model.predict(new)
    assert of_frame.probabilities.equal(of_file.probabilities)
    assert of_frame.ids == of_file.ids
    assert model.classes == ("ill", "well")


def test_any_changed_byte_is_refused(bundle, tmp_path):
    data, path = bundle.read_bytes(), tmp_path / "changed.safetensors"
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*range(8), *range(8, header, 97), header - 1, *range(header, len(data), 61), len(data) - 1]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert str(path) in mistake(fedstill.load, path)
    for other in (data[:-1], data + b"\0", b"", b"no bundle"):
        path.write_bytes(other)
        assert str(path) in mistake(fedstill.load, path)


def test_weights_alone_are_no_bundle(run):
    assert "fedstill export RUN" in mistake(fedstill.load, run / "last" / "weights.safetensors")


def test_a_bundle_keeps_no_seed_and_no_row(bundle):
    text = bundle.read_bytes().decode("latin-1")
    assert "471147114711" not in text, "whoever knows the seed can take noise away"
    assert fedstill.load(bundle).trained.contract.rows == {}


def test_the_card_says_what_a_receiver_asks(bundle):
    card = bundle.with_suffix(".md").read_text()
    assert card == fedstill.load(bundle).card
    for words in ("fedavg", "| parties | 3 |", "`mass` | a number", "`blue`, `green`, `red`", "- `ill`", "| licence |",
                  "intended use", "the test set | 80", "the trained model", "No differential privacy"):  # fmt: skip
        assert words in card


def test_the_card_states_the_privacy_that_a_run_claims(tmp_path):
    experiment = fedstill.Experiment(
        rounds=1,
        cohort=3,
        sampling="poisson",
        partition={"scheme": "iid", "clients": 6},
        model={"name": "mlp", "hidden": [4]},
        method={"name": "dp_fedavg"},
    )
    fedstill.run(experiment, run_dir=tmp_path, pictures=False)
    fedstill.export(tmp_path)
    claimed = json.loads((tmp_path / "privacy.json").read_text())["text"].splitlines()[0]
    assert f"- {claimed}" in (tmp_path / "bundle.md").read_text()


def test_a_network_of_ones_own_cannot_be_put_into_a_bundle(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def small(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    experiment = fedstill.Experiment(rounds=1, cohort=2, model={"name": f"{tmp_path}/mine.py:small"})
    fedstill.run(experiment, run_dir=tmp_path / "run", pictures=False)
    assert "mine.py:small' is a network of your own" in mistake(fedstill.export, tmp_path / "run")
    assert not list(tmp_path.glob("run/bundle*"))


def test_words_that_a_bundle_cannot_follow_are_refused(run, bundle, new, tmp_path):
    assert "name the data to label" in mistake(fedstill.predict, bundle)
    assert "this bundle holds the last model" in mistake(fedstill.predict, bundle, new, from_="best")
    assert "'last'" in mistake(fedstill.export, run, from_="lst")
    assert "'onnx'" in mistake(fedstill.export, run, kind="onx")
    assert "must end in .safetensors" in mistake(fedstill.export, run, out=tmp_path / "model.bin")


def of_table(new):
    """The rows of the table in storage form: numbers, then a number for each word."""
    frame = pandas.read_csv(new)
    hot = [frame.colour == word for word in WORDS]
    return torch.tensor(np.column_stack([frame.age, frame.dose, frame.mass, *hot]).astype(np.float32))


@pytest.mark.parametrize("network", ["mlp", "cnn", "resnet8", "bert"])
def test_an_onnx_file_answers_as_we_do(run, new, tmp_path, network):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    inputs = new
    if network == "mlp":
        x = of_table(new)
    else:
        run, data, model = tmp_path / "run", {"source": "digits"}, {"name": network}
        if network == "bert":
            pytest.importorskip("tokenizers")
            words = [f"{'the team won' if row % 2 else 'the bank paid'} {row},{'ab'[row % 2]}" for row in range(90)]
            (tmp_path / "texts.csv").write_text("\n".join(["text,topic", *words]))
            data = {"source": str(tmp_path / "texts.csv"), "inputs": ["text"], "label": "topic", "tokens": 12}
            model |= {"layers": 2, "hidden": 16, "heads": 2, "inner": 32}
        experiment = fedstill.Experiment(
            rounds=1,
            cohort=2,
            data={**data, "unlabeled": "test"},
            model=model,
            partition={"scheme": "iid", "clients": 2},
        )
        fedstill.run(experiment, run_dir=run, pictures=False)
        inputs, x = None, build_federation(experiment).test.x
    fedstill.export(run, out=tmp_path / "model.onnx", kind="onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    ours = fedstill.predict(run, inputs)
    theirs = session.run(None, {"x": x.numpy()})[0]
    wanted = ours.probabilities
    if inputs is None:  # the file has the temperature that predict must not use on the test set itself
        fitted = json.loads((run / "calibration.json").read_text())["last"][0]["temperature"] or 1.0
        wanted = torch.softmax(ours.probabilities.double().log() / fitted, 1)
    np.testing.assert_allclose(theirs, wanted, rtol=0, atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(ours.classes)
