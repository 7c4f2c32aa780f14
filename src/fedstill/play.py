"""One round: a cohort is drawn and trained, what it sends is checked, and the server steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedstill.asking import Asked
from fedstill.core.errors import FedstillError
from fedstill.core.message import encode, select, template_of
from fedstill.core.needs import needs_of
from fedstill.core.phases import algorithm_at, carry_over, keep_waiting
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.tree import byte_size, clone, leaves, rows
from fedstill.core.types import (
    Algorithm,
    Federation,
    Keeper,
    Model,
    Need,
    Objective,
    Phase,
    Preparation,
    Round,
    Seed,
    Targets,
    Trainer,
    Training,
    Tree,
    Uploads,
    Weights,
    no_preparation,
)
from fedstill.engine.store import ClientStore
from fedstill.evaluate import Exam, Forgetting, accuracy, evaluate
from fedstill.guard import Admitted, AuditRecord, Guard, admit, admit_messages, is_finite
from fedstill.history import History, Row, plain

Tamper = Callable[[int, int, bytes], bytes]  # (round, client, message) -> message; may raise


class Trained(Protocol):
    @property
    def uploads(self) -> Uploads: ...
    @property
    def states(self) -> Tree: ...


class CohortTrainer(Trainer, Protocol):
    """What the loop asks of an engine."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...

    def train(
        self,
        objective: Objective,
        training: Training,
        start: Weights,
        *,
        received: Tree,
        states: Tree,
        ids: np.ndarray,
        round: int,
        seed: Seed,
    ) -> Trained: ...


@dataclass(frozen=True)
class Task:
    """What does not change during a run."""

    phases: tuple[Phase, ...]
    model: Model
    federation: Federation
    training: Training
    engine: CohortTrainer
    seed: Seed
    guard: Guard
    tamper: Tamper | None
    clients: np.ndarray  # ids of clients that hold data
    cohort: int
    exam: Exam
    counts: Tensor | None  # (N, K), only with Need.LABEL_COUNTS_UPLOADED
    unlabeled: Tensor | None  # only with Need.UNLABELED
    validation: tuple[Tensor, Tensor] | None = None  # only with Need.VALIDATION
    truth: Tensor | None = None  # (M,) labels of the unlabeled set, for looking at what the server believes
    tell: Callable[[str, float], None] = lambda what, share: None  # progress of what is prepared
    keeper: Keeper | None = None

    def algorithm(self, round: int) -> Algorithm:
        return algorithm_at(self.phases, round)


@dataclass
class State:
    """What changes from round to round; with the store it is all that a checkpoint holds."""

    round: int
    weights: Weights
    server: Tree
    best: Weights | None = None
    best_accuracy: float = -math.inf
    saved: int = 0  # the round of the newest checkpoint
    history: History = field(default_factory=History)
    forgetting: Forgetting = field(default_factory=Forgetting)
    models: dict[str, Weights] = field(default_factory=dict)  # what the last server step left to be looked at
    targets_round: int = 0  # in which the server last formed targets


def draw_cohort(clients: np.ndarray, count: int, *, seed: Seed, round: int) -> np.ndarray:
    """Ids of one round's cohort, ascending; a function of seed and round only, so all methods see the same."""
    generator = numpy_generator(seed_for(seed, "cohort", round))
    return np.sort(clients[generator.choice(len(clients), size=count, replace=False, shuffle=False)])


def play_round(task: Task, state: State, store: ClientStore) -> tuple[Row, list[AuditRecord]]:
    """One round: the state moves on, or stays as it was and the records say why."""
    number, algorithm = state.round, task.algorithm(state.round)
    state.models = {}
    noted, found = _begin(task, state)
    start = state.weights
    ids = draw_cohort(task.clients, task.cohort, seed=task.seed, round=number)
    received = algorithm.server.broadcast(state.server)
    trained = task.engine.train(
        algorithm.objective,
        task.training,
        start,
        received=received,
        states=store.read(ids),
        ids=ids,
        round=number,
        seed=task.seed,
    )
    uploads = _transmit(task, trained.uploads, start, ids, number)
    row: Row = {
        "round": number,
        "cohort": len(ids),
        "accepted": 0,
        "train_loss": None,
        "bytes_up": _bytes_up(uploads),
        "bytes_down": len(ids) * (byte_size(start) + byte_size(received)),
    }
    row.update(noted)
    admitted = _admit(task, uploads, start, number)
    records = [*found, *admitted.records]
    if admitted.uploads is not None:
        row["accepted"] = len(admitted.kept)
        moved, metrics = _serve(task, state, admitted.uploads)
        row.update(metrics)
        if moved:
            _remember(store, ids, trained.states, admitted.kept)
        else:
            reason = "the server's model holds NaN or Inf; the round keeps the old model"
            records = [*records, {"round": number, "client": None, "reason": reason}]
    return row, records


def _begin(task: Task, state: State) -> tuple[Row, list[AuditRecord]]:
    """In the first round of a method: what it takes over from the one before, and what it prepares."""
    algorithm, number = task.algorithm(state.round), state.round
    if number > 1 and algorithm is task.algorithm(number - 1):
        return {}, []
    if number > 1:
        state.server = carry_over(state.server, algorithm.server.init(state.weights))
    return prepare(task, state)


def prepare(task: Task, state: State) -> tuple[Row, list[AuditRecord]]:
    """What a method does once, before its first round; the state takes its result only if it is finite."""
    algorithm, began = task.algorithm(state.round), time.perf_counter()
    if algorithm.server.prepare is no_preparation:
        return {}, []
    asked = Asked(task.federation, task.clients, task.engine.device, state.round)
    look = Preparation(
        round=state.round,
        model=task.model,
        population=task.federation.population,
        unlabeled=task.unlabeled if Need.UNLABELED in needs_of(algorithm) else None,
        seed=seed_for(task.seed, "prepare", state.round),
        trainer=task.engine,
        ask=asked.ask,
        keeper=task.keeper,
        tell=task.tell,
    )
    candidate, server = algorithm.server.prepare(state.weights, state.server, look)
    if not is_finite((candidate, server)):
        raise FedstillError(
            f"round {state.round}: what the method prepared holds NaN or Inf: use a lower learning rate"
        )
    state.weights, state.server = candidate, keep_waiting(state.server, server)
    facts = {f"prepare/{name}": value for name, value in look.metrics.items()}
    spent = {"bytes_prepared": asked.bytes_up, "seconds_prepared": time.perf_counter() - began}
    return plain({**facts, **spent}), asked.records


def _transmit(task: Task, uploads: Uploads, start: Weights, ids: np.ndarray, number: int) -> Uploads:
    """What is on its way to the server: label counts only where they are declared."""
    algorithm, counts = task.algorithm(number), None
    if task.counts is not None and Need.LABEL_COUNTS_UPLOADED in needs_of(algorithm):
        counts = task.counts[torch.as_tensor(ids, device=task.counts.device)]
    uploads = uploads._replace(label_counts=counts)
    return algorithm.transmit(uploads, start, seed_for(task.seed, "transmit", number))


def _bytes_up(uploads: Uploads) -> int:
    sent = (uploads.weights, uploads.extra, uploads.size, uploads.steps, uploads.travel, uploads.loss)
    return byte_size(sent) + (0 if uploads.label_counts is None else byte_size(uploads.label_counts))


def _admit(task: Task, uploads: Uploads, start: Weights, number: int) -> Admitted:
    if task.tamper is None:
        return admit(uploads, start, task.guard, round=number)
    messages: dict[int, bytes | Mapping[str, Any] | Exception] = {}
    for position, client in enumerate(uploads.ids.tolist()):
        try:
            messages[client] = task.tamper(number, client, encode(select(uploads, position), round=number))
        except Exception as error:  # whatever a client's call ends with is that client's fault alone
            messages[client] = error
    return admit_messages(messages, template_of(uploads), start, task.guard, round=number)


def _serve(task: Task, state: State, uploads: Uploads) -> tuple[bool, Row]:
    """The server's step; the state takes its result only if model and server state are finite."""
    algorithm = task.algorithm(state.round)
    look = Round(
        number=state.round,
        start=state.weights,
        uploads=uploads,
        model=task.model,
        population=task.federation.population,
        unlabeled=task.unlabeled if Need.UNLABELED in needs_of(algorithm) else None,
        seed=seed_for(task.seed, "server", state.round),
        trainer=task.engine,
        validation=task.validation if Need.VALIDATION in needs_of(algorithm) else None,
    )
    candidate, server = algorithm.server.apply(state.weights, state.server, look)
    server = keep_waiting(state.server, server)
    kept = (candidate, server)  # an overflow in a server's moments would spoil every round to come
    sums = [leaf.sum().double() for leaf in leaves(kept) if leaf.is_floating_point()]
    total, loss = torch.stack([torch.stack(sums).sum(), uploads.loss.double().mean()]).tolist()
    row: Row = plain({"train_loss": loss, **{f"server/{name}": value for name, value in look.metrics.items()}})
    finite = math.isfinite(total) or is_finite(kept)  # a sum may overflow where no term is Inf
    if finite:
        targets = algorithm.server.targets(server)
        if _formed(targets, algorithm.server.targets(state.server)):
            state.targets_round = state.round
        state.weights, state.server, state.models = candidate, server, look.models
        row.update(plain(look_at_targets(targets, task.truth)))
    return finite, row


def _formed(targets: Targets | None, before: Targets | None) -> bool:
    """Whether they are new; a step that skips a round hands on the tensors that it had."""
    return targets is not None and (before is None or targets.probabilities is not before.probabilities)


def look_at_targets(targets: Targets | None, truth: Tensor | None) -> Row:
    """How many unlabeled samples the server learns from, how they spread over classes, and how many are right."""
    if targets is None:
        return {}
    answer = targets.probabilities.argmax(dim=1)
    kept = targets.kept.to(answer.device)
    counts = torch.bincount(answer[kept], minlength=targets.probabilities.shape[1])
    row: Row = {"pseudo_labels": kept.sum(), "pseudo_label_counts": counts}
    if truth is not None:
        right = (answer == truth.to(answer.device))[kept].double()
        row["pseudo_label_accuracy"] = right.mean() if len(right) else None
    return row


def reported(task: Task, state: State) -> Weights:
    """The model that is looked at and saved: the one sent, unless the method reports another."""
    if not state.round:
        return state.weights
    return task.algorithm(state.round).server.report(state.server) or state.weights


def _remember(store: ClientStore, ids: np.ndarray, states: Tree, kept: np.ndarray) -> None:
    if len(kept) == len(ids):
        store.write(ids, states)
    else:
        store.write(ids[kept], rows(states, torch.as_tensor(kept, device=store.device)))


def look_at(task: Task, state: State, row: Row) -> None:
    """Evaluate into `row` and keep the best model."""
    weights = reported(task, state)
    row.update(plain(evaluate(weights, task.exam, task.engine)))
    row["forgetting"] = state.forgetting.see(row["class_accuracy"])
    for name, other in state.models.items():
        row[f"accuracy_{name}"] = accuracy(other, task.exam, task.engine)
    if row["accuracy"] > state.best_accuracy:
        state.best, state.best_accuracy = clone(weights), row["accuracy"]
