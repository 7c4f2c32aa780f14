"""The runs of a comparison side by side, each in a process of its own."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.errors import FedstillError, in_one_line
from fedstill.core.types import Federation
from fedstill.data import Source
from fedstill.experiment.build import build_federation, load_source, split_settings
from fedstill.experiment.config import Experiment
from fedstill.experiment.ray_pool import pool_of
from fedstill.experiment.run import run
from fedstill.experiment.search import EndBelow, Floor
from fedstill.experiment.worker_pool import DIED, Hear
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.cautions import caution, each_once
from fedstill.loop.history import Row
from fedstill.storage.files import write_whole

_log = logging.getLogger("fedstill.run")


class Job(NamedTuple):
    """A run of a comparison that a worker process does."""

    entry: str  # the method, as the table names it
    experiment: Experiment
    folder: Path
    resume: bool
    floor: Floor = {}  # see EndBelow


class Event(NamedTuple):
    """A message of a worker about a job: `kind` is a method of Callback, "warning", "error", or "done" at its end."""

    number: int  # of the job in the list
    kind: str
    values: tuple[Any, ...] = ()


def run_side_by_side(
    jobs: Sequence[Job], asked: Experiment, *, callbacks: Callable[[str, int], Sequence[Callback]], warned: set[str]
) -> set[Path]:
    """Do the runs in several processes, each in its folder, and return their folders.

    asked: says in compare.jobs how many processes there are, and in engine.name whether they stand on a Ray cluster.

    callbacks: called with the method and the seed, returns callbacks; they hear of the start, the preparations and the
        rounds of their run in this process. They cannot stop it.
    warned: warnings that were given already; each further one is given once and added.
    A run that fails stops no other. When all have ended, the first failure is raised.
    """
    heard: dict[int, Sequence[Callback]] = {}
    errors: list[str] = []

    def hear(event: Event) -> None:
        job = jobs[event.number]
        if event.number not in heard:
            heard[event.number] = callbacks(job.entry, job.experiment.seed)
        if event.kind == "warning":
            with each_once(warned):
                caution(*event.values)
        elif event.kind == "error":
            errors.append(f"{job.entry}, seed {job.experiment.seed}: {event.values[0]}")
        elif event.kind != "done":
            for callback in heard[event.number]:
                getattr(callback, event.kind)(*event.values)

    silent = logging.NullHandler()  # with a handler of the log, `caution` itself prints a line
    _log.addHandler(silent)
    try:
        pool = pool_of(
            asked,
            asked.compare.jobs,
            Worker,
            lambda number: Event(number, "error", (DIED,)),
            folders=[job.folder for job in jobs],
            again=lambda job: job._replace(resume=True),
        )
        pool.do(jobs, hear)
    finally:
        _log.removeHandler(silent)
    if errors:
        others = f" ({len(errors) - 1} more failed)" if len(errors) > 1 else ""
        raise FedstillError(f"{errors[0]}{others}")
    return {job.folder for job in jobs}


class Worker:
    """Does the jobs of a comparison in its process; it reads the data once and splits them once a seed."""

    def __init__(self, at_once: int) -> None:
        self._source: Source | None = None
        self._splits: dict[str, Federation] = {}

    def do(self, number: int, job: Job, hear: Hear) -> Event:
        """Run the job, or go on with it, in its folder; the traceback of an unexpected error goes into a file."""
        try:
            if self._source is None:
                self._source = load_source(job.experiment)
            if (split := split_settings(job.experiment)) not in self._splits:
                self._splits = {split: build_federation(job.experiment, self._source)}
            with _warnings_to(number, hear):
                run(
                    job.experiment,
                    run_dir=job.folder,
                    callbacks=[EndBelow(job.floor), _Forward(number, hear)],
                    federation=self._splits[split],
                    resume=job.resume,
                    pictures=False,
                )
            return Event(number, "done")
        except FedstillError as error:
            return Event(number, "error", (in_one_line(error),))
        except Exception as error:
            job.folder.mkdir(parents=True, exist_ok=True)
            file = job.folder / "error.txt"
            write_whole(file, "".join(traceback.format_exception(error)))
            return Event(number, "error", (f"{in_one_line(error)} (see {file})",))


class _Forward(Callback):
    """Sends the events of a run to the process that started the worker."""

    def __init__(self, number: int, hear: Hear) -> None:
        self._number, self._hear = number, hear

    def on_start(self, info: RunInfo) -> None:
        self._hear(Event(self._number, "on_start", (info,)))

    def on_prepare(self, line: str, share: float) -> None:
        self._hear(Event(self._number, "on_prepare", (line, share)))

    def on_round(self, row: Row) -> None:
        self._hear(Event(self._number, "on_round", (row,)))


@contextmanager
def _warnings_to(number: int, hear: Hear) -> Iterator[None]:
    """Send warnings of the run's log to the process that started the worker, instead of stderr."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: hear(Event(number, "warning", (record.getMessage(),)))  # type: ignore[method-assign]
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
