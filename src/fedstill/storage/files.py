"""A file that one process holds at a time, as its lock on something else.

The system frees it when its process ends, however it ends: there are no stale locks. It holds the process's number, for
messages. Where the system has no such locks (Windows, some network drives) nothing is held.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def take(path: Path, *, wait: bool) -> TextIO:
    """The open file that is the lock; BlockingIOError where another holds it and we do not wait."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock(file, wait=wait)
            if _is_at(file, path):
                file.truncate(0)
                print(os.getpid(), file=file, flush=True)
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the one before us has removed it meanwhile


@contextmanager
def released(path: Path, held: TextIO) -> Iterator[None]:
    """Free the lock at the end, and leave no file behind."""
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before it is free, so that nobody's file but ours is removed
        held.close()


def holder(path: Path) -> str:
    """Who holds it, for a message."""
    try:
        return f"pid {int(path.read_text(encoding='utf-8'))}"
    except (OSError, ValueError):
        return "in another process"


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: TextIO, *, wait: bool) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # a drive without locks
