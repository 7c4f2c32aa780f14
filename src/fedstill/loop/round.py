"""One round: a cohort is drawn and trained, what it sends is checked, and the server steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.combine import broadcast_of, first_state, on_the_way, prepare_steps, run_steps, targets
from fedstill.compose.combine import reported as reported_by
from fedstill.compose.groups import bytes_received, bytes_sent, only, own_upload, whole_upload
from fedstill.compose.head_only import head_names, head_of
from fedstill.compose.phases import carry_over, method_at
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import Sampling, draw_cohort, seed_for
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.trainer import CohortEngine, LocalWork, Trained, Trainer
from fedstill.core.tree import as_tree, byte_size, clone, leaves, rows, select, tree_map
from fedstill.core.types import (
    Cache,
    Federation,
    Method,
    Model,
    Need,
    Phase,
    Round,
    Seed,
    Targets,
    Training,
    Tree,
    Uploads,
    Weights,
)
from fedstill.engine.client_store import ClientStore
from fedstill.loop.evaluate import Evaluate, Forgetting, TestSet
from fedstill.loop.guard import Admitted, AuditRecord, Guard, admit, admit_messages, is_finite
from fedstill.loop.history import History, Row, plain
from fedstill.loop.message import decode, encode, on_meta, template_of
from fedstill.loop.setup import Asked
from fedstill.privacy.plan import Privacy

Tamper = Callable[[int, int, bytes], bytes]  # (round, client, message) -> message; may raise
OPEN_QUESTIONS = "questions_open"  # of a row: asked before the first round, and no release speaks of the answers


@dataclass(frozen=True)
class Task:
    """What does not change during a run."""

    phases: tuple[Phase, ...]
    model: Model
    federation: Federation
    training: Training
    engine: CohortEngine
    trainer: Trainer
    seed: Seed
    guard: Guard
    tamper: Tamper | None
    clients: np.ndarray  # ids of clients that hold data
    cohort: int
    test: TestSet
    evaluate: Evaluate
    counts: Tensor | None  # (N, K), only with Need.LABEL_COUNTS_UPLOADED
    unlabeled: Tensor | None  # only with Need.UNLABELED
    validation: tuple[Tensor, Tensor] | None = None  # only with Need.VALIDATION
    truth: Tensor | None = None  # (M,) labels of the unlabeled set, for looking at what the server believes
    tell: Callable[[str, float], None] = lambda what, share: None  # progress of what is prepared
    cache: Cache | None = None
    sampling: Sampling = "fixed"
    privacy: Privacy = field(default_factory=Privacy)
    noise_seed: Seed = 0  # of noise that protects: see promises.noise_seed

    @property
    def text(self) -> str:
        """The text that all phases were built from; empty: they were made in Python, or put together there."""
        texts = {phase.text for phase in self.phases}
        return texts.pop() if len(texts) == 1 else ""

    def method(self, round: int) -> Method:
        return method_at(self.phases, round)


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


def play_round(task: Task, state: State, store: ClientStore) -> tuple[Row, list[AuditRecord]]:
    """One round: the state moves on, or stays as it was and the records say why."""
    number, method = state.round, task.method(state.round)
    state.models = {}
    noted, found = _begin(task, state)
    start = state.weights
    ids = draw_cohort(task.clients, task.cohort, seed=task.seed, round=number, sampling=task.sampling)
    if not len(ids):
        return _without_cohort(task, state, noted, found)
    received = broadcast_of(method, state.server)
    work = LocalWork(method.objective, task.training, start, received, number, task.seed, task.text)
    trained = task.engine.train(work, ids, store.read(ids))
    uploads = _transmit(task, trained.uploads, start, ids, number)
    down = _bytes_down(task, start, received, ids)
    row = _first_facts(number, len(ids), noted, up=_bytes_up(task, uploads), down=down)
    admitted = _admit(task, uploads, start, number)
    records = [*found, *admitted.records]
    left = admitted.uploads
    if left is None and method.trusted is not None:  # whose uploads broke must not be told by a model that stays
        left, records[-1] = _no_uploads(start), _noise_alone(number, "no sound upload is left")
    if left is not None:
        row["accepted"] = len(admitted.kept)
        moved, metrics = _serve(task, state, left)
        row.update(metrics)
        if moved:
            _remember(store, ids, trained.states, _with_sound_states(method, trained, admitted.kept))
        else:
            reason = "the server's model holds NaN or Inf; the round keeps the old model"
            records = [*records, {"round": number, "client": None, "reason": reason}]
    return row, records


def _first_facts(number: int, cohort: int, noted: Row, *, up: int = 0, down: int = 0) -> Row:
    facts = {"round": number, "cohort": cohort, "accepted": 0, "train_loss": None, "bytes_up": up, "bytes_down": down}
    return {**facts, **noted}


def _without_cohort(task: Task, state: State, noted: Row, found: list[AuditRecord]) -> tuple[Row, list[AuditRecord]]:
    """Nobody was drawn: the model stays. A trusted party adds its noise all the same, so that nobody can tell."""
    row = _first_facts(state.round, 0, noted)
    reason = "nobody was drawn; the round keeps the old model"
    if task.method(state.round).trusted is not None:
        row.update(_serve(task, state, _no_uploads(state.weights))[1])
        return row, [*found, _noise_alone(state.round, "nobody was drawn")]
    return row, [*found, {"round": state.round, "client": None, "reason": reason}]


def _noise_alone(number: int, why: str) -> AuditRecord:
    return {"round": number, "client": None, "reason": f"{why}; the model moves by noise alone"}


def _no_uploads(start: Weights) -> Uploads:
    weights = tree_map(lambda leaf: leaf.new_empty((0, *leaf.shape)), start)
    none = torch.zeros(0, device=next(leaves(start)).device)
    return Uploads(weights, none.double(), none, none, none, {}, None, torch.zeros(0, dtype=torch.int64))


def _begin(task: Task, state: State) -> tuple[Row, list[AuditRecord]]:
    """In the first round of a method: what it takes over from the one before, and what it prepares."""
    method, number = task.method(state.round), state.round
    if number > 1 and method is task.method(number - 1):
        return {}, []
    if number > 1:
        state.server = carry_over(state.server, first_state(method, state.weights))
    return prepare(task, state)


def prepare(task: Task, state: State) -> tuple[Row, list[AuditRecord]]:
    """What a method does once, before its first round; the state takes its result only if it is finite."""
    method, began = task.method(state.round), time.perf_counter()
    if all(step.prepare is no_preparation for step in method.steps):
        return {}, []
    asked = Asked(
        task.federation, task.clients, task.engine.device, state.round, strict=task.privacy.epsilon is not None,
        releases=[one.what for one in method.releases if one.when == "once"],
    )  # fmt: skip
    look = Preparation(
        round=state.round,
        model=task.model,
        population=task.federation.population,
        unlabeled=task.unlabeled if Need.UNLABELED in needs_of(method) else None,
        seed=seed_for(task.seed, "prepare", state.round),
        run_seed=task.seed,
        noise_seed=seed_for(task.noise_seed, "prepare", state.round),
        trainer=task.trainer,
        ask=asked.ask,
        cache=task.cache,
        tell=task.tell,
        inputs={"mean": list(task.federation.train.mean), "std": list(task.federation.train.std)},
        labeled=_labeled(task),
        tokenizer=task.federation.train.tokenizer,
    )
    candidate, server = prepare_steps(method, state.weights, state.server, look)
    if not is_finite((candidate, server)):
        raise FedstillError(
            f"round {state.round}: what the method prepared holds NaN or Inf: use a lower learning rate"
        )
    state.weights, state.server = candidate, server
    facts = {f"prepare/{name}": value for name, value in look.metrics.items()}
    spent = {"bytes_prepared": asked.bytes_up, "bytes_prepared_down": asked.bytes_down}
    if asked.questions_open:
        spent[OPEN_QUESTIONS] = asked.questions_open
    return plain({**facts, **spent, "seconds_prepared": time.perf_counter() - began}), asked.records


def _labeled(task: Task) -> tuple[Tensor, Tensor]:
    """Samples whose labels the simulation knows: the unlabeled set's, else the test set's."""
    if task.unlabeled is None or task.truth is None:
        return task.test.x, task.test.y
    return task.unlabeled, task.truth


def _transmit(task: Task, uploads: Uploads, start: Weights, ids: np.ndarray, number: int) -> Uploads:
    """What is on its way to the server: label counts only where they are declared."""
    method, counts = task.method(number), None
    if task.counts is not None and Need.LABEL_COUNTS_UPLOADED in needs_of(method):
        counts = task.counts[torch.as_tensor(ids, device=task.counts.device)]
    uploads = uploads._replace(label_counts=counts)
    return on_the_way(method, uploads, start, seed_for(task.noise_seed, "transmit", number))


def _bytes_up(task: Task, uploads: Uploads) -> int:
    """What clients have to send: of the model only what they train; the rest is as the server sent it."""
    weights = uploads.weights
    if task.training.part == "head":
        weights = head_of(weights, head_names(task.model))
    if task.model.groups is not None:
        return bytes_sent(uploads._replace(weights=weights), task.model.groups)
    sent = (weights, uploads.extra, uploads.size, uploads.steps, uploads.travel, uploads.loss)
    return byte_size(sent) + (0 if uploads.label_counts is None else byte_size(uploads.label_counts))


def _bytes_down(task: Task, start: Weights, received: Tree, ids: np.ndarray) -> int:
    if task.model.groups is not None:
        return bytes_received(start, received, ids.tolist(), task.model.groups)
    return len(ids) * (byte_size(start) + byte_size(received))


def _admit(task: Task, uploads: Uploads, start: Weights, number: int) -> Admitted:
    # what a method changes on the way may be the size
    exact = task.privacy.label_counts == "exact" and not task.method(number).per_client
    if task.tamper is None:
        return admit(uploads, start, task.guard, round=number, exact_counts=exact)
    messages: dict[int, bytes | Mapping[str, Any] | Exception] = {}
    for position, client in enumerate(uploads.ids.tolist()):
        try:
            messages[client] = _message(task, uploads, start, position, number)
        except Exception as error:  # whatever a client's call ends with is that client's fault alone
            messages[client] = error
    return admit_messages(messages, template_of(uploads), start, task.guard, round=number, exact_counts=exact)


def _message(task: Task, uploads: Uploads, start: Weights, position: int, number: int) -> bytes | Mapping[str, Any]:
    """What one client sends, in its wire form; of several architectures its own, opened and put among the others."""
    assert task.tamper is not None
    client, groups = int(uploads.ids[position]), task.model.groups
    if groups is None:
        return task.tamper(number, client, encode(select(uploads, position), round=number))
    own = own_upload(uploads, position, groups)
    data = task.tamper(number, client, encode(own, round=number))
    opened = decode(data, on_meta(own), client=client, round=number)
    return as_tree(whole_upload(opened, groups.member[client], start, uploads))


def _serve(task: Task, state: State, uploads: Uploads) -> tuple[bool, Row]:
    """The server's step; the state takes its result only if model and server state are finite."""
    method = task.method(state.round)
    seen = uploads
    if method.trusted is not None:
        seen = method.trusted(uploads, state.weights, seed_for(task.noise_seed, "seal", state.round), task.cohort)
    look = Round(
        number=state.round,
        start=state.weights,
        uploads=seen,
        model=task.model,
        population=task.federation.population,
        unlabeled=task.unlabeled if Need.UNLABELED in needs_of(method) else None,
        seed=seed_for(task.seed, "server", state.round),
        trainer=task.trainer,
        validation=task.validation if Need.VALIDATION in needs_of(method) else None,
    )
    candidate, server = run_steps(method, state.weights, state.server, look)
    kept = (candidate, server)  # an overflow in a server's moments would spoil every round to come
    sums = [leaf.sum().double().to(uploads.loss.device) for leaf in leaves(kept) if leaf.is_floating_point()]
    total, loss = torch.stack([torch.stack(sums).sum(), uploads.loss.double().mean()]).tolist()
    row: Row = plain({"train_loss": loss, **{f"server/{name}": value for name, value in look.metrics.items()}})
    finite = math.isfinite(total) or is_finite(kept)  # a sum may overflow where no term is Inf
    if finite:
        belief = targets(method, server)
        if _formed(belief, targets(method, state.server)):
            state.targets_round = state.round
        state.weights, state.server, state.models = candidate, server, look.models
        row.update(plain(look_at_targets(belief, task.truth)))
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
    return reported_by(task.method(state.round), state.server) or state.weights


def _with_sound_states(method: Method, trained: Trained, kept: np.ndarray) -> np.ndarray:
    """Of the accepted those whose training did not break: noise on the way hides that from the guard, by intention."""
    if not method.per_client or not len(kept) or is_finite(trained.states):
        return kept
    return np.asarray([one for one in kept.tolist() if is_finite(rows(trained.states, one))], np.int64)


def _remember(store: ClientStore, ids: np.ndarray, states: Tree, kept: np.ndarray) -> None:
    if len(kept) == len(ids):
        store.write(ids, states)
    elif len(kept):
        store.write(ids[kept], rows(states, torch.as_tensor(kept, device=store.device)))


def look_at(task: Task, state: State, row: Row) -> None:
    """Evaluate into `row` and keep the best model."""
    weights = reported(task, state)
    row.update(plain(task.evaluate(weights, task.test, task.trainer)))
    if row.get("accuracy") is None:
        raise FedstillError(
            "the evaluation gave no 'accuracy': its result needs that key, because the best model goes by it"
        )
    if "class_accuracy" in row:
        row["forgetting"] = state.forgetting.see(row["class_accuracy"])
    others = {name: other for name, other in state.models.items() if other is not weights}
    if task.model.groups is not None:
        others |= {prototype: only(weights, prototype) for prototype in task.model.groups.models}
    for name, other in others.items():
        row[f"accuracy_{name}"] = plain(task.evaluate(other, task.test, task.trainer)["accuracy"])
    if row["accuracy"] > state.best_accuracy:
        state.best, state.best_accuracy = clone(weights), row["accuracy"]
