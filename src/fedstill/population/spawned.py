"""A crew of processes of this machine: for several GPUs, or several cores, without another library."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.population.area import Area
from fedstill.population.scattered import Lost, Up
from fedstill.population.worker import Arrays, Failed, Kit, Worker

FALSE_STARTS = 3  # of one worker in a row, after which the run ends
END = 5.0  # seconds that a worker has to end by itself
VISIBLE = "CUDA_VISIBLE_DEVICES"
AREAS = ("orders", "results")  # of each worker: files in which the arrays of messages lie
MEMORY = "/dev/shm"  # Linux: files here lie in memory
LEAST_ROOM, SPARE = 1 << 30, 2  # bytes beside so many times the rows that must be free there


@contextmanager
def spawned_crew(kit: Kit, rows: Arrays, *, count: int, use_gpus: bool = True) -> Iterator[SpawnedCrew]:
    """Start `count` workers; worker i trains on GPU i modulo their number, where there are GPUs and they may be used.

    The rows lie in files that all workers map into memory, so they take their place once.
    """
    with tempfile.TemporaryDirectory(prefix="fedstill-", dir=_folder_in_memory(rows)) as folder:
        for name, array in rows.items():
            np.save(Path(folder) / f"{name}.npy", array, allow_pickle=False)
        crew = SpawnedCrew(kit, Path(folder), count, use_gpus=use_gpus)
        try:
            yield crew
        finally:
            crew.close()


class SpawnedCrew:
    """Workers at the other ends of pipes; see scattered.Crew."""

    def __init__(self, kit: Kit, folder: Path, count: int, *, use_gpus: bool) -> None:
        self.size = count
        self._kit, self._folder = kit, folder
        self._context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._gpus = _visible_gpus() if use_gpus and kit.device in ("auto", "cuda") else []
        self._device = "cpu" if not use_gpus and kit.device == "auto" else kit.device
        self._orders, self._results = ([Area(folder / f"{name}-{i}") for i in range(count)] for name in AREAS)
        self._ends: dict[int, Connection] = {}
        self._processes: dict[int, SpawnProcess] = {}
        self._begun: set[int] = set()
        self._busy: set[int] = set()
        self._false_starts = dict.fromkeys(range(count), 0)
        for worker in range(count):
            self._start(worker)

    def share(self, common: Any) -> Any:
        return common  # each pipe carries it again

    def ready(self) -> list[int]:
        return sorted(self._begun - self._busy)

    def hand(self, worker: int, task: str, shared: Any, *piece: Any) -> None:
        self._busy.add(worker)
        with suppress(OSError):  # where it died, its pipe says so to `next`
            self._ends[worker].send(self._orders[worker].lay((task, shared, *piece)))

    def next(self, patience: float) -> tuple[int, Any] | None:
        places = {end: worker for worker, end in self._ends.items()}
        for end in wait(list(places), patience):
            worker = places[end]  # type: ignore[index]
            try:
                message = self._ends[worker].recv()
            except (EOFError, OSError):
                return worker, self._begin_again(worker)
            if worker not in self._begun:
                if isinstance(message, Failed):
                    raise FedstillError(*message.lines)
                self._begun.add(worker)
                self._false_starts[worker] = 0
                return worker, Up(message)
            self._busy.discard(worker)
            return worker, self._results[worker].read(message)
        return None

    def close(self) -> None:
        """End all workers."""
        for end in self._ends.values():
            end.close()
        deadline = time.perf_counter() + END
        for process in self._processes.values():
            process.join(0 if self._busy else max(0.0, deadline - time.perf_counter()))
            if process.is_alive():
                process.kill()
                process.join()

    def place_of(self, worker: int) -> tuple[str, str | None]:
        """Return the device on which a worker trains, and the only GPU that it sees, where it has one of its own."""
        return ("cuda", self._gpus[worker % len(self._gpus)]) if self._gpus else (self._device, None)

    def _begin_again(self, worker: int) -> Lost:
        process = self._processes[worker]
        process.join(END)
        reason = f"process {process.pid} ended with code {process.exitcode}"
        if worker not in self._begun:
            self._false_starts[worker] += 1
        if self._false_starts[worker] == FALSE_STARTS:
            raise FedstillError(
                f"a worker cannot begin: {reason}, {FALSE_STARTS} times; its own lines stand above (a script that runs "
                "an experiment needs `if __name__ == '__main__':`)"
            )
        self._begun.discard(worker)
        self._busy.discard(worker)
        self._ends[worker].close()
        self._start(worker)
        return Lost(reason)

    def _start(self, worker: int) -> None:
        here, there = self._context.Pipe()
        arguments = (there, self._kit, self._folder, worker, *self.place_of(worker))
        process = self._context.Process(target=_serve, args=arguments, daemon=True, name=f"fedstill worker {worker}")
        try:
            process.start()
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            raise FedstillError(
                f"the run cannot go to another process ({error}): name methods and networks by FILE.py:function"
            ) from None
        there.close()
        self._ends[worker], self._processes[worker] = here, process


def _visible_gpus() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return names[:count] if names else [str(number) for number in range(count)]


def _folder_in_memory(rows: Arrays) -> str | None:
    """Return a folder that lies in memory where there is one with room to spare, because a disk is slower."""
    if not os.access(MEMORY, os.W_OK):
        return None
    room = shutil.disk_usage(MEMORY).free
    return MEMORY if room > SPARE * sum(array.nbytes for array in rows.values()) + LEAST_ROOM else None


def _serve(end: Connection, kit: Kit, folder: Path, number: int, device: str, gpu: str | None) -> None:
    """Do tasks until the driver closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the driver ends its workers
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    rows = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("x", "y", "indices", "offsets")
    }
    worker = Worker(kit, rows, device)
    orders, results = (Area(folder / f"{name}-{number}") for name in AREAS)
    try:
        end.send(worker.begin())
        while True:
            task, common, *piece = orders.read(end.recv())
            end.send(results.lay(worker.do(task, common, *piece)))
    except (EOFError, OSError):
        return
