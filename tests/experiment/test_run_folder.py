"""The folder of a run: never read as data, whole for one process at a time, and refused where it was damaged."""

import os
import shutil
import subprocess
import threading
from itertools import islice
from pathlib import Path

import file_damage
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.core.errors import FedstillError
from fedstill.data.files import files_of
from fedstill.experiment.run_folder import git_commit

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
def test_a_run_below_the_images_it_learns_from_is_not_read_by_the_next_one(tmp_path, monkeypatch, command, pictures):
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    file_damage.make_run(folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run, which a test may damage."""
    return shutil.copytree(finished, tmp_path / "run")


def wrong(attempts):
    return {name: came for name, came in attempts if came != file_damage.REFUSED}


def test_a_flipped_bit_is_refused_in_model_checkpoint_contract_and_upload(run):
    assert wrong(file_damage.flips(run, 1, 60)) == {}


def test_content_that_no_run_writes_is_one_line_although_its_digest_is_right(run):
    attempts = dict(file_damage.contents(run))
    assert len(attempts) > 40
    assert wrong(attempts.items()) == {}


def test_no_link_leads_out_of_a_folder_that_a_run_goes_on_in(run, tmp_path):
    assert wrong(islice(file_damage.links(run, tmp_path / "outside"), 0, None, 12)) == {}


@pytest.mark.parametrize("read", [fedstill.predict, fedstill.export, fedstill.load_run])
def test_no_file_outside_of_a_run_is_read_for_it(run, tmp_path, read):
    (run / "config.toml").rename(tmp_path / "config.toml")
    (run / "config.toml").symlink_to(tmp_path / "config.toml")
    with pytest.raises(FedstillError, match="is a link to a place outside"):
        read(run)


def test_a_link_inside_of_a_folder_is_fine(run):
    (run / "newest").symlink_to("last")
    fedstill.resume_run(run)


def test_a_full_disk_is_one_line_and_the_run_goes_on_where_there_is_room(run):
    assert wrong(file_damage.full_disks(run, 1, 2)) == {}


def test_the_second_of_two_starts_is_refused_in_one_line(finished, tmp_path):
    """Two threads stand for two processes, which the slow test below starts."""
    inside, over, lines = threading.Event(), threading.Event(), []

    class Slow(fedstill.Callback):
        def on_round(self, row):
            inside.set()
            assert over.wait(60)

    def second():
        assert inside.wait(60)
        for how in ({}, {"resume": True}):
            try:
                fedstill.run(file_damage.experiment(), run_dir=tmp_path / "run", pictures=False, **how)
            except FedstillError as error:
                lines.append(str(error))
        over.set()

    other = threading.Thread(target=second)
    other.start()
    fedstill.run(file_damage.experiment(), run_dir=tmp_path / "run", pictures=False, callbacks=[Slow()])
    other.join()
    assert len(lines) == 2
    assert all(f"is at work already (pid {os.getpid()})" in line and "\n" not in line for line in lines)
    assert file_damage.rounds_of(tmp_path / "run") == file_damage.rounds_of(finished)


def test_a_start_that_is_refused_leaves_no_folder(tmp_path):
    experiment = file_damage.experiment(privacy={"epsilon": 0.0001, "delta": 1e-5})
    with pytest.raises(FedstillError):
        fedstill.run(experiment, run_dir=tmp_path / "a" / "b", pictures=False)
    assert list(tmp_path.iterdir()) == []


def test_parts_of_a_checkpoint_are_not_inflated(run):
    path = run / "checkpoints" / "round-000004.zip"
    file_damage.deflated(path, 1 << 26)
    assert path.stat().st_size < 1 << 20
    fedstill.resume_run(run)
    assert [line for line in (run / "log.txt").read_text().splitlines() if "do not lie as they were written" in line]
    assert file_damage.rounds_of(run) == [1, 2, 3, 4]


def test_labels_in_another_order_are_refused_when_a_run_goes_on(tmp_path):
    draw_rows = np.random.default_rng(0)
    x, y = draw_rows.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    experiment = file_damage.experiment()
    fedstill.run(experiment, data=(x, y), run_dir=tmp_path / "run", pictures=False)
    with pytest.raises(FedstillError, match=r"labels of the same \d+ inputs differ"):
        fedstill.run(experiment, data=(x, y[::-1].copy()), run_dir=tmp_path / "run", pictures=False, resume=True)


@pytest.mark.parametrize(("key", "value"), [("filter.theirs.clean", "cat"), ("core.fsmonitor", "false")])
def test_a_repository_of_somebody_else_starts_no_program(tmp_path, monkeypatch, key, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".gitattributes").write_text("* filter=theirs\n")
    who = ("-c", "user.email=them", "-c", "user.name=them")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "theirs")):
        subprocess.run(["git", *words], check=True)
    (tmp_path / ".gitattributes").write_text("* filter=other\n")
    commit = git_commit()
    assert commit is not None
    assert commit.endswith("+")
    subprocess.run(["git", "config", key, f"touch started; {value}"], check=True)
    assert git_commit() in (commit, commit[:-1])
    assert not (tmp_path / "started").exists()


def test_neither_a_submodule_nor_a_missing_object_starts_a_program(tmp_path, monkeypatch):
    def git(*words, where=tmp_path / "theirs"):
        subprocess.run(["git", "-c", "user.email=them", "-c", "user.name=them", *words], cwd=where, check=True)

    for folder in (tmp_path / "theirs", tmp_path / "theirs" / "inner"):
        folder.mkdir()
        git("init", "-q", where=folder)
        (folder / "file").write_text("one\n")
        git("add", "file", where=folder)
        git("commit", "-qm", "theirs", where=folder)
    git("-c", "advice.addEmbeddedRepo=false", "add", "inner")
    git("commit", "-qm", "with inner")
    inner = tmp_path / "theirs" / "inner"
    git("config", "filter.theirs.clean", f"touch {tmp_path}/started; cat", where=inner)
    (inner / ".git" / "info" / "attributes").write_text("* filter=theirs\n")
    (inner / "file").write_text("two\n")
    os.utime(inner / "file", (1, 1))
    monkeypatch.chdir(tmp_path / "theirs")
    assert git_commit()
    assert not (tmp_path / "started").exists()
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], capture_output=True, text=True, check=True).stdout
    (Path(".git/objects") / tree[:2] / tree[2:].strip()).unlink()
    for key, value in {"promisor": "true", "url": str(inner), "uploadpack": f"touch {tmp_path}/started;"}.items():
        git("config", f"remote.origin.{key}", value)
    git("config", "core.repositoryformatversion", "1")
    git("config", "extensions.partialClone", "origin")
    assert git_commit()
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_three_hundred_flipped_bits_are_refused(run):
    assert wrong(file_damage.flips(run, 0, 300)) == {}


@pytest.mark.slow
def test_no_link_pipe_or_socket_in_any_place_is_followed(run, tmp_path):
    assert wrong(file_damage.links(run, tmp_path / "outside")) == {}


@pytest.mark.slow
def test_a_disk_that_is_full_at_thirty_places_loses_nothing(run):
    assert wrong(file_damage.full_disks(run, 0, 30)) == {}


@pytest.mark.slow
def test_twenty_double_starts_leave_whole_runs(run):
    assert wrong(file_damage.double_starts(run, 0, 20)) == {}
