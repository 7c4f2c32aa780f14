"""Workers for whole runs: processes here, or actors of a Ray cluster. A run whose actor dies goes on in another one."""

from __future__ import annotations

import os
import platform
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.experiment.worker_pool import QUIET, Hear, Pool, Worker, WorkerPool
from fedstill.population.on_ray import Share, connected, deaths_of, room_for

MOST_DEATHS = 3  # of the actors of one job
LONGEST = 10.0  # seconds that messages are waited for


def pool_of(
    asked: Experiment,
    at_once: int,
    make_worker: Callable[[int], Worker],
    died: Callable[[int], Any],
    *,
    folders: Sequence[Path],
    again: Callable[[Any], Any],
) -> Pool:
    """Return the workers for runs that write these folders: actors of its cluster where engine.name is "ray".

    again: returns a job that goes on where a dead actor left it. For all else see WorkerPool.
    """
    if asked.engine.name != "ray":
        return WorkerPool(at_once, make_worker, died)
    place = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    place.mkdir(parents=True, exist_ok=True)
    return RayPool(asked, at_once, make_worker, died, place=place, again=again)


class Runner:
    """Does jobs in an actor. It keeps messages until the driver fetches them, in another thread of the actor."""

    def __init__(
        self, make_worker: Callable[[int], Worker], at_once: int, threads: int, place: str, folder: str
    ) -> None:
        """Take the functions of a worker, and two folders of the driver: of the runs, and the one it works in."""
        self._messages: deque[Any] = deque()
        missing = f"{platform.node()} has no folder '{place}': runs on a cluster need a disk that all machines share"
        self._mistake = "" if Path(place).is_dir() else missing
        if Path(folder).is_dir():
            os.chdir(folder)  # paths of data and methods are read from there
        torch.set_num_threads(threads)
        self._worker = make_worker(at_once)

    def do(self, number: int, job: Any) -> Any:
        if self._mistake:
            raise FedstillError(self._mistake)
        return self._worker.do(number, job, self._messages.append)

    def news(self) -> list[Any]:
        """Return the messages since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]


class RayPool:
    """Takes the place of a WorkerPool where engine.name is "ray". Runs have folders on a disk that all machines share.

    place: the folder of all runs. again: returns a job that goes on where a dead actor left it.
    """

    def __init__(
        self,
        experiment: Experiment,
        at_once: int,
        make_worker: Callable[[int], Worker],
        died: Callable[[int], Any],
        *,
        place: Path,
        again: Callable[[Any], Any],
    ) -> None:
        self._cluster, self._threads = experiment.cluster, experiment.engine.threads
        self._at_once, self._make_worker, self._died = at_once, make_worker, died
        self._place, self._again = place, again

    def do(self, jobs: Sequence[Any], hear: Hear) -> None:
        """Do all jobs; `hear` gets every message in this process, and a job's last message last."""
        waiting, deaths = deque(enumerate(jobs)), Counter[int]()
        busy: dict[Any, tuple[Any, int, Any]] = {}  # result -> its actor, number and job
        with connected(self._cluster.address) as ray:
            count, begin = self._actors(ray, min(self._at_once, len(jobs)))
            idle = [begin() for _ in range(count)]
            try:
                while waiting or busy:
                    while waiting and idle:
                        actor, (number, job) = idle.pop(), waiting.popleft()
                        busy[actor.do.remote(number, job)] = actor, number, job
                    done, _ = ray.wait(list(busy), timeout=QUIET)
                    for actor, _, _ in busy.values():
                        self._hear_news(ray, actor, hear)
                    for result in done:
                        actor, number, job = busy.pop(result)
                        try:
                            hear(ray.get(result))
                            idle.append(actor)
                        except deaths_of(ray):
                            idle.append(begin())
                            deaths[number] += 1
                            if deaths[number] == MOST_DEATHS:
                                hear(self._died(number))
                            else:
                                waiting.appendleft((number, self._again(job)))
            finally:
                for actor in [*idle, *(actor for actor, _, _ in busy.values())]:
                    ray.kill(actor)

    def _actors(self, ray: Any, wanted: int) -> tuple[int, Callable[[], Any]]:
        """Return how many actors there is room for, and the function that begins one."""
        cluster = self._cluster
        count, gpus = room_for(ray, wanted, Share(cluster.cpus, cluster.gpus))
        threads = self._threads or max(1, int(cluster.cpus))
        made = ray.remote(Runner).options(
            num_cpus=cluster.cpus, num_gpus=gpus, max_concurrency=2, max_restarts=0, max_task_retries=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
        )  # fmt: skip
        return count, partial(made.remote, self._make_worker, count, threads, str(self._place.resolve()), os.getcwd())

    def _hear_news(self, ray: Any, actor: Any, hear: Hear) -> None:
        with suppress(*deaths_of(ray), ray.exceptions.GetTimeoutError):  # its result says so, or a long step holds it
            for message in ray.get(actor.news.remote(), timeout=LONGEST):
                hear(message)
