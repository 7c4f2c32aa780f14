"""Who does the runs: this process one after another, or several worker processes that each take the next one."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fedstill.bench.plan import MADE, Job, begun_as, circumstances, make_run, threads_for, tidy
from fedstill.bench.results import Run
from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.data import Source
from fedstill.experiment.build import build_federation, load_source
from fedstill.experiment.config import Experiment
from fedstill.experiment.run import run
from fedstill.experiment.run_folder import write_whole
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Result, Row

Message = dict[str, Any]  # plain values only
Send = Callable[[Message], None]

PROBE_ROUNDS = 3
PROBE_SECONDS = 20.0  # no third round after this many
QUIET = 0.5  # seconds between two messages about rounds
SPLITS_KEPT = 8


class Probe(NamedTuple):
    """Seconds of the first round, with all that the engine prepares in it, and of a later one.

    What the method prepares before it is left out: pre-training is done once for many runs, by the first that needs it.
    That is the probe itself or, where it has another method or every run has one round, a run.
    """

    first: float
    later: float


class NoData(FedstillError):
    """The data of a run cannot be had."""


class Unheard(BaseException):
    """A message that could not be delivered; no Exception, so that nobody takes it for the run's own."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class Worker:
    """Runs in this process; sources and splits are kept, for the next run mostly has the same."""

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once
        self._sources: dict[str, Source | NoData] = {}
        self._splits: OrderedDict[str, Federation] = OrderedDict()

    def federation(self, experiment: Experiment) -> Federation:
        wanted = experiment.model_dump(mode="json", include={"data", "partition", "seed"})
        name = json.dumps(wanted, sort_keys=True)
        if name not in self._splits:
            self._splits[name] = build_federation(experiment, self._source(experiment))
            if len(self._splits) > SPLITS_KEPT:
                self._splits.popitem(last=False)
        self._splits.move_to_end(name)
        return self._splits[name]

    def _source(self, experiment: Experiment) -> Source:
        """A source that cannot be had is not asked for again: a hub takes its time to say no."""
        keys = experiment.partition.options.get("keys")
        name = json.dumps([experiment.data.model_dump(mode="json"), keys], sort_keys=True)
        if name not in self._sources:
            try:
                self._sources[name] = load_source(experiment)
            except FedstillError as error:
                self._sources[name] = NoData(str(error))
        source = self._sources[name]
        if isinstance(source, NoData):
            raise source
        return source

    def handle(self, task: Message, send: Send) -> None:
        """Do what a message asks for and send what comes of it; a failure is an answer too.

        Trouble of whoever listens (a full disk, a closed pipe) is not the run's: it goes up as it is.
        """
        number = task["number"]
        try:
            outcome: Message = {"kind": "done", "answer": self._answer(task, send)}
        except Unheard as unheard:
            raise unheard.cause from None
        except Exception as error:
            told = _told(error, Path(task["order"]["folder"]))
            outcome = {"kind": "failed", "error": told, "no_data": isinstance(error, NoData)}
        finally:
            _release()
        send({**outcome, "number": number})

    def _answer(self, task: Message, send: Send) -> Any:
        def tell(message: Message) -> None:
            try:
                send({**message, "number": task["number"]})
            except Exception as error:
                raise Unheard(error) from error

        order = Job.from_json(task["order"])
        return self.probe(order.experiment, tell) if task["kind"] == "probe" else self.perform(order, tell)

    def perform(self, order: Job, tell: Send) -> Run:
        """Run the order in its folder, or go on with it there."""
        experiment = begun_as(order)
        federation = self.federation(order.experiment)
        made = circumstances(order.experiment.engine.device, self.at_once)
        order.folder.mkdir(parents=True, exist_ok=True)
        write_whole(order.folder / MADE, json.dumps(made) + "\n")
        result = run(
            experiment,
            run_dir=order.folder,
            callbacks=[Ticker(tell)],
            federation=federation,
            resume=True,
            pictures=False,
        )
        tidy(order.folder)
        return make_run(order, result.history.rows, result.seconds, made)

    def probe(self, experiment: Experiment, tell: Send) -> Probe | None:
        """A few rounds that leave nothing behind but a pre-trained extractor, to see how long they take.

        None, after no more than a look at the data, where a round is the whole run.
        """
        federation = self.federation(experiment)
        if experiment.rounds == 1:
            return None
        clock = Clock(tell)
        short = experiment.replace(rounds=min(PROBE_ROUNDS, experiment.rounds), track=())
        run(short, callbacks=[clock], federation=federation)
        later = clock.seconds[1:]
        return Probe(clock.seconds[0], sum(later) / len(later) if later else clock.seconds[0])


def _release() -> None:
    """Captured graphs and stacked models of a run hang in cycles; on a shared GPU their memory is others' room."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


def _told(error: Exception, folder: Path) -> str:
    if isinstance(error, FedstillError):
        return str(error)
    told, file = f"{type(error).__name__}: {' '.join(str(error).split())}", folder / "error.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return told  # there is no room for more
    return f"{told} (see {file})"


class Ticker(Callback):
    """Tells how many rounds are done, or what a method prepares before the first, not too often."""

    def __init__(self, tell: Send) -> None:
        self._tell, self._told = tell, 0.0

    def on_start(self, info: RunInfo) -> bool | None:
        self._tell({"kind": "round", "round": len(info.past)})
        return None

    def on_prepare(self, what: str, share: float) -> None:
        self._now_and_then({"kind": "prepare", "what": what})

    def on_round(self, row: Row) -> bool | None:
        self._now_and_then({"kind": "round", "round": int(row["round"])})
        return None

    def on_end(self, result: Result) -> None:
        return None

    def _now_and_then(self, message: Message) -> None:
        now = time.perf_counter()
        if now - self._told > QUIET:
            self._told = now
            self._tell(message)


class Clock(Ticker):
    """Seconds a round; stops a probe that takes long, after its second round: the first one compiles and captures."""

    def __init__(self, tell: Send) -> None:
        super().__init__(tell)
        self.seconds: list[float] = []
        self._began = 0.0

    def on_start(self, info: RunInfo) -> bool | None:
        self._began = time.perf_counter()
        return None

    def on_round(self, row: Row) -> bool | None:
        now = time.perf_counter()
        self.seconds.append(now - self._began - row.get("seconds_prepared", 0.0))
        self._began = now
        return len(self.seconds) > 1 and sum(self.seconds) > PROBE_SECONDS


def serve(pipe: Connection, at_once: int, threads: int) -> None:
    """A worker process: tasks come as JSON, answers go as JSON, until the other end closes."""
    torch.set_num_threads(threads)
    workshop = Worker(at_once)

    def send(message: Message) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    try:
        while True:
            workshop.handle(json.loads(pipe.recv_bytes()), send)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the other end is closed


Hear = Callable[[Message], None]
PATIENCE = 5.0  # seconds that a worker gets to end


class WorkerPool(Protocol):
    """Whoever does the tasks; `hear` gets every message as it comes."""

    def do(self, kind: str, orders: Sequence[Job], hear: Hear) -> None: ...


@contextmanager
def crew(jobs: int) -> Iterator[WorkerPool]:
    """One for the whole command, so that data are loaded and kernels are built once a worker."""
    if jobs == 1:
        yield InProcess()
        return
    pool = Pool(jobs)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A child inherits what is ignored: Ctrl-C reaches the whole group, and the parent decides."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tasks(kind: str, orders: Sequence[Job]) -> list[Message]:
    return [{"kind": kind, "number": number, "order": order.as_json()} for number, order in enumerate(orders)]


class InProcess:
    """All in this process."""

    def __init__(self) -> None:
        self._workshop = Worker()

    def do(self, kind: str, orders: Sequence[Job], hear: Hear) -> None:
        for task in _tasks(kind, orders):
            self._workshop.handle(task, hear)


@dataclass
class WorkerProcess:
    process: BaseProcess
    pipe: Connection
    task: Message | None = None  # what it is doing


class Pool:
    """Worker processes, started when there is something to do; one that dies is replaced, its run counts as failed."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.workers: list[WorkerProcess] = []
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def do(self, kind: str, orders: Sequence[Job], hear: Hear) -> None:
        waiting = _tasks(kind, orders)[::-1]
        while waiting or any(worker.task for worker in self.workers):
            self._hand_out(waiting)
            busy = {worker.pipe: worker for worker in self.workers if worker.task}
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                self._listen(busy[pipe], hear)

    def _hand_out(self, waiting: list[Message]) -> None:
        while waiting and (worker := self._idle()) is not None:
            worker.task = waiting.pop()
            try:
                worker.pipe.send_bytes(json.dumps(worker.task).encode())
            except (BrokenPipeError, ConnectionResetError):  # it died while it had nothing to do
                waiting.append(worker.task)
                self.workers.remove(worker)

    def _idle(self) -> WorkerProcess | None:
        found = next((worker for worker in self.workers if worker.task is None), None)
        if found is None and len(self.workers) < self.jobs:
            found = self._start()
            self.workers.append(found)
        return found

    def _start(self) -> WorkerProcess:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self.jobs, threads_for(self.jobs)), daemon=True)
        with _deaf_to_interrupts():
            process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return WorkerProcess(process, ours)

    def _listen(self, worker: WorkerProcess, hear: Hear) -> None:
        assert worker.task is not None
        try:
            message = json.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(PATIENCE)
            self.workers.remove(worker)
            error = f"its process ended with code {worker.process.exitcode}: less --jobs if memory was short"
            message = {"kind": "failed", "number": worker.task["number"], "error": error}
        if message["kind"] in ("done", "failed"):
            worker.task = None
        hear(message)

    def close(self) -> None:
        """Busy workers are stopped, for what they do can be resumed; idle ones see the end of the pipe."""
        for worker in self.workers:
            worker.pipe.close()
            if worker.task is not None:
                worker.process.terminate()
        for worker in self.workers:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.workers.clear()


CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
SERVICE_PATIENCE = 10.0  # seconds


@contextmanager
def shared_gpu(jobs: int, device: str) -> Iterator[bool]:
    """Run a private service while workers live, and say whether it runs; one that the user started is left alone."""
    if jobs < 2 or not device.startswith("cuda") or PLACES[0] in os.environ or shutil.which(CONTROL) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="fedstill-mps-") as folder:
        os.environ.update(dict.fromkeys(PLACES, folder))
        try:
            yield _control(["-d"])
        finally:
            _control([], "quit\n")  # also when the start was interrupted or said nothing: it may run all the same
            for place in PLACES:
                del os.environ[place]


def _control(arguments: list[str], words: str = "") -> bool:
    try:
        done = subprocess.run(
            [CONTROL, *arguments], input=words, text=True, capture_output=True, timeout=SERVICE_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
