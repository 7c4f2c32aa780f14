"""A population in this process: an engine trains its clients, and a store holds what they remember."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.combine import on_the_way
from fedstill.core.author_mistakes import name_of
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.population import Answer, ClientRows, Order
from fedstill.core.seeds import seed_for
from fedstill.core.setup import AnyQuestion, ClientData, Question, Tools
from fedstill.core.trainer import LocalWork, Messages, Trained, Trainer
from fedstill.core.tree import rows, tree_map
from fedstill.core.types import Need, Tree, Uploads
from fedstill.engine.client_store import ClientStore
from fedstill.loop.cautions import try_objective
from fedstill.loop.guard import is_finite
from fedstill.loop.round import Task


class Here:
    """The clients of a simulation. Close it (or use it in a `with`), because memories may live on disk.

    first: what a client remembers before its first round.
    budget: bytes of memories that may lie on the device; see ClientStore.
    """

    def __init__(self, task: Task, first: Tree, *, budget: int | None = None, folder: Path | None = None) -> None:
        self.task = task
        population = task.federation.population
        self.store = ClientStore(first, population, device=task.engine.device, budget=budget, folder=folder)
        self._played: tuple[np.ndarray, Tree] = (np.zeros(0, np.int64), {})
        self._lent: dict[str, Trainer] = {}

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def play(self, order: Order, ids: np.ndarray) -> Uploads | Messages:
        task, number = self.task, order.round
        method = task.method(number)
        work = LocalWork(method.objective, task.training, order.start, order.received, number, task.seed, task.text)
        states = self.store.read(ids)
        if number == 1 or method is not task.method(number - 1):
            try_objective(task.model, task.federation, work, ids, states)
        trained = task.engine.train(work, ids, states)
        if not isinstance(trained, Trained):
            raise FedstillError(f"{name_of(task.engine.train)} returned a {type(trained).__name__}, not a Trained")
        self._played = ids, trained.states
        if isinstance(trained.uploads, Messages):  # they have come all the way
            return trained.uploads
        return self._on_the_way(trained.uploads, order, ids)

    def _on_the_way(self, uploads: Uploads, order: Order, ids: np.ndarray) -> Uploads:
        """Return what reaches the server: label counts only where they are declared."""
        uploads = uploads._replace(
            weights=tree_map(_in_order, uploads.weights), extra=tree_map(_in_order, uploads.extra)
        )
        task, counts = self.task, None
        method = task.method(order.round)
        if task.counts is not None and Need.LABEL_COUNTS_UPLOADED in needs_of(method):
            counts = task.counts[torch.as_tensor(ids, device=task.counts.device)]
        seed = seed_for(task.noise_seed, "transmit", order.round)
        return on_the_way(method, uploads._replace(label_counts=counts), order.start, seed)

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
        seed, noise_seed = (seed_for(seed, "prepare", round) for seed in (self.task.seed, self.task.noise_seed))
        for client in ids:
            data = self._data(client)
            answer: Answer
            try:
                if isinstance(question, Question):
                    answer = question.answer(data, sent, Tools(self._trainer(client), seed, noise_seed))
                else:
                    answer = question(data)
            except FedstillError:
                raise  # a mistake of the user's, not a client's fault
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            yield client, answer

    def _trainer(self, client: int) -> Trainer:
        task = self.task
        if task.model.groups is None:
            return task.trainer
        network = task.model.network_of(client)
        if network not in self._lent:
            self._lent[network] = task.trainer.lend(task.model.networks[network])
        return self._lent[network]

    def _data(self, client: int) -> ClientData:
        federation, device = self.task.federation, self.task.engine.device
        first, last = federation.offsets[client : client + 2].tolist()
        places, train = federation.indices[first:last], federation.train
        return ClientData(client, train.x[places].to(device), train.y[places].to(device))

    def snapshot(self) -> Iterator[ClientRows]:
        return self.store.snapshot()

    def restore(self, parts: Iterable[ClientRows]) -> None:
        self.store.restore(parts)


def _in_order(leaf: Tensor) -> Tensor:
    """Lay a stacked tensor out as a message would, because kernels round by strides; clients that share it still do."""
    return leaf if leaf.stride(0) == 0 else leaf.contiguous()
