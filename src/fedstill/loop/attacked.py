"""A simulation some of whose clients are hostile: an attack stands between clients and server, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.attack.kinds import Attack, Cohort, where_hostile
from fedstill.core.errors import FedstillError
from fedstill.core.population import Answer, Order
from fedstill.core.seeds import seed_for
from fedstill.core.setup import AnyQuestion
from fedstill.core.trainer import Messages, Trainer
from fedstill.core.types import Tree, Uploads, Weights
from fedstill.engine import Engines
from fedstill.loop.evaluate import Evaluate, TestSet, label_counts
from fedstill.loop.here import Here
from fedstill.loop.round import Task

SUCCESS = "backdoor_success"  # of a row: see `backdoor_success`
_log = logging.getLogger("fedstill.run")


class Attacked(Here):
    """The clients of a simulation, some of whom do what an attack says.

    engines: makes an engine; hostile clients train on rows that the run's own engine does not have.
    """

    def __init__(
        self,
        task: Task,
        first: Tree,
        *,
        attack: Attack,
        engines: Callable[..., Engines],
        budget: int | None = None,
        folder: Path | None,
    ) -> None:
        self.attack = attack
        self.hostile = attack.hostile(task.clients.tolist(), task.seed)
        federation = attack.poisoned(task.federation, self.hostile, task.seed)
        if federation is not task.federation:
            made = engines(model=task.model, federation=federation)
            counts = None if task.counts is None else label_counts(federation).to(task.counts.device)
            task = replace(task, federation=federation, engine=made.cohort, counts=counts)
        names = ", ".join(map(str, self.hostile))
        _log.info("attack: %d of %d clients are hostile: %s", len(self.hostile), len(task.clients), names)
        super().__init__(task, first, budget=budget, folder=folder)

    def play(self, order: Order, ids: np.ndarray) -> Uploads | Messages:
        uploads, send = super().play(order, ids), self.attack.kind.send
        if isinstance(uploads, Messages):
            raise FedstillError("attack.name: this engine returns messages, and an attack changes uploads: use ours")
        places = torch.from_numpy(np.isin(ids, self.hostile))
        if send is None or not bool(places.any()):
            return uploads
        params, start = uploads.weights.params, order.start.params
        moves = {name: leaf - start[name] for name, leaf in params.items() if leaf.is_floating_point()}
        cohort = Cohort(moves, places.to(uploads.size.device), seed_for(self.task.seed, "attack", order.round))
        sent = {name: start[name] + move for name, move in send(cohort).items()}
        changed = where_hostile(cohort._replace(moves={name: params[name] for name in sent}), sent)
        return uploads._replace(weights=uploads.weights._replace(params={**params, **changed}))

    def ask(
        self, question: AnyQuestion, ids: Collection[int], *, round: int, sent: Any
    ) -> Iterator[tuple[int, Answer]]:
        lie = self.attack.kind.lie
        for client, answer in super().ask(question, ids, round=round, sent=sent):
            if lie is None or client not in self.hostile or isinstance(answer, str):
                yield client, answer
            else:
                yield client, lie(answer, sent)


def measured_under(attack: Attack | None, evaluate: Evaluate) -> Evaluate:
    """Return the evaluation, which under a backdoor also measures how often the backdoor opens."""
    if attack is None or attack.kind.trigger is None:
        return evaluate
    return partial(_with_success, attack, evaluate)


def _with_success(
    attack: Attack, evaluate: Evaluate, weights: Weights, test: TestSet, trainer: Trainer
) -> dict[str, Any]:
    return {**evaluate(weights, test, trainer), SUCCESS: backdoor_success(attack, weights, test, trainer)}


def backdoor_success(attack: Attack, weights: Weights, test: TestSet, trainer: Trainer) -> float | None:
    """Return which share of the test samples of other classes get the target once they carry the trigger."""
    trigger, target = attack.kind.trigger, attack.kind.target
    others = test.y != target
    if trigger is None or not bool(others.any()):
        return None
    x = trigger(test.federation.train, test.x[others])
    answer = trainer.outputs(weights, x, features=False, keep=False).logits.argmax(dim=1)
    return float((answer == target).double().mean())
