"""Crews of workers for tests: in this process, with deaths at will; everything travels by pickle all the same."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from elsewhere import RecipeOf

from fedstill.loop.federate import Built
from fedstill.population.scattered import Lost, MakeCrew, Up, scattered
from fedstill.population.worker import Arrays, Kit, Worker


class InTurn:
    """Workers of this process. Tasks whose numbers are in `deadly` kill their worker; it begins again later."""

    def __init__(self, kit: Kit, rows: Arrays, count: int, deadly: Collection[int] = ()) -> None:
        self.size, self.deadly, self.tasks = count, deadly, 0
        self.kit, self.rows = pickle.dumps(kit), rows
        self.done_by: list[int] = []  # the worker of each task
        self.workers: dict[int, Worker] = {}
        self.events: list[tuple[int, Any]] = []
        for worker in range(count):
            self.begin(worker)

    def begin(self, worker: int) -> None:
        for array in self.rows.values():
            array.flags.writeable = False
        self.workers[worker] = Worker(pickle.loads(self.kit), self.rows, "cpu")
        said = self.workers[worker].begin()
        assert isinstance(said, str), said
        self.events.append((worker, Up(said)))

    def share(self, common: Any) -> bytes:
        return pickle.dumps(common)

    def ready(self) -> list[int]:
        waiting = {worker for worker, _ in self.events}
        return [worker for worker in sorted(self.workers) if worker not in waiting]

    def hand(self, worker: int, task: str, shared: bytes, *own: Any) -> None:
        self.tasks += 1
        self.done_by.append(worker)
        if self.tasks in self.deadly:
            self.events.append((worker, Lost("killed by the test")))
            self.begin(worker)
            return
        said = self.workers[worker].do(task, pickle.loads(shared), *pickle.loads(pickle.dumps(own)))
        self.events.append((worker, pickle.loads(pickle.dumps(said))))

    def next(self, patience: float) -> tuple[int, Any] | None:
        """The workers with high numbers are quick."""
        if not self.events:
            return None
        worker = max(worker for worker, _ in self.events)
        event = next(event for event in self.events if event[0] == worker)
        self.events.remove(event)
        return event


@contextmanager
def in_turn(
    kit: Kit, rows: Arrays, *, count: int = 2, deadly: Collection[int] = (), seen: Any = None
) -> Iterator[InTurn]:
    crew = InTurn(kit, rows, count, deadly)
    if seen is not None:
        seen.append(crew)
    yield crew


def over(recipe: RecipeOf, crew: MakeCrew) -> Built:
    """The same run with its clients trained by a crew."""
    return replace(recipe.run(), population=partial(scattered, crew=crew, recipe=recipe, device="cpu", threads=1))
