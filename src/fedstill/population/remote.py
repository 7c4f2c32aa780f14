"""The server's side of a run whose clients live elsewhere: a population over a transport that carries bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.moving import moving
from fedstill.core.errors import FedstillError
from fedstill.core.population import Answer, ClientRows, Order
from fedstill.core.setup import AnyQuestion, Question
from fedstill.core.trainer import Messages
from fedstill.core.tree import as_tree, byte_size, stack, to_device
from fedstill.core.types import Federation, Tree, Uploads
from fedstill.loop.checkpoint import KEEP
from fedstill.loop.federate import MakeEngines
from fedstill.loop.message import HEADER_LIMIT, decode, template_of
from fedstill.loop.round import Task
from fedstill.loop.site import Site
from fedstill.population.parts import base_digest, completed, travelling
from fedstill.population.wire import (
    FACTS_LIMIT,
    Parcel,
    digest_of,
    facts_of,
    pack_tree,
    seal,
    shown,
    unpack_tree,
    unseal,
)

BLANK_ROWS = 2  # of the client that is played to learn the form of an upload; BatchNorm needs two
LARGEST_ANSWER = 1 << 30  # bytes


class Transport(Protocol):
    """Carries bytes between the server and its clients, and knows nothing of them."""

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        """Deliver `common` and its own part to each client; yield the answer of each as it comes, or why there is none.

        It ends when the transport's deadline has passed. Clients that have not answered by then need not be yielded.
        Its caller may stop earlier. It raises nothing for a client's sake: an exception is yielded, and ends nothing.
        """
        ...


class Remote:
    """The clients of a run, each behind a transport. The server remembers which round of each client it took last.

    first: the memory of a client before its first round, for the form of an upload.
    engines: makes an engine for a federation without anybody's rows; see `Built.engines`.
    run: facts that each client compares with its own; see Desk.
    """

    def __init__(
        self,
        task: Task,
        first: Tree,
        *,
        transport: Transport,
        engines: MakeEngines,
        run: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self.task, self.transport, self.run, self.folder = task, transport, facts_of(run), folder
        self.memory_of = torch.zeros(task.federation.population, dtype=torch.int64)
        self._saved: deque[Tensor] = deque(maxlen=KEEP)  # what the checkpoints hold that a resume may take up
        self._first, self._engines = first, engines
        self._forms: dict[int, Uploads] = {}
        self._base: str | None = None
        self._notes: dict[tuple[int, str], None] = {}  # events since the last round, each once

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def play(self, order: Order, ids: np.ndarray) -> Messages:
        whole, task = self._form(order), self.task
        sent = {"start": moving(order.start, task.model)._asdict(), "received": order.received}
        common = self._order("play", order.round, sent, base=self._base_of(order))
        opened: dict[int, Tree | Exception] = {}
        start, arrived, taken = to_device(order.start, "cpu"), 0, 0
        enough = min(task.cohort, len(ids)) if task.spare else None
        limit = byte_size(as_tree(whole)) + HEADER_LIMIT + FACTS_LIMIT
        with closing(self._exchange(common, ids.tolist(), limit)) as answers:
            for client, size, answer in answers:
                arrived += size
                try:
                    body = self._open(answer, "upload", client)
                    form = travelling(whole, client, task.model, task.training)
                    opened[client] = completed(decode(body, form, client=client, round=order.round), start, whole)
                    taken += 1
                except FedstillError as error:
                    opened[client] = error
                if taken == enough:
                    break
        silent = "not needed: enough clients answered before" if taken == enough else "no answer before the deadline"
        by_client = {client: opened.get(client, FedstillError(silent)) for client in ids.tolist()}
        notes, self._notes = tuple(self._notes), {}
        return Messages(by_client, whole, arrived, enough, notes)

    def keep(self, round: int, ids: np.ndarray) -> None:
        self.memory_of[torch.from_numpy(ids)] = round

    def ask(
        self, question: AnyQuestion, ids: Collection[int], *, round: int, sent: Any
    ) -> Iterator[tuple[int, Answer]]:
        if not isinstance(question, Question):
            raise FedstillError(
                "this method asks its clients a plain function, and code does not travel: make it a Question, and name "
                "it in the `questions` of a Mechanism"
            )
        common = self._order("ask", round, sent or {}, question=question.name)
        waiting = set(ids)
        for client, _, answer in self._exchange(common, ids, LARGEST_ANSWER):
            waiting.discard(client)
            try:
                yield client, unpack_tree(self._open(answer, "answer", client))
            except FedstillError as error:
                yield client, str(error)
        for client in sorted(waiting):
            yield client, "no answer before the deadline"

    def snapshot(self) -> Iterator[ClientRows]:
        self._saved.append(self.memory_of.clone())
        yield np.arange(len(self.memory_of)), {"memory_of": self._saved[-1]}

    def restore(self, parts: Iterable[ClientRows]) -> None:
        self._saved.clear()
        for ids, rows in parts:
            self.memory_of[torch.from_numpy(ids)] = rows["memory_of"]

    def _order(self, kind: str, round: int, tree: Tree, **facts: str) -> bytes:
        return seal({**self.run, "kind": kind, "round": round, **facts}, pack_tree(tree))

    def _exchange(
        self, common: bytes, ids: Collection[int], limit: int
    ) -> Generator[tuple[int, int, Parcel | Exception], None, None]:
        """Yield (client, bytes, parcel) for the first answer of each client to this order; other answers are noted."""
        noted, waiting = digest_of(common), set(ids)
        # memories of earlier rounds may go once no checkpoint names them any more
        oldest = self._saved[0] if len(self._saved) == KEEP else torch.zeros_like(self.memory_of)
        rounds = {client: {"memory_of": int(self.memory_of[client]), "oldest": int(oldest[client])} for client in ids}
        each = {client: seal({"order": noted, "client": client, **facts}) for client, facts in rounds.items()}
        for client, answer in self.transport.exchange(common, each):
            size = len(answer) if isinstance(answer, bytes) else 0
            opened = _opened(answer, limit)
            if client not in rounds:
                self._note(client, "it answered an order that it did not get: not used")
            elif client not in waiting:
                self._note(client, "it answered twice: the first answer counts")
            elif isinstance(opened, Parcel) and opened.facts.get("order") != noted:
                self._note(client, "it answered another order, late or damaged on the way: not used")
            else:
                waiting.discard(client)
                yield client, size, opened

    def _note(self, client: int, event: str) -> None:
        self._notes[client, event] = None

    def _open(self, answer: Parcel | Exception, kind: str, client: int) -> bytes:
        if isinstance(answer, FedstillError):
            raise answer
        if isinstance(answer, Exception):
            raise FedstillError(f"no answer: {type(answer).__name__}: {shown(answer, 200)}")
        facts = answer.facts
        if facts.get("kind") == "refused":
            raise FedstillError(f"the client refused: {shown(facts.get('reason'), 300)}")
        for name, value in {"kind": kind, "client": client}.items():
            if facts.get(name) != value:
                raise FedstillError(f"the answer's {name} is '{shown(facts.get(name))}', and '{value}' was expected")
        if "begun_anew" in facts:
            self._note(client, f"it began anew, as its operator allows: {shown(facts['begun_anew'], 200)}")
        return answer.body

    def _form(self, order: Order) -> Uploads:
        """Return the form of an upload in this round's method: a client with blank rows is played once."""
        method = self.task.method(order.round)
        if id(method) not in self._forms:
            self._forms[id(method)] = template_of(self._blank_uploads(order))
        return self._forms[id(method)]

    def _blank_uploads(self, order: Order) -> Uploads:
        task, model = self.task, self.task.model
        member = [model.network_of(client) for client in range(task.federation.population)]
        ids = np.asarray([member.index(network) for network in model.networks])
        blank = blank_rows(task.federation)
        engines = self._engines(model=model, federation=blank)
        counts = None if task.counts is None else torch.zeros_like(task.counts)
        training = replace(task.training, epochs=1, steps=1, batch_size=BLANK_ROWS)
        site = Site(
            replace(
                task, federation=blank, engine=engines.cohort, trainer=engines.trainer, counts=counts, training=training
            )
        )
        uploads = site.play(order, ids, stack([self._first] * len(ids)), noise_seed=0).uploads
        assert isinstance(uploads, Uploads)
        return uploads._replace(weights=moving(uploads.weights, task.model, task.training.part))

    def _base_of(self, order: Order) -> str:
        """Return the name of the tensors that no training moves: they do not travel, and each client has its own."""
        if self._base is None:
            self._base = base_digest(order.start, self.task.model)
        return self._base


def _opened(answer: bytes | Exception, limit: int) -> Parcel | Exception:
    try:
        return answer if isinstance(answer, Exception) else unseal(answer, limit=limit)
    except FedstillError as error:
        return error


def blank_rows(federation: Federation) -> Federation:
    """Return a federation of the same clients in which each holds one blank row, twice."""
    population, train = federation.population, federation.train
    x = torch.ones((1, *train.x.shape[1:]), dtype=train.x.dtype)  # ids of text are no padding
    train = replace(train, x=x, y=torch.zeros(1, dtype=torch.int64))
    return replace(
        federation,
        train=train,
        indices=torch.zeros(BLANK_ROWS * population, dtype=torch.int64),
        offsets=BLANK_ROWS * torch.arange(population + 1),
        client_test=None,
    )


def without_rows(federation: Federation) -> Federation:
    """Return the server's part of a federation: who the clients are, and none of their rows."""
    train = federation.train
    return replace(
        federation,
        train=replace(train, x=train.x[:0], y=train.y[:0]),
        indices=federation.indices[:0],
        offsets=torch.zeros_like(federation.offsets),
        client_test=None,
    )
