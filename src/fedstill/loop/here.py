"""A population whose memories lie in a store of this process, wherever its clients are trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.population import Answer, ClientRows, Host, Order
from fedstill.core.seeds import seed_for
from fedstill.core.setup import AnyQuestion
from fedstill.core.trainer import Messages
from fedstill.core.tree import rows
from fedstill.core.types import Tree, Uploads
from fedstill.engine.client_store import ClientStore
from fedstill.loop.guard import is_finite
from fedstill.loop.round import Task
from fedstill.loop.site import Site


class Here:
    """The clients of a simulation. Close it (or use it in a `with`), because memories may live on disk.

    first: the memory of a client before its first round.
    host: trains the clients; None: this process.
    budget: bytes of memories that may lie on the device; see ClientStore.
    """

    def __init__(
        self,
        task: Task,
        first: Tree,
        *,
        host: Host | None = None,
        budget: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.task, self.host = task, Site(task) if host is None else host
        population = task.federation.population
        self.store = ClientStore(first, population, device=task.engine.device, budget=budget, folder=folder)
        self._played: tuple[np.ndarray, Tree] = (np.zeros(0, np.int64), {})

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def play(self, order: Order, ids: np.ndarray) -> Uploads | Messages:
        seed = seed_for(self.task.noise_seed, "transmit", order.round)
        uploads, states = self.host.play(order, ids, self.store.read(ids), seed)
        self._played = ids, states
        return uploads

    def keep(self, round: int, ids: np.ndarray) -> None:
        played, states = self._played
        kept = np.flatnonzero(np.isin(played, ids))
        if self.task.method(round).per_client and len(kept) and not is_finite(states):
            # noise on the way hides from the guard, by intention, whose training broke
            kept = np.asarray([place for place in kept.tolist() if is_finite(rows(states, place))], np.int64)
        if len(kept) == len(played):
            self.store.write(played, states)
        elif len(kept):
            self.store.write(played[kept], rows(states, torch.as_tensor(kept, device=self.store.device)))

    def ask(
        self, question: AnyQuestion, ids: Collection[int], *, round: int, sent: Any
    ) -> Iterator[tuple[int, Answer]]:
        seed = seed_for(self.task.noise_seed, "prepare", round)
        return self.host.answers(question, ids, sent, round=round, noise_seed=seed)

    def snapshot(self) -> Iterator[ClientRows]:
        return self.store.snapshot()

    def restore(self, parts: Iterable[ClientRows]) -> None:
        self.store.restore(parts)
