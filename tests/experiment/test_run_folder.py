"""The folder of a run: it is never read as data, and one of an older version is refused."""

import os

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.core.errors import FedstillError
from fedstill.data.files import files_of

WORDS = ["--set", "data.size=8", "--set", "data.unlabeled=none", "--set", "model.name=mlp", "--set", "rounds=1"]
WORDS += ["--set", "method.name=fedavg", "--set", "partition.clients=2", "--set", "cohort=2"]


def draw(folder):
    """Twelve pictures in two folders named as their classes."""
    for row in range(12):
        path = folder / ("dark", "light")[row % 2] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 200 * (row % 2) + row, np.uint8)).save(path)
    return folder


def experiment(**data):
    return fedstill.Experiment(
        rounds=1,
        cohort=2,
        data={key: str(value) for key, value in data.items()},
        partition={"scheme": "iid", "clients": 2},
        model={"name": "mlp", "hidden": [4]},
    )


@pytest.mark.parametrize("command", [["run"], ["compare", "--methods", "fedavg", "--seeds", "1"]])
def test_a_run_below_the_images_it_learns_from_is_not_read_by_the_next_one(tmp_path, monkeypatch, command):
    monkeypatch.chdir(draw(tmp_path))
    for out in (["--out", "one"], []):
        outcome = CliRunner().invoke(app, [*command, "--set", "data.source=.", *WORDS, *out])
        assert outcome.exit_code == 0, outcome.output
    assert list(tmp_path.rglob("*/curves.png"))
    assert len(files_of(tmp_path)) == 12


@pytest.mark.parametrize("key", ["source", "unlabeled", "test"])
def test_the_folder_of_the_data_itself_is_refused_before_anything_is_written(tmp_path, key):
    images, other = draw(tmp_path / "images"), draw(tmp_path / "other")
    (tmp_path / "link").symlink_to(other)
    before = sorted(os.walk(tmp_path))
    for start in (fedstill.run, fedstill.compare):
        with pytest.raises(FedstillError, match=r"^run_dir: '.*link' holds the data: give another folder"):
            start(experiment(**{"source": images, key: other}), run_dir=tmp_path / "link")
    assert sorted(os.walk(tmp_path)) == before


def test_a_run_of_an_older_version_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.toml").write_text("rounds = 3\n\n[algorithm]\nname = 'fedavg'\n")
    for use in (fedstill.resume_run, fedstill.predict):
        with pytest.raises(FedstillError, match=r"^'.*' was written by an older fedstill \(section \[algorithm\]\)"):
            use(tmp_path)
