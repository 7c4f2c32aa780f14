"""Secrets: 32 bytes of the system's entropy that only their user can read.

    $FEDSTILL_STATE/secrets/<id>    the secret of a run, in a folder of the user's, never in the run's own
    RUN_FOLDER/secret.id            its id, a one-way digest, by which a resumed run finds it

So whoever reads a run's folder, published or not, does not have what its noise was drawn from.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.storage.files import TEMPORARY, read_bytes, write_whole

ID_FILE = "secret.id"
SECRET_BYTES = 32


def default_state_dir() -> Path:
    """Return the folder $FEDSTILL_STATE, or ~/.local/state/fedstill if the variable is not set."""
    return Path(os.environ.get("FEDSTILL_STATE") or Path.home() / ".local" / "state" / "fedstill")


def new_secret() -> bytes:
    return os.urandom(SECRET_BYTES)


def secret_of(folder: Path | None) -> bytes:
    """Return the secret of the run in a folder; a new one, which nothing holds yet, where there is no run."""
    if folder is None or not (folder / ID_FILE).exists():
        return new_secret()
    try:
        name = read_bytes(folder / ID_FILE, most=64).decode("utf-8", "replace").strip()
    except OSError:
        name = ""
    place = _place(name) if name.isalnum() and name.isascii() else None
    if place is None or not place.is_file():
        raise FedstillError(
            f"the secret that the noise of '{folder}' was drawn from is not on this machine "
            f"({place or 'its secret.id is damaged'}): without it rounds would get other noise, and two different "
            "noises about one model give it away: copy the secret here, or start a new run"
        )
    secret = read_secret(place)
    if name != id_of(secret):
        raise FedstillError(f"'{place}' is not the secret of '{folder}': restore both from a copy, or start a new run")
    return secret


def keep_secret(secret: bytes, folder: Path) -> None:
    """Write the secret where its user alone can read it, and its id into the run's folder."""
    place = _place(id_of(secret))
    try:
        if not place.exists():
            _write(place, secret)
        if not (folder / ID_FILE).exists():
            write_whole(folder / ID_FILE, id_of(secret) + "\n")
        held = (folder / ID_FILE).read_bytes()[:64].decode("utf-8", "replace").strip()
    except OSError as error:
        raise FedstillError(
            f"cannot keep the secret of the run in '{place.parent}' ({error.strerror or error}): set FEDSTILL_STATE to "
            "a folder of yours"
        ) from error
    if held != id_of(secret):
        raise FedstillError(f"another process has begun a run in '{folder}' with its own secret: use a new folder")


def id_of(secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=16, person=b"secret's id").hexdigest()


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, which only its user can read; make one of the system's entropy if there is none."""
    if not path.exists():
        _write(path, new_secret())
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise FedstillError(f"{path} can be read by other users: chmod 600 {path}")
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise FedstillError(
            f"{path} holds {len(secret)} bytes, and a secret has {SECRET_BYTES}: restore it from a copy"
        )
    return secret


def _place(name: str) -> Path:
    return default_state_dir() / "secrets" / name


def _write(path: Path, secret: bytes) -> None:
    """Write a secret, whole or not at all; where another process has written one meanwhile, that one stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
