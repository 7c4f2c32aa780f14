"""The secret of a run: its user alone can read it, the run's folder has its id, and without it nothing goes on."""

import os
import stat
from pathlib import Path

import pytest

from fedstill.core.errors import FedstillError
from fedstill.storage.secrets import ID_FILE, SECRET_BYTES, id_of, keep_secret, read_secret, secret_of

posix = pytest.mark.skipif(os.name != "posix", reason="modes of files")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, with the user's state folder beside it."""
    monkeypatch.setenv("FEDSTILL_STATE", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_kept_secret_is_found_again_and_the_folder_does_not_hold_it(run, tmp_path):
    secret = secret_of(run)
    assert len(secret) == SECRET_BYTES
    assert secret_of(run) != secret  # nobody has kept it yet
    keep_secret(secret, run)
    assert secret_of(run) == secret
    told = b"".join(file.read_bytes() for file in run.iterdir())
    assert secret not in told
    assert secret.hex().encode() not in told
    assert (tmp_path / "state" / "secrets" / id_of(secret)).read_bytes() == secret


def test_without_a_folder_each_secret_is_new():
    assert secret_of(None) != secret_of(None)


def test_a_folder_without_its_secret_is_refused_with_what_is_lost(run, tmp_path, monkeypatch):
    keep_secret(secret_of(run), run)
    monkeypatch.setenv("FEDSTILL_STATE", str(tmp_path / "elsewhere"))
    with pytest.raises(FedstillError, match=r"is not on this machine .* rounds would get other noise") as refused:
        secret_of(run)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "", "a/b", "\x00"])
def test_an_id_that_is_no_id_leads_nowhere(run, name):
    (run / ID_FILE).write_text(name)
    with pytest.raises(FedstillError, match=r"secret\.id is damaged"):
        secret_of(run)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(bytes(1000))])
def test_an_id_that_is_no_small_file_is_damaged(tmp_path, make):
    make(tmp_path / "secret.id")
    with pytest.raises(FedstillError, match=r"its secret\.id is damaged"):
        secret_of(tmp_path)


def test_another_runs_secret_under_this_ones_name_is_refused(run, tmp_path):
    secret = secret_of(run)
    keep_secret(secret, run)
    (tmp_path / "state" / "secrets" / id_of(secret)).write_bytes(os.urandom(SECRET_BYTES))
    with pytest.raises(FedstillError, match="is not the secret of"):
        secret_of(run)


def test_a_state_folder_that_cannot_be_written_is_one_line(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_STATE", str(tmp_path / "file"))
    with pytest.raises(FedstillError, match="set FEDSTILL_STATE to a folder of yours"):
        keep_secret(secret_of(run), run)


def test_a_folder_keeps_the_secret_of_the_run_that_began_there(run):
    keep_secret(secret_of(run), run)
    with pytest.raises(FedstillError, match="another process has begun a run"):
        keep_secret(os.urandom(SECRET_BYTES), run)


@posix
def test_the_secret_is_its_users_alone_and_stays(tmp_path):
    path = tmp_path / "secret"
    secret = read_secret(path)
    assert len(secret) == SECRET_BYTES
    assert len(set(secret)) > 8
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(path) == secret != read_secret(tmp_path / "other")
    assert {entry.name for entry in tmp_path.iterdir()} == {"secret", "other"}


@posix
def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    read_secret(path)
    path.chmod(0o640)
    with pytest.raises(FedstillError, match="chmod 600"):
        read_secret(path)


def test_half_a_secret_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b"short")
    with pytest.raises(FedstillError, match="holds 5 bytes, and a secret has 32"):
        read_secret(path)
