"""Worker processes that do runs side by side; a process that dies costs one run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

QUIET = 0.5  # seconds between two messages about rounds
DIED = "its process was ended from outside or for want of memory: try less --jobs"

Hear = Callable[[Any], None]


class Worker(Protocol):
    """Does jobs in one process, one after another."""

    def do(self, number: int, job: Any, hear: Hear) -> Any:
        """Do a job and return its last message, also of a failure; `hear` takes the messages before it."""
        ...


class Pool(Protocol):
    """Processes that do jobs, each the next one."""

    def do(self, jobs: Sequence[Any], hear: Hear) -> None:
        """Do all jobs; `hear` gets every message in this process, and a job's last message last."""
        ...


def threads_for(at_once: int) -> int:
    """Return the torch threads of each worker, so that all together use no more than this process's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores // at_once))


class WorkerPool:
    """Worker processes that each take the next job.

    Each has its own executor, because then a process that dies costs only its run and is replaced.
    """

    def __init__(self, at_once: int, make_worker: Callable[[int], Worker], died: Callable[[int], Any]) -> None:
        """Take the number of processes, and two functions.

        make_worker: called in each process with the number of processes.
        died: returns the last message of a job whose process died, by the job's number.
        """
        self.at_once, self._make_worker, self._died = at_once, make_worker, died
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._executors: list[ProcessPoolExecutor] = []
        self._news: list[Connection] = []

    def do(self, jobs: Sequence[Any], hear: Hear) -> None:
        """Do all jobs; `hear` gets every message in this process, and a job's last message last."""
        others = set(multiprocessing.active_children())
        waiting = list(enumerate(jobs))[::-1]
        busy: dict[Future[Any], tuple[int, int]] = {}  # place of the worker, number of the job
        try:
            for place in range(min(self.at_once, len(jobs))):
                self._start(place)
                busy |= self._submit(place, *waiting.pop())
            while busy:
                ended, _ = wait(busy, QUIET, FIRST_COMPLETED)
                for news in self._news:
                    while news.poll():
                        hear(news.recv())
                for future in ended:
                    place, number = busy.pop(future)
                    try:
                        last = future.result()
                    except BrokenProcessPool:
                        self._start(place)
                        last = self._died(number)
                    hear(last)
                    if waiting:
                        busy |= self._submit(place, *waiting.pop())
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # the same command resumes its run
            raise
        finally:
            for executor in self._executors:
                executor.shutdown(cancel_futures=True)

    def _start(self, place: int) -> None:
        news, sender = self._context.Pipe(duplex=False)
        begin = (sender, self._make_worker, self.at_once, threads_for(self.at_once))
        executor = ProcessPoolExecutor(1, self._context, initializer=_begin, initargs=begin)
        self._executors[place : place + 1], self._news[place : place + 1] = [executor], [news]

    def _submit(self, place: int, number: int, job: Any) -> dict[Future[Any], tuple[int, int]]:
        with _deaf_to_interrupts():
            return {self._executors[place].submit(_do, number, job): (place, number)}


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which reaches the whole group, because the parent ends them."""
    if threading.current_thread() is not threading.main_thread():  # no other thread may set a signal
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(sender: Connection, make_worker: Callable[[int], Worker], at_once: int, threads: int) -> None:
    """Set up a new worker process before its first job."""
    global _worker, _hear
    torch.set_num_threads(threads)
    _worker, _hear = make_worker(at_once), sender.send
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends, because a killed command must leave no worker behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(number: int, job: Any) -> Any:
    return _worker.do(number, job, _hear)


_worker: Worker
_hear: Hear
