"""Where a bench writes: looked at before the work begins, and held by one process at a time (see file_lock.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.file_lock import holder, released, take

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
        held = take(lock, wait=False)
    except BlockingIOError:
        who = holder(lock)
        raise FedstillError(f"--out: another bench works in '{out}', {who}: wait or use another --out") from None
    except OSError as error:
        raise FedstillError(f"--out: cannot write to '{out}' ({error.strerror}): name another folder") from None
    with released(lock, held):
        with holding(results):
            pass  # a place that cannot be written is told now rather than after the first run
        yield


@contextmanager
def holding(results: Path) -> Iterator[None]:
    """The results file is this process's own; whoever comes second waits."""
    lock = results.with_name(f".{results.name}.lock")
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        held = take(lock, wait=True)
    except OSError as error:
        raise FedstillError(f"--results: cannot write '{results}' ({error.strerror}): name another file") from None
    with released(lock, held):
        yield
