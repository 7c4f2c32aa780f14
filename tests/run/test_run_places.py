"""A run's folder is no part of the data: what one run leaves behind is never read by the next."""

import logging
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.core.errors import FedstillError
from fedstill.data.files import files_of
from fedstill.experiment.run_folder import check_run_folder

WORDS = ["--set", "data.size=8", "--set", "data.unlabeled=none", "--set", "model.name=mlp", "--set", "rounds=1"]
WORDS += ["--set", "method.name=fedavg", "--set", "partition.clients=2", "--set", "cohort=2"]


@pytest.fixture(autouse=True)
def no_log_left():
    yield
    logging.getLogger("fedstill.run").handlers.clear()


def draw(folder):
    """Twelve pictures in two folders named as their classes."""
    for row in range(12):
        path = folder / ("dark", "light")[row % 2] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 200 * (row % 2) + row, np.uint8)).save(path)
    return folder


def write_tables(folder, suffix):
    folder.mkdir(parents=True, exist_ok=True)
    if suffix == "csv":
        (folder / "train.csv").write_text("x,label\n1,a\n2,b\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2], "label": ["a", "b"]}), folder / "train.parquet")


def leave_run(folder):
    """What `run` and `predict` leave that a loader might read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("curves.png", "predictions.csv", "predictions.parquet", "log.txt"):
        (folder / name).write_bytes(b"")


def experiment(**data):
    return fedstill.Experiment(
        rounds=1,
        cohort=2,
        data={key: str(value) for key, value in data.items()},
        partition={"scheme": "iid", "clients": 2},
        model={"name": "mlp", "hidden": [4]},
    )


def everything(folder):
    return sorted(os.walk(folder))


@pytest.mark.parametrize("command", [["run"], ["compare", "--methods", "fedavg", "--seeds", "1"]])
@pytest.mark.parametrize(
    ("source", "out"),
    [(".", []), (".", ["--out", "one"]), ("flat", ["--out", "flat/run1"]), ("flat", ["--out", "flat"])],
)
def test_a_command_refuses_to_write_a_run_among_the_images_it_learns_from(tmp_path, monkeypatch, command, source, out):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / source)
    before = everything(tmp_path)
    outcome = CliRunner().invoke(app, [*command, "--set", f"data.source={source}", *WORDS, *out])
    assert outcome.exit_code == 2, outcome.output
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"fedstill: --out: '{out[1] if out else 'runs/'}")
    assert line.endswith(f"lies in data.source '{source}': give a folder outside of the data")
    assert everything(tmp_path) == before


def test_a_run_beside_the_images_works_and_the_next_one_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(draw(tmp_path / "flat"))
    for name in ("first", "flat again"):
        outcome = CliRunner().invoke(app, ["run", "--set", "data.source=.", *WORDS, "--out", f"../{name}"])
        assert outcome.exit_code == 0, outcome.output
    assert fedstill.load(tmp_path / "flat").train.classes == ("dark", "light")


def test_python_refuses_too_before_anything_is_written(tmp_path):
    images, other = draw(tmp_path / "images"), draw(tmp_path / "other")
    before = everything(tmp_path)
    for key in ("unlabeled", "test", "source"):
        one = experiment(**{"source": images, key: other})
        for start in (fedstill.run, fedstill.compare):
            with pytest.raises(FedstillError, match=rf"^run_dir: '.*' lies in data.{key} '.*': give a folder outside"):
                start(one, run_dir=other / "deep" / "run")
    assert everything(tmp_path) == before


def test_a_run_that_was_begun_among_its_data_can_still_be_ended(tmp_path, monkeypatch):
    images = draw(tmp_path / "images")
    with monkeypatch.context() as earlier:
        earlier.setattr("fedstill.experiment.run.check_run_folder", lambda *_, **__: None)
        fedstill.run(experiment(source=images), run_dir=images / "run", pictures=False)
    assert fedstill.resume_run(images / "run").history.last["round"] == 1


@pytest.mark.parametrize("kind", ["images", "csv", "parquet", "csv below", "parquet below"])
@pytest.mark.parametrize("place", [".", "one", "data", "runs/name/one", ".hidden/one", "../beside"])
def test_a_folder_is_refused_just_where_a_run_in_it_would_change_what_is_read(tmp_path, kind, place):
    source = tmp_path / "source"
    if kind == "images":
        draw(source)
    else:
        suffix, _, below = kind.partition(" ")
        write_tables(source / "data" if below else source, suffix)
    folder, before = source / place, files_of(source)
    try:
        check_run_folder(experiment(source=source), folder, asked="run_dir")
        refused = False
    except FedstillError:
        refused = True
    leave_run(folder)
    try:
        changed = files_of(source) != before
    except FedstillError:  # several datasets
        changed = True
    assert refused == changed


def test_links_and_names_of_embedded_sets_are_seen_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = draw(tmp_path / "digits")
    (tmp_path / "link").symlink_to(images)
    with pytest.raises(FedstillError, match=r"lies in data\.source '\./digits'"):
        check_run_folder(experiment(source="./digits"), tmp_path / "link" / "run", asked="run_dir")
    check_run_folder(experiment(source="digits"), images / "run", asked="run_dir")
    (tmp_path / "table.csv").write_text("x,label\n1,a\n2,b\n")
    check_run_folder(experiment(source="table.csv"), tmp_path / "run", asked="run_dir")
