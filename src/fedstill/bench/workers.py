"""Do the runs of a bench, in this process one after another, or in several worker processes."""

from __future__ import annotations

import gc
import json
import shutil
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedstill.bench.code_path import CodeWatch, digests
from fedstill.bench.plan import MADE, Job, begun_as, circumstances, make_run
from fedstill.bench.results import Run
from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.data import Source
from fedstill.experiment.build import build_federation, load_source, split_settings
from fedstill.experiment.config import Experiment
from fedstill.experiment.ray_pool import pool_of
from fedstill.experiment.run import run
from fedstill.experiment.worker_pool import DIED, QUIET
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Row
from fedstill.storage.files import write_whole

SPLITS_KEPT = 8


@dataclass(frozen=True)
class Message:
    """A message about one job: its progress or, as the last message, its run or why it failed."""

    number: int  # of the job in the list
    round: int | None = None  # rounds that are done
    doing: str = ""  # before the first round: "simclr: epoch 3/100"
    run: Run | None = None
    error: str | None = None


Hear = Callable[[Message], None]


def do_jobs(jobs: Sequence[Job], hear: Hear, *, at_once: int, cluster: Experiment | None = None) -> None:
    """Do all jobs; `hear` gets every message in this process. A job that fails stops no other.

    cluster: an experiment whose engine.name is "ray" and whose [cluster] says where the runs stand.
    """
    if at_once > 1 or cluster is not None:
        pool = pool_of(
            cluster or jobs[0].experiment,
            at_once,
            Worker,
            lambda number: Message(number, error=DIED),
            folders=[job.folder for job in jobs],
            again=lambda job: job,  # every job goes on with what its folder holds
        )
        pool.do(jobs, hear)
        return
    worker = Worker()
    for number, job in enumerate(jobs):
        hear(worker.do(number, job, hear))


class Worker:
    """Does jobs in this process; it keeps sources and splits, because the next job mostly has the same."""

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once
        self._sources: dict[str, Source | FedstillError] = {}
        self._splits: OrderedDict[str, Federation] = OrderedDict()
        self._data_code: set[str] = set()  # modules that made the sources and splits, which later jobs share

    def do(self, number: int, job: Job, hear: Hear) -> Message:
        """Run the job in its folder, or go on with it there; return the last message, also of a failure."""
        try:
            return Message(number, run=self._perform(job, Ticker(number, hear)))
        except Exception as error:
            return Message(number, error=_reason(error, job.folder))
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                gc.collect()  # graphs and models of a run hang in cycles, and other workers need their memory
                torch.cuda.empty_cache()

    def _perform(self, job: Job, ticker: Ticker) -> Run:
        experiment = begun_as(job)
        with CodeWatch(experiment.rounds) as loading:
            federation = self._federation(job.experiment)
        if experiment is not job.experiment:  # the data may stand in another place now; the contract compares the rows
            federation = replace(federation, built_from=split_settings(experiment))
        self._data_code |= loading.entered
        made = circumstances(job.experiment.engine.device, self.at_once)
        job.folder.mkdir(parents=True, exist_ok=True)
        write_whole(job.folder / MADE, json.dumps(made) + "\n")
        with CodeWatch(experiment.rounds) as watch:
            result = run(
                experiment,
                run_dir=job.folder,
                callbacks=[ticker, watch],
                federation=federation,
                resume=True,
                pictures=False,
            )
        made["code"] = digests(self._data_code | watch.entered)
        write_whole(job.folder / MADE, json.dumps(made) + "\n")
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)  # they can be as large as all clients together
        return make_run(job, result.history.rows, result.seconds, made)

    def _federation(self, experiment: Experiment) -> Federation:
        wanted = experiment.model_dump(mode="json", include={"data", "partition", "seed"})
        name = json.dumps(wanted, sort_keys=True)
        if name not in self._splits:
            self._splits[name] = build_federation(experiment, self._source(experiment))
            if len(self._splits) > SPLITS_KEPT:
                self._splits.popitem(last=False)
        self._splits.move_to_end(name)
        return self._splits[name]

    def _source(self, experiment: Experiment) -> Source:
        """Return the source; one that cannot be loaded is not tried again, because a hub takes long to refuse."""
        keys = experiment.partition.options.get("keys")
        name = json.dumps([experiment.data.model_dump(mode="json"), keys], sort_keys=True)
        if name not in self._sources:
            try:
                self._sources[name] = load_source(experiment)
            except FedstillError as error:
                cure = "" if Path(experiment.data.source).exists() else "; --data DIR takes it from a folder of yours"
                self._sources[name] = FedstillError(f"{error}{cure}")
        source = self._sources[name]
        if isinstance(source, FedstillError):
            raise source
        return source


def _reason(error: Exception, folder: Path) -> str:
    """Return why a job failed; the traceback of an error that is no user's mistake goes into a file."""
    if isinstance(error, FedstillError):
        return str(error)
    line, file = f"{type(error).__name__}: {' '.join(str(error).split())}", folder / "error.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return line  # there is no room for more
    return f"{line} (see {file})"


class Ticker(Callback):
    """Sends messages about finished rounds and about preparations before the first, not too often."""

    def __init__(self, number: int, hear: Hear) -> None:
        self._number, self._hear, self._last = number, hear, 0.0

    def on_start(self, info: RunInfo) -> None:
        self._hear(Message(self._number, round=len(info.past)))

    def on_prepare(self, line: str, share: float) -> None:
        self._now_and_then(Message(self._number, doing=line))

    def on_round(self, row: Row) -> None:
        self._now_and_then(Message(self._number, round=int(row["round"])))

    def _now_and_then(self, message: Message) -> None:
        now = time.perf_counter()
        if now - self._last > QUIET:
            self._last = now
            self._hear(message)
