"""The client's side of a run: it opens orders, checks them, trains or answers a question, and notes each of them.

No order is believed before it was checked: version, run, round, form of the model, finite numbers, size. No code
arrives, because the method is the client's own copy, built from the text of the experiment that its operator holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.compose.combine import broadcast_of, first_state
from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.population import Order
from fedstill.core.tree import rows, select, stack, to_device
from fedstill.core.types import Dataset, Federation, Tree, Uploads, Weights
from fedstill.loop.federate import Built, first_weights, make_task, share_states_of, suited
from fedstill.loop.guard import is_finite
from fedstill.loop.message import encode
from fedstill.loop.privacy_plan import rounds_a_client_may_play, with_sent_counts
from fedstill.loop.site import Site
from fedstill.population.memory import Memory
from fedstill.population.parts import travelling
from fedstill.population.wire import check_form, digest_of, form_of, pack_tree, seal, unpack_tree, unseal

LARGEST_ORDER = 1 << 30  # bytes
AUDIT_FILE, SPENT_FILE, SECRET_FILE = "audit.jsonl", "spent.jsonl", "secret"
SECRET_BYTES = 32


class Desk:
    """Answers the orders of one run for one client. Its folder holds memories, the secret, and the notes.

    built: the run as this client's own copy of the experiment says it, with the client's data alone (see `held_by`).
    run: facts that the server must have, too: the run's name, the version of fedstill, a digest of the experiment.
    largest: bytes of the largest order that is read.
    begin_anew: whether a client that lost its memory goes on with a first one; else it says so and is left out.
    """

    def __init__(
        self,
        built: Built,
        client: int,
        folder: Path,
        *,
        run: Mapping[str, str],
        largest: int = LARGEST_ORDER,
        begin_anew: bool = False,
    ) -> None:
        self.client, self.folder, self.run = client, folder, dict(run)
        self.largest, self.begin_anew, self.rounds = largest, begin_anew, built.schedule.rounds
        folder.mkdir(parents=True, exist_ok=True)
        self._secret = read_secret(folder / SECRET_FILE)
        engines = built.engines(model=built.model, federation=built.federation)
        task = make_task(built, suited(phases_of(built.method), built.model, built.training), engines)
        self._first = first_weights(built, engines.trainer)
        first, phases = share_states_of(task.phases, self._first, built.model)
        task = replace(task, phases=phases, noise_seed=self._seed(json.dumps(self.run, sort_keys=True).encode()))
        self.task = with_sent_counts(task)
        self.site, self.memory = Site(self.task), Memory(folder, to_device(first, "cpu"))
        self.allowed = rounds_a_client_may_play(self.task, self._first, self.rounds)
        self._spent = {line["order"]: line for line in _lines(folder / SPENT_FILE)}

    def answer(self, common: bytes, own: bytes) -> bytes:
        """Return the answer to an order: an upload, an answer to a question, or the reason why there is none.

        common: the part of the order that all clients get. own: this client's part.
        """
        began, noted = time.time(), digest_of(common)
        facts: dict[str, Any] = {"order": noted, "client": self.client}
        try:
            kind, about, body = self._answer(common, own, noted)
        except FedstillError as error:
            kind, about, body = "refused", {"reason": str(error)}, b""
        except Exception as error:  # of the client's own training: the server hears of it, and leaves the client out
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            kind, about, body = "refused", {"reason": reason}, b""
        data = seal({**facts, "kind": kind, **(about if kind == "refused" else {})}, body)
        note = {"time": round(began, 3), "order": noted, "sent": kind, **about}
        note |= {"bytes_in": len(common) + len(own), "bytes_out": len(data), "seconds": round(time.time() - began, 3)}
        _add_line(self.folder / AUDIT_FILE, note)
        return data

    def _answer(self, common: bytes, own: bytes, noted: str) -> tuple[str, dict[str, Any], bytes]:
        """Return the kind of the answer, a note about it, and its body."""
        facts, body = unseal(common, limit=self.largest)
        mine = unseal(own, limit=self.largest).facts
        self._check_facts(facts, mine, noted)
        number, tree = facts["round"], unpack_tree(body)
        if not is_finite(tree):
            raise FedstillError("the order holds NaN or Inf")
        seed = self._seed(common)
        if facts["kind"] == "ask":
            about = {"round": number, "question": str(facts.get("question"))[:80]}
            return "answer", about, self._ask(facts, tree, noted, seed)
        about = {"round": number, "from_memory_of": mine["memory_of"]}
        return "upload", about, self._play(number, tree, mine, noted, seed)

    def _check_facts(self, facts: Mapping[str, Any], mine: Mapping[str, Any], noted: str) -> None:
        for name, own in self.run.items():
            if facts.get(name) != own:
                theirs = str(facts.get(name))[:80]
                raise FedstillError(
                    f"the server's {name} is '{theirs}', and this client's is '{own}': use the same at both"
                )
        if facts.get("kind") not in ("play", "ask"):
            raise FedstillError(f"unknown kind of order: '{str(facts.get('kind'))[:40]}'")
        if type(facts.get("round")) is not int or not 1 <= facts["round"] <= self.rounds:
            raise FedstillError(f"an order of round {str(facts.get('round'))[:40]}: this run has {self.rounds} rounds")
        if mine.get("order") != noted or mine.get("client") != self.client:
            raise FedstillError("the order is another client's, or its two parts do not belong together")
        for name in ("memory_of", "oldest"):
            if type(mine.get(name)) is not int or not 0 <= mine[name] <= self.rounds:
                raise FedstillError(f"the order has no round '{name}'")

    def _play(self, number: int, tree: Tree, mine: Mapping[str, Any], noted: str, seed: int) -> bytes:
        check_form(tree, {"start": self._first._asdict(), "received": tree.get("received", {})}, "the order")
        self._check_received(number, tree["received"])
        memory = self._memory(mine["memory_of"])
        method, device = self.task.method(number), self.task.engine.device
        if any(release.multiplier is not None and release.when == "round" for release in method.releases):
            self._spend(noted, number)
        tree = to_device(tree, device)
        order = Order(number, Weights(**tree["start"]), tree["received"])
        states = to_device(stack([memory]), device)
        uploads, after = self.site.play(order, np.asarray([self.client]), states, seed)
        assert isinstance(uploads, Uploads)  # its engine trains in this process
        # noise on the way hides from the server, by intention, whose training broke
        kept = states if method.per_client and not is_finite(after) else after
        self.memory.write(number, to_device(rows(kept, 0), "cpu"))
        self.memory.forget(mine["oldest"])
        upload = travelling(select(uploads, 0), self.client, self.task.model, self.task.training)
        return encode(upload, round=number)

    def _check_received(self, number: int, received: Tree) -> None:
        """Compare slots with the first ones of this client's own copy of the method, where these have a form."""
        method = self.task.method(number)
        for slot, first in broadcast_of(method, first_state(method, self._first)).items():
            if slot in received and form_of(first):
                check_form({slot: received[slot]}, {slot: first}, "the order's slot ")

    def _memory(self, round: int) -> Tree:
        try:
            return self.memory.read(round)
        except FedstillError:
            if not self.begin_anew:
                raise
            return self.memory.first

    def _ask(self, facts: Mapping[str, Any], sent: Tree, noted: str, seed: int) -> bytes:
        number, name = facts["round"], facts.get("question")
        method = self.task.method(number)
        question = next((question for question in method.questions if question.name == name), None)
        if question is None:
            raise FedstillError(f"this client's own copy of the method has no question '{str(name)[:40]}'")
        if any(release.what == name and release.multiplier is not None for release in method.releases):
            self._spend(noted, number, question=question.name)
        elif self.allowed is not None:
            raise FedstillError(f"the answer to '{question.name}' has no noise, and this client has a budget")
        sent = to_device(sent, self.task.engine.device)
        answer = self.site.answer(question, self.client, sent, round=number, noise_seed=seed)
        if isinstance(answer, str):
            raise FedstillError(answer)
        return pack_tree(to_device(answer, "cpu"))

    def _spend(self, noted: str, number: int, question: str = "") -> None:
        """Note an order before it gets noise. The same order is free, because its answer has the same bits."""
        if self.allowed is None or noted in self._spent:
            return
        same = [line for line in self._spent.values() if line["question"] == question]
        if question and same:
            raise FedstillError(f"this client's budget allows one answer to '{question}', and it has given it")
        played = len(same) if len(self.task.phases) == 1 else max(number - 1, len(same))
        if not question and played >= self.allowed:
            raise FedstillError(
                f"this client's budget is spent: privacy.epsilon = {self.task.privacy.epsilon:g} allows {self.allowed} "
                "rounds, and it has answered so many"
            )
        line = {"order": noted, "round": number, "question": question}
        _add_line(self.folder / SPENT_FILE, line, durable=True)
        self._spent[noted] = line

    def _seed(self, order: bytes) -> int:
        """Return 64 bits that follow from the client's secret and the bytes of an order.

        So the same order gets the same noise, and asking again tells nothing new. Any other order gets other noise,
        because noise of one round alone would cancel between two orders of that round.
        """
        return int.from_bytes(hashlib.blake2b(order, key=self._secret, digest_size=8).digest(), "little")


def read_secret(path: Path) -> bytes:
    """Return a client's secret, which only its user can read; make it of the system's entropy if there is none."""
    if not path.exists():
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise FedstillError(
            f"{path} holds {len(secret)} bytes, and a secret has {SECRET_BYTES}: restore it from a copy"
        )
    return secret


def held_by(federation: Federation, client: int) -> Federation:
    """Return a federation with the rows of one client alone, under its own id, as it stands where the client lives."""
    first, last = federation.offsets[client : client + 2].tolist()
    places, train = federation.indices[first:last], federation.train
    return only_client(replace(train, x=train.x[places], y=train.y[places]), client, federation)


def only_client(data: Dataset, client: int, federation: Federation) -> Federation:
    """Return a federation of the same clients, of which only `client` holds rows: all rows of `data`."""
    offsets = torch.zeros_like(federation.offsets)
    offsets[client + 1 :] = len(data.y)
    nothing = replace(data, x=data.x[:0], y=data.y[:0])
    return Federation(
        data, nothing, torch.arange(len(data.y)), offsets, names=federation.names, public_facts=federation.public_facts
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError:
        raise FedstillError(f"{path} is damaged: without it nobody knows how much of the budget is spent") from None


def _add_line(path: Path, line: Mapping[str, Any], *, durable: bool = False) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
