"""One round: a cohort is drawn and trained, what it sends is checked, and the server steps."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.combine import broadcast_of, first_state, prepare_steps, run_steps, targets
from fedstill.compose.combine import reported as reported_by
from fedstill.compose.groups import bytes_received, bytes_sent, only
from fedstill.compose.moving import moving, with_rest
from fedstill.compose.phases import carry_over, first_round, method_at
from fedstill.compose.sealed import clipped, sealed_round
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.population import Order, Population, Stay
from fedstill.core.seeds import Sampling, Secret, draw_cohort, seed_for
from fedstill.core.setup import Answers, AnyQuestion, Preparation, no_preparation
from fedstill.core.trainer import CohortEngine, Messages, Trainer
from fedstill.core.tree import clone, leaves, tree_map
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
from fedstill.loop.evaluate import Evaluate, NotMeasured, TestSet, forgetting, number_of
from fedstill.loop.guard import Admitted, AuditRecord, Guard, admit, is_finite, noted
from fedstill.loop.history import History, Row, plain
from fedstill.loop.outliers import LEAST, PAST_ROUNDS, Scale, norms
from fedstill.loop.setup import Asked
from fedstill.privacy.plan import Privacy

_log = logging.getLogger("fedstill.run")
SCALE = "accepted_scale"  # of a row: how large accepted uploads were, by loop/outliers.py
MOVE = "server_move"  # of a row: how far the server's model moved
SUSPECTS = 3  # clients that are named where the model is taken back
OPEN_QUESTIONS = "questions_open"  # of a row: asked before the first round, and no release speaks of the answers


@dataclass(frozen=True)
class Task:
    """The parts of a run that do not change while it goes on."""

    phases: tuple[Phase, ...]
    model: Model
    federation: Federation
    training: Training
    engine: CohortEngine
    trainer: Trainer
    seed: Seed
    guard: Guard
    clients: np.ndarray  # ids of clients that hold data
    cohort: int
    test: TestSet
    evaluate: Evaluate
    counts: Tensor | None  # (N, K), only with Need.LABEL_COUNTS_UPLOADED
    unlabeled: Tensor | None  # only with Need.UNLABELED
    validation: tuple[Tensor, Tensor] | None = None  # only with Need.VALIDATION
    truth: Tensor | None = None  # (M,) labels of the unlabeled set, for looking at what the server believes
    tell: Callable[[str, float], None] = lambda line, share: None  # progress of what is prepared
    cache: Cache | None = None
    sampling: Sampling = "fixed"
    privacy: Privacy = field(default_factory=Privacy)
    noise_seed: Seed = (
        0  # of noise that protects, and of Poisson cohorts if it is a Secret: see privacy_plan.noise_seed
    )
    spare: int = 0  # clients that are drawn beyond the cohort, of which the first to answer count
    stays: Mapping[int, Stay] = field(default_factory=dict)  # of clients that are no members in some rounds
    sealed: bool = False  # the server's steps see sums over the cohort, and no upload
    warm: bool = False  # the first model was trained before, on data of which this run knows nothing

    @property
    def text(self) -> str:
        """The text that all phases were built from; empty: they were made in Python, or put together there."""
        texts = {phase.text for phase in self.phases}
        return texts.pop() if len(texts) == 1 else ""

    def method(self, round: int) -> Method:
        return method_at(self.phases, round)

    def members(self, round: int) -> np.ndarray:
        """Return the ids of the clients that hold data and are members in a round."""
        away = [client for client, stay in self.stays.items() if not stay.holds(round)]
        return self.clients[~np.isin(self.clients, away)] if away else self.clients

    def drawn(self, round: int) -> np.ndarray:
        """Return the ids of the clients that a round asks, drawn among its members."""
        members = self.members(round)
        if self.sampling != "fixed":  # a client's probability or turn stays the same, whoever else is a member
            secret = self.sampling == "poisson" and isinstance(self.noise_seed, Secret)
            seed, asked = self.noise_seed if secret else self.seed, min(self.cohort + self.spare, len(self.clients))
            ids = draw_cohort(self.clients, asked, seed=seed, round=round, sampling=self.sampling)
            return ids[np.isin(ids, members)]
        return draw_cohort(members, min(self.cohort + self.spare, len(members)), seed=self.seed, round=round)


@dataclass(frozen=True)
class State:
    """Where a run stands after a round; with what the population gives it is all that a checkpoint holds."""

    round: int
    weights: Weights
    server: Tree
    best: Weights | None = None
    history: History = field(default_factory=History)
    models: Mapping[str, Weights] = field(default_factory=dict)  # what the last server step left to be looked at
    targets_round: int = 0  # in which the server last formed targets


class Played(NamedTuple):
    """The state after a round, the round's row, and why uploads were refused or the model stayed."""

    state: State
    row: Row
    records: list[AuditRecord]


def play_round(task: Task, state: State, population: Population) -> Played:
    """Play the next round; where it fails, the state that comes back has the old model, and the records say why."""
    state = replace(state, round=state.round + 1, models={})
    number, method = state.round, task.method(state.round)
    state, prepared, records = _begin(task, state, population)
    start, ids = state.weights, task.drawn(number)
    records = [*_comings_and_goings(task, number), *records]
    received = broadcast_of(method, state.server)
    down = bytes_received(moving(start, task.model), received, ids.tolist(), task.model)
    row: Row = {
        "round": number, "cohort": len(ids), "accepted": 0, "train_loss": None,
        "bytes_up": 0, "bytes_down": down, **prepared,
    }  # fmt: skip
    if len(ids):
        uploads = population.play(Order(number, start, received), ids)
        row["bytes_up"] = _bytes_up(task, uploads)
        admitted = _admit(task, uploads, start, state, received)
        missing = "no sound upload is left"
    else:
        missing = "nobody was drawn"
        admitted = Admitted(None, ids, [_record(number, f"{missing}; the round keeps the old model")])
    records, accepted = [*records, *admitted.records], admitted.uploads
    if accepted is None and method.trusted is not None:  # a model that stays would tell that uploads are missing
        accepted, records[-1] = _no_uploads(start), _record(number, f"{missing}; the model moves by noise alone")
    if accepted is None:
        return Played(state, row, records)
    after, metrics = _serve(task, state, accepted)
    row |= {"accepted": len(admitted.kept), **metrics}
    if admitted.scale:
        row[SCALE] = plain(admitted.scale)
    if isinstance(after, str):
        return Played(state, row, [*records, _record(number, f"{after}; the round keeps the old model")])
    if len(admitted.kept):
        population.keep(number, ids[admitted.kept])
    return Played(after, row, records)


def _record(number: int, reason: str) -> AuditRecord:
    """A record about the round as a whole."""
    return {"round": number, "client": None, "reason": reason}


def _comings_and_goings(task: Task, number: int) -> list[AuditRecord]:
    """Return a record for each client that joins in this round, or left after the one before."""
    joined = [client for client, stay in task.stays.items() if stay.first == number > 1]
    left = [client for client, stay in task.stays.items() if stay.last == number - 1]
    return [
        *(noted(number, client, "it joined: it may be drawn from this round on") for client in sorted(joined)),
        *(noted(number, client, "it left: it is not drawn any more") for client in sorted(left)),
    ]


def _no_uploads(start: Weights) -> Uploads:
    weights = tree_map(lambda leaf: leaf.new_empty((0, *leaf.shape)), start)
    none = torch.zeros(0, device=next(leaves(start)).device)
    return Uploads(weights, none.double(), none, none, none, {}, None, torch.zeros(0, dtype=torch.int64))


def _begin(task: Task, state: State, population: Population) -> Played:
    """In a method's first round: take over the state of the method before, and prepare."""
    method, number = task.method(state.round), state.round
    if number > 1 and method is task.method(number - 1):
        return Played(state, {}, [])
    if number > 1:
        state = replace(state, server=carry_over(state.server, first_state(method, state.weights)))
    return prepare(task, state, population)


def prepare(task: Task, state: State, population: Population) -> Played:
    """Do what a method does once, before its first round; the row holds what it cost."""
    method, began = task.method(state.round), time.perf_counter()
    if all(step.prepare is no_preparation for step in method.steps):
        return Played(state, {}, [])
    asked = Asked(
        population, task.members(state.round), task.engine.device, state.round,
        strict=task.privacy.epsilon is not None, outlier=task.guard.outlier,
        releases=[release.what for release in method.releases if release.when == "once"], tell=task.tell,
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
        ask=_sealed_ask if task.sealed else asked.ask,
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
    facts = {f"prepare/{name}": value for name, value in look.metrics.items()}
    spent = {"bytes_prepared": asked.bytes_up, "bytes_prepared_down": asked.bytes_down}
    if asked.questions_open:
        spent[OPEN_QUESTIONS] = asked.questions_open
    row = plain({**facts, **spent, "seconds_prepared": time.perf_counter() - began})
    return Played(replace(state, weights=candidate, server=server), row, asked.records)


def _sealed_ask(question: AnyQuestion, /, among: Collection[int] | None = None, **how: Any) -> Answers:
    raise FedstillError("server.sealed = true: this method asks each client before its first round: set it to false")


def _labeled(task: Task) -> tuple[Tensor, Tensor]:
    """Samples whose labels the simulation knows: the unlabeled set's, else the test set's."""
    if task.unlabeled is None or task.truth is None:
        return task.test.x, task.test.y
    return task.unlabeled, task.truth


def _bytes_up(task: Task, uploads: Uploads | Messages) -> int:
    """Bytes that clients have to send: of the model the part that they train, because the server has all else."""
    if isinstance(uploads, Messages):
        if uploads.arrived is not None:
            return uploads.arrived
        return sum(len(message) for message in uploads.by_client.values() if isinstance(message, bytes))
    return bytes_sent(_moved(task, uploads), task.model)


def _moved(task: Task, uploads: Uploads) -> Uploads:
    return uploads._replace(weights=moving(uploads.weights, task.model, task.training.part))


def _admit(task: Task, uploads: Uploads | Messages, start: Weights, state: State, received: Tree) -> Admitted:
    method = task.method(state.round)
    if task.sealed and isinstance(uploads, Uploads):
        return _admit_unseen(uploads, start, task.guard, state.round)
    # what a method changes on the way may be the size
    exact = task.privacy.label_counts == "exact" and not method.per_client
    noisy = any(release.multiplier is not None for release in method.releases)
    past = None if noisy else _past_scales(task, state)
    sent = uploads if isinstance(uploads, Messages) else _moved(task, uploads)
    form = moving(start, task.model, task.training.part)
    alike = len(task.model.networks) == 1
    follows = method.objective.implied if alike and not method.per_client else None
    implied = None if follows is None else lambda opened: follows(opened, start, received)
    admitted = admit(
        sent, form, task.guard, round=state.round, exact_counts=exact, past=past, alike=alike, implied=implied
    )
    if admitted.uploads is None:
        return admitted
    whole = with_rest(admitted.uploads.weights, start, width=len(admitted.uploads.ids))
    return admitted._replace(uploads=admitted.uploads._replace(weights=whole))


def _admit_unseen(uploads: Uploads, start: Weights, guard: Guard, number: int) -> Admitted:
    """Nobody sees an upload before it is summed: each client looks at its own, and cuts it to the norm bounds."""
    finite_only = replace(guard, norm_bound=None, extra_bound=None, outlier=0.0)
    admitted = admit(uploads, start, finite_only, round=number)
    if admitted.uploads is None:
        return admitted
    return admitted._replace(uploads=clipped(admitted.uploads, start, guard.norm_bound, guard.extra_bound))


def _past_scales(task: Task, state: State) -> list[Scale]:
    """Return how large the uploads of this method's last rounds were."""
    rows = _rows_of_method(task, state)
    return list(itertools.islice((row[SCALE] for row in rows if SCALE in row), PAST_ROUNDS))


def _rows_of_method(task: Task, state: State) -> Iterator[Row]:
    """Yield the rows of this method's rounds until now, the last one first."""
    method = task.method(state.round)
    return itertools.takewhile(lambda row: task.method(row["round"]) is method, reversed(state.history.rows))


def _serve(task: Task, state: State, uploads: Uploads) -> tuple[State | str, Row]:
    """Return the state after the server's steps, or why the old one stays, and the numbers that the steps noted."""
    method = task.method(state.round)
    seen = uploads
    if method.trusted is not None:
        rounds = range(first_round(task.phases, state.round), state.round + 1)
        *past, seed = [seed_for(task.noise_seed, "seal", number) for number in rounds]
        trusted = method.trusted_in(state.server, past)
        assert trusted is not None
        seen = trusted(uploads, state.weights, seed, task.cohort)
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
    shown = sealed_round(look, seen) if task.sealed else look
    candidate, server = run_steps(method, state.weights, state.server, shown)
    kept = (candidate, server)  # an overflow in a server's moments would spoil every round to come
    sums = [leaf.sum().double().to(uploads.loss.device) for leaf in leaves(kept) if leaf.is_floating_point()]
    moves = [(leaf - state.weights.params[name]).double().square().sum() for name, leaf in candidate.params.items()]
    moved = torch.stack(moves).sum().sqrt().to(uploads.loss.device)
    total, move, loss = torch.stack([torch.stack(sums).sum(), moved, uploads.loss.double().mean()]).tolist()
    row: Row = plain({"train_loss": loss, **{f"server/{name}": value for name, value in look.metrics.items()}})
    if look.teachers:
        row["teacher_weights"] = plain({client: round(share, 6) for client, share in look.teachers.items()})
    if not math.isfinite(total) and not is_finite(kept):  # a sum may overflow where no term is Inf
        return "the server's model holds NaN or Inf", row
    if exploded := _exploded(task, state, uploads, move):
        return exploded, row
    row[MOVE] = move
    belief = targets(method, server)
    formed = _formed(belief, targets(method, state.server))
    after = replace(
        state, weights=candidate, server=server, models=look.models,
        targets_round=state.round if formed else state.targets_round,
    )  # fmt: skip
    return after, row | plain(look_at_targets(belief, task.truth))


def _exploded(task: Task, state: State, uploads: Uploads, move: float) -> str:
    """Return why a model is taken back that moved much farther than in any round before; empty: it is kept."""
    past = [row[MOVE] for row in _rows_of_method(task, state) if row.get(MOVE)]
    if not task.guard.outlier or len(past) < LEAST or move <= task.guard.outlier * max(past):
        return ""
    moved = f"the server's model moved by {move:.3g}, and by at most {max(past):.3g} before"
    if task.sealed:
        return f"{moved}: nobody can say by whose upload, because the round is sealed"
    moves = norms(uploads.weights.params, state.weights.params)
    first = uploads.ids[moves.argsort(descending=True).cpu()][:SUSPECTS].tolist()
    return f"{moved}: the largest uploads of the round are of the clients {', '.join(map(str, first))}"


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


def look_at(task: Task, state: State, row: Row) -> State:
    """Write an evaluation into `row`; the state that comes back keeps the best model."""
    weights, earlier = reported(task, state), state.history.evaluated
    try:
        row.update(plain(task.evaluate(weights, task.test, task.trainer) or {}))
    except NotMeasured as nobody:
        _log.warning("round %d: not evaluated: %s", state.round, nobody)
        return state
    if row.get("accuracy") is None:
        raise FedstillError(
            "the evaluation gave no 'accuracy': its result needs that key, because tables and curves show it"
        )
    if "class_accuracy" in row:
        row["forgetting"] = forgetting(
            (past["class_accuracy"] for past in earlier if "class_accuracy" in past), row["class_accuracy"]
        )
    number_of(row, state.history.best_by, asked="best")
    others = {name: other for name, other in state.models.items() if other is not weights}
    others |= {network: only(weights, network) for network in task.model.networks if network}
    for name, other in others.items():
        row[f"accuracy_{name}"] = plain(task.evaluate(other, task.test, task.trainer)["accuracy"])
    if earlier and state.history.rank(row) <= max(map(state.history.rank, earlier)):
        return state
    return replace(state, best=clone(weights))
