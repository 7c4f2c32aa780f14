"""Clients whose training is spread over a crew of workers; memories and rounds stay with the driver.

A worker that dies costs the time of its piece: the piece goes to another worker, and comes back with the same bits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.population import Answer, Order
from fedstill.core.setup import AnyQuestion, Question
from fedstill.core.trainer import Trained
from fedstill.core.tree import from_tree, tree_map
from fedstill.core.types import Params, Seed, Tree, Uploads, Weights
from fedstill.loop.here import Here
from fedstill.loop.round import Task
from fedstill.loop.site import Site
from fedstill.population.worker import Arrays, Failed, Kit, Recipe, arrays_of, outline_of, rows_of, tensors_of

PATIENCE = 300.0  # seconds without any worker after which a run ends
GATHER = 30.0  # seconds that the first worker waits for the others before the first round
MOST_DEATHS = 4  # workers that one piece may cost
_log = logging.getLogger("fedstill.run")


class Up(NamedTuple):
    """A worker has begun, for the first time or again."""

    name: str  # its process and machine


class Lost(NamedTuple):
    """A worker died, with what it was doing."""

    reason: str


class Crew(Protocol):
    """Workers in other processes, by their numbers. Each does one task at a time, and one that dies is begun again.

    A result is good until its worker gets another task.
    """

    size: int  # workers that there are when all have begun

    def share(self, common: Any) -> Any:
        """Lay down what several tasks take as their first argument; return a name for it."""
        ...

    def ready(self) -> list[int]:
        """Return the workers that have begun and have nothing to do."""
        ...

    def hand(self, worker: int, task: str, shared: Any, *piece: Any) -> None:
        """Give a worker that is ready a task; `next` returns its result."""
        ...

    def next(self, patience: float) -> tuple[int, Any] | None:
        """Wait for the next event: a worker and its result, Up or Lost; None when the patience has passed.

        Raises why a worker cannot begin.
        """
        ...


MakeCrew = Callable[[Kit, Arrays], AbstractContextManager[Crew]]


@contextmanager
def scattered(
    task: Task, first: Tree, *, crew: MakeCrew, recipe: Recipe, device: str, threads: int, folder: Path | None = None
) -> Iterator[Here]:
    """Make the population of a run whose clients a crew trains. A `Built` takes it as `population`, by `partial`.

    recipe, device, threads: what each worker builds the run by; see worker.Kit.
    """
    kit = Kit(recipe, outline_of(task.federation), device, task.noise_seed, threads)
    with crew(kit, rows_of(task.federation)) as workers:
        host = Scattered(task, workers)
        host.gather()
        with Here(task, first, host=host, folder=folder) as here:
            yield here


class Scattered:
    """A host that cuts each cohort into pieces of equal cost, one for each worker that is ready."""

    def __init__(self, task: Task, crew: Crew) -> None:
        self.task, self.crew, self.seconds_lost = task, crew, 0.0
        sizes = task.federation.offsets.diff().cpu().numpy()
        steps = -(-sizes // task.training.batch_size)
        self._costs = np.ones_like(steps) if task.training.steps else np.maximum(steps, 1)
        self._site: Site | None = None

    def gather(self) -> None:
        """Wait until all workers have begun, or some of them and the others take too long."""
        began, first = time.perf_counter(), None
        while len(self.crew.ready()) < self.crew.size:
            now = time.perf_counter()
            limit = began + PATIENCE if first is None else first + GATHER
            if now >= limit:
                break
            if self._next(limit - now) and first is None and self.crew.ready():
                first = time.perf_counter()
        count = len(self.crew.ready())
        if not count:
            raise FedstillError(f"no worker has begun in {PATIENCE:.0f} seconds: is the cluster busy, or too small?")
        if count < self.crew.size:
            _log.warning("only %d of %d workers have begun; the others join when they do", count, self.crew.size)

    def play(self, order: Order, ids: np.ndarray, states: Tree, noise_seed: Seed) -> Trained:
        """Train the clients in pieces; see core.population.Host."""
        tensors = arrays_of({"start": order.start._asdict(), "received": order.received})
        places, memories = self._cut(ids), arrays_of(states)
        pieces = [(ids[part], _rows(memories, part), noise_seed) for part in places]
        whole: Arrays = {}
        for piece, (sent, after) in self._spread("play", {"round": order.round, "tensors": tensors}, pieces):
            _put(whole, {"uploads": sent, "states": after}, places[piece], len(ids))
        device = self.task.engine.device
        trained = tree_map(lambda array: torch.from_numpy(array).to(device), whole)
        return Trained(self._completed(from_tree(trained["uploads"]), order), trained["states"])

    def answers(
        self, question: AnyQuestion, ids: Collection[int], sent: Any, *, round: int, noise_seed: Seed
    ) -> Iterator[tuple[int, Answer]]:
        """Ask the clients in pieces. A plain function is answered in this process, because code does not travel."""
        known = {release.name for release in self.task.method(round).questions}
        if not isinstance(question, Question) or question.name not in known:
            self._site = self._site or Site(self.task)
            yield from self._site.answers(question, ids, sent, round=round, noise_seed=noise_seed)
            return
        asked, device = np.fromiter(ids, np.int64), self.task.engine.device
        pieces = [(asked[part].tolist(), noise_seed) for part in self._cut(asked)]
        common = {"round": round, "question": question.name, "tensors": arrays_of(sent or {})}
        for _, answers in self._spread("answer", common, pieces):
            for client, answer in answers.items():
                yield client, answer if isinstance(answer, str) else tensors_of(answer, device)

    def _completed(self, uploads: Uploads, order: Order) -> Uploads:
        """Put tensors that clients do not train, and so do not send, into their uploads, in the model's order."""
        trained, networks = uploads.weights, self.task.model.networks

        def filled(sent: Params, start: Params) -> Params:
            count = len(uploads.ids)
            return {
                name: sent[name] if name in sent else leaf.expand(count, *leaf.shape) for name, leaf in start.items()
            }

        weights = Weights(filled(trained.params, order.start.params), filled(trained.buffers, order.start.buffers))
        several = self.task.model.groups is not None
        extra = {name: uploads.extra[name] for name in networks if name in uploads.extra} if several else uploads.extra
        return uploads._replace(weights=weights, extra=extra)

    def _cut(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return places in `ids`, in pieces of about equal cost."""
        while self._next(0) is not None:  # who died or began since the last round
            pass
        return pieces_of(self._costs[ids], max(1, len(self.crew.ready())))

    def _spread(self, task: str, common: Any, pieces: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Hand each piece to a worker, and yield its number and its result as it comes."""
        crew, shared = self.crew, self.crew.share(common)
        waiting, deaths = deque(range(len(pieces))), Counter[int]()
        busy: dict[int, tuple[int, float]] = {}  # worker -> its piece, and since when
        while waiting or busy:
            for worker in crew.ready()[: len(waiting)]:
                busy[worker] = waiting.popleft(), time.perf_counter()
                crew.hand(worker, task, shared, *pieces[busy[worker][0]])
            worker, event = self._next(PATIENCE) or (-1, None)
            if event is None and not busy:
                raise FedstillError(f"no worker is left, and none has come back in {PATIENCE:.0f} seconds")
            if worker not in busy or isinstance(event, Up):
                continue
            piece, since = busy.pop(worker)
            if isinstance(event, Lost):
                waiting.append(piece)
                deaths[piece] += 1
                self._note_loss(worker, event, pieces[piece][0], time.perf_counter() - since)
                if deaths[piece] == MOST_DEATHS:
                    raise FedstillError(
                        f"{MOST_DEATHS} workers died of the same clients ({_some(pieces[piece][0])}): {event.reason}; "
                        "if they want for memory, set fewer cluster.actors, or engine.chunk"
                    )
            elif isinstance(event, Failed):
                raise FedstillError(*event.lines) if not event.traceback else WorkerError(event.traceback)
            else:
                yield piece, event

    def _next(self, patience: float) -> tuple[int, Any] | None:
        event = self.crew.next(patience)
        if event is not None and isinstance(event[1], Up):
            _log.info("worker %d is %s", event[0], event[1].name)
        return event

    def _note_loss(self, worker: int, lost: Lost, ids: Sequence[int], seconds: float) -> None:
        self.seconds_lost += seconds
        _log.warning(
            "worker %d died (%s): %.1f seconds of work on %d clients are lost, and another worker does it again",
            worker, lost.reason, seconds, len(ids),
        )  # fmt: skip


class WorkerError(RuntimeError):
    """An error in a worker's own code, with the traceback of the worker."""


def pieces_of(costs: np.ndarray, count: int) -> list[np.ndarray]:
    """Cut a cohort into at most `count` pieces of about equal cost: the dearest client goes to the cheapest piece.

    >>> [piece.tolist() for piece in pieces_of(np.array([1, 5, 2, 2]), 2)]
    [[1], [0, 2, 3]]
    """
    pieces: list[list[int]] = [[] for _ in range(min(count, len(costs)))]
    sums = np.zeros(len(pieces))
    for place in np.argsort(-costs, kind="stable").tolist():
        cheapest = int(sums.argmin())
        pieces[cheapest].append(place)
        sums[cheapest] += costs[place]
    return [np.array(sorted(piece)) for piece in pieces]


def _rows(tree: Any, places: np.ndarray) -> Any:
    if isinstance(tree, dict):
        return {name: _rows(child, places) for name, child in tree.items()}
    return tree[places]


def _put(whole: Arrays, piece: Arrays, places: np.ndarray, count: int) -> None:
    """Put the rows of a piece at their places in a cohort of `count`. Rows of a slot that some pieces lack are zero."""
    for name, rows in piece.items():
        if isinstance(rows, dict):
            _put(whole.setdefault(name, {}), rows, places, count)
        else:
            if name not in whole:
                whole[name] = np.zeros((count, *rows.shape[1:]), rows.dtype)
            whole[name][places] = rows


def _some(ids: Sequence[int]) -> str:
    shown = ", ".join(str(client) for client in list(ids)[:5])
    return f"{shown}, ..." if len(ids) > 5 else shown
