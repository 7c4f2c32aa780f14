"""Who does the runs: this process one after another, or several worker processes that each take the next one."""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

from fedstill.bench.order import Order
from fedstill.bench.plan import threads_for
from fedstill.bench.worker import Message, Workshop, serve

Hear = Callable[[Message], None]
PATIENCE = 5.0  # seconds that a worker gets to end


class Crew(Protocol):
    """Whoever does the tasks; `hear` gets every message as it comes."""

    def do(self, kind: str, orders: Sequence[Order], hear: Hear) -> None: ...


@contextmanager
def crew(jobs: int) -> Iterator[Crew]:
    """One for the whole command, so that data are loaded and kernels are built once a worker."""
    if jobs == 1:
        yield Alone()
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


def _tasks(kind: str, orders: Sequence[Order]) -> list[Message]:
    return [{"kind": kind, "number": number, "order": order.as_json()} for number, order in enumerate(orders)]


class Alone:
    """All in this process."""

    def __init__(self) -> None:
        self._workshop = Workshop()

    def do(self, kind: str, orders: Sequence[Order], hear: Hear) -> None:
        for task in _tasks(kind, orders):
            self._workshop.handle(task, hear)


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    task: Message | None = None  # what it is doing


class Pool:
    """Worker processes, started when there is something to do; one that dies is replaced, its run counts as failed."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.workers: list[Worker] = []
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def do(self, kind: str, orders: Sequence[Order], hear: Hear) -> None:
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

    def _idle(self) -> Worker | None:
        found = next((worker for worker in self.workers if worker.task is None), None)
        if found is None and len(self.workers) < self.jobs:
            found = self._start()
            self.workers.append(found)
        return found

    def _start(self) -> Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self.jobs, threads_for(self.jobs)), daemon=True)
        with _deaf_to_interrupts():
            process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return Worker(process, ours)

    def _listen(self, worker: Worker, hear: Hear) -> None:
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
