"""Clients whose data this process holds: an engine trains them by an order, and they answer questions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.combine import on_the_way
from fedstill.core.author_mistakes import name_of
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.population import Answer, Order
from fedstill.core.seeds import seed_for
from fedstill.core.setup import AnyQuestion, ClientData, Question, Tools
from fedstill.core.trainer import LocalWork, Messages, Trained, Trainer
from fedstill.core.tree import tree_map
from fedstill.core.types import Need, Seed, Tree, Uploads
from fedstill.loop.cautions import try_objective
from fedstill.loop.round import Task


class Site:
    """Some clients of a run. It keeps nothing between rounds, so its caller keeps the memories."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._lent: dict[str, Trainer] = {}
        self._tried: set[int] = set()

    def play(self, order: Order, ids: np.ndarray, states: Tree, noise_seed: Seed) -> Trained:
        """Train some clients in this process; see core.population.Host."""
        task, method = self.task, self.task.method(order.round)
        work = LocalWork(
            method.objective, task.training, order.start, order.received, order.round, task.seed, task.text
        )
        if id(method) not in self._tried:
            self._tried.add(id(method))
            try_objective(task.model, task.federation, work, ids, states)
        trained = task.engine.train(work, ids, states)
        if not isinstance(trained, Trained):
            raise FedstillError(f"{name_of(task.engine.train)} returned a {type(trained).__name__}, not a Trained")
        if isinstance(trained.uploads, Messages):  # they have come all the way
            return trained
        return trained._replace(uploads=self._on_the_way(trained.uploads, order, ids, noise_seed))

    def _on_the_way(self, uploads: Uploads, order: Order, ids: np.ndarray, noise_seed: Seed) -> Uploads:
        """Return what reaches the server: label counts only where they are declared."""
        uploads = uploads._replace(
            weights=tree_map(_in_order, uploads.weights), extra=tree_map(_in_order, uploads.extra)
        )
        task, counts = self.task, None
        method = task.method(order.round)
        if task.counts is not None and Need.LABEL_COUNTS_UPLOADED in needs_of(method):
            counts = task.counts[torch.as_tensor(ids, device=task.counts.device)]
        return on_the_way(method, uploads._replace(label_counts=counts), order.start, noise_seed)

    def answers(
        self, question: AnyQuestion, ids: Collection[int], sent: Any, *, round: int, noise_seed: Seed
    ) -> Iterator[tuple[int, Answer]]:
        """Ask some clients, one after another; see core.population.Host."""
        for client in ids:
            yield client, self.answer(question, client, sent, round=round, noise_seed=noise_seed)

    def answer(self, question: AnyQuestion, client: int, sent: Tree, *, round: int, noise_seed: Seed) -> Answer:
        """Return a client's answer to a question, or the error in which it ended; a user's mistake ends the run."""
        data = self._data(client)
        try:
            if not isinstance(question, Question):
                return question(data)
            tools = Tools(self._trainer(client), seed_for(self.task.seed, "prepare", round), noise_seed)
            return question.answer(data, sent, tools)
        except FedstillError:
            raise  # a mistake of the user's, not a client's fault
        except Exception as error:
            return f"{type(error).__name__}: {error}"

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


def _in_order(leaf: Tensor) -> Tensor:
    """Lay a stacked tensor out as a message would, because kernels round by strides; clients that share it still do."""
    return leaf if leaf.stride(0) == 0 else leaf.contiguous()
