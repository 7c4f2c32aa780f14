"""Where a bench writes: looked at before the work begins, and held by one process at a time.

A lock is a file that the system frees when its process ends, however it ends. It holds the process's number for the
message; where the system has no such locks (Windows, some network drives) nothing is held.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fedstill.core.errors import FedstillError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BENCH_LOCK = ".bench.lock"


def check_places(out: Path, results: Path) -> None:
    """Could the run folders and the results be written? Looks only."""
    if os.path.isdir(results):  # unlike Path's, no error where a folder may not be read
        raise FedstillError(f"--results: '{results}' is a folder: give a file")
    for option, folder in (("--out", out), ("--results", results.parent)):
        nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
        if not nearest.is_dir():
            raise FedstillError(f"{option}: '{nearest}' is a file, not a folder: name another place")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise FedstillError(f"{option}: '{nearest}' cannot be written to: name another place")


@contextmanager
def claimed(out: Path, results: Path) -> Iterator[None]:
    """Both places made, and `out` held while the runs are done."""
    check_places(out, results)
    lock = out / BENCH_LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = _lock(lock, wait=False)
    except BlockingIOError:
        who = _holder(lock)
        raise FedstillError(f"--out: another bench works in '{out}', {who}: wait or use another --out") from None
    except OSError as error:
        raise FedstillError(f"--out: cannot write to '{out}' ({error.strerror}): name another folder") from None
    with _released(lock, held):
        with holding(results):
            pass  # a place that cannot be written is told now rather than after the first run
        yield


@contextmanager
def holding(results: Path) -> Iterator[None]:
    """The results file is this process's own; whoever comes second waits."""
    lock = results.with_name(f".{results.name}.lock")
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        held = _lock(lock, wait=True)
    except OSError as error:
        raise FedstillError(f"--results: cannot write '{results}' ({error.strerror}): name another file") from None
    with _released(lock, held):
        yield


def _lock(path: Path, *, wait: bool) -> TextIO:
    """The open file that is the lock; BlockingIOError where another holds it and we do not wait."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _take(file, wait=wait)
            if _is_at(file, path):
                file.truncate(0)
                print(os.getpid(), file=file, flush=True)
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # the one before us has removed it meanwhile


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _take(file: TextIO, *, wait: bool) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # a drive without locks


@contextmanager
def _released(path: Path, held: TextIO) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before it is free, so that nobody's file but ours is removed
        held.close()


def _holder(path: Path) -> str:
    try:
        return f"pid {int(path.read_text(encoding='utf-8'))}"
    except (OSError, ValueError):
        return "in another process"
