"""Files that are whole or absent whenever the process ends, and files that one process holds as its lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".writing-"  # how the name of an unfinished file begins
INSTANT = 0.05  # seconds


def default_cache_dir() -> Path:
    """Return the folder $FEDSTILL_CACHE, or ~/.cache/fedstill if the variable is not set."""
    return Path(os.environ.get("FEDSTILL_CACHE") or Path.home() / ".cache" / "fedstill")


def default_config_dir() -> Path:
    """Return the folder $FEDSTILL_CONFIG, or fedstill in $XDG_CONFIG_HOME or ~/.config."""
    own, shared = os.environ.get("FEDSTILL_CONFIG"), os.environ.get("XDG_CONFIG_HOME")
    return Path(own) if own else Path(shared or Path.home() / ".config") / "fedstill"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees its old content or all of the new one, never a part."""
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends, and is removed if the block fails.

    durable: wait until the disk has the file, so that it survives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable and os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the file `path` as a lock while the block runs.

    If another process holds it, wait for it, or without `wait` raise BlockingIOError. The system frees the lock when
    its process ends in any way, so no lock is left over. The file holds the number of the process, for messages. Where
    the system has no such locks (Windows, some network drives) nothing is held.
    """
    held = _take(path, wait=wait)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the lock is free, because afterwards the file may be another process's
        held.close()


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock; False where the system has no locks."""
    try:
        with path.open("rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(path: Path) -> str:
    """Name the process that holds a lock, for a message."""
    try:
        return f"pid {int(path.read_text(encoding='utf-8'))}"
    except (OSError, ValueError):
        return "in another process"


def _take(path: Path, *, wait: bool) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    last_try = False
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if last_try:
                        raise
                    last_try = True  # perhaps `is_held` had it, which takes a lock for an instant
                    time.sleep(INSTANT)
                    file.close()
                    continue
                except OSError:
                    pass  # a drive without locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.truncate(0)
                    print(os.getpid(), file=file, flush=True)
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # its holder removed the file before we had the lock: try the new file
