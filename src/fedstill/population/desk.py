"""The client's side of a run: it opens orders, checks them, trains or answers a question, and notes each of them.

No order is believed before it was checked: version, run, round, form of the model, finite numbers, size. No code
arrives, because the method is the client's own copy, built from the text of the experiment that its operator holds.
docs/wire.md says what travels, and what happens to clients that are late, lost or new.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedstill.compose.combine import broadcast_of, first_state
from fedstill.compose.moving import moving, with_rest
from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.population import Order
from fedstill.core.seeds import Secret
from fedstill.core.tree import rows, select, stack, to_device
from fedstill.core.types import Dataset, Federation, Tree, Uploads, Weights
from fedstill.loop.federate import Built, first_weights, make_task, share_states_of, suited
from fedstill.loop.guard import is_finite
from fedstill.loop.message import encode
from fedstill.loop.privacy_plan import fingerprint, rounds_a_client_may_play, with_sent_counts
from fedstill.loop.site import Site
from fedstill.population.memory import Memory
from fedstill.population.parts import base_digest, travelling
from fedstill.population.wire import (
    check_form,
    digest_of,
    facts_of,
    form_of,
    pack_tree,
    seal,
    shown,
    unpack_tree,
    unseal,
)
from fedstill.storage.files import from_json, lock, read_text, write_whole
from fedstill.storage.secrets import read_secret

LARGEST_ORDER = 1 << 30  # bytes
AUDIT_FILE, SPENT_FILE, SECRET_FILE, ROWS_FILE = "audit.jsonl", "spent.jsonl", "secret", "rows"
SPENT_LOCK = "spent.lock"
EVALUATION = "evaluation"  # a question that every client knows, whatever its method: how good a model is


class Made(NamedTuple):
    """A client's answer to an order: its kind, its body, the note for the audit, and facts for the server."""

    kind: str
    body: bytes
    about: dict[str, Any]
    facts: dict[str, Any] = {}  # beside the body, to the server


class Desk:
    """Answers the orders of one run for one client. Its folder holds memories, the secret, and the notes.

    built: the run as this client's own copy of the experiment says it, with the client's data alone (see `held_by`).
    run: facts that the server must have, too: the run's name, a digest of the experiment. fedstill's version is added.
    largest: bytes of the largest order that is read.
    begin_anew: whether a client that lost its memory goes on with a first one; else it says so and is left out.
    evaluates: whether it measures models on the rows that it holds back; its operator decides.
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
        evaluates: bool = False,
    ) -> None:
        self.client, self.folder, self.run = client, folder, facts_of(run)
        self.largest, self.begin_anew, self.rounds = largest, begin_anew, built.schedule.rounds
        self.evaluates = evaluates
        folder.mkdir(parents=True, exist_ok=True)
        self._secret = read_secret(folder / SECRET_FILE)
        engines = built.engines(model=built.model, federation=built.federation)
        task = make_task(built, suited(phases_of(built.method), built.model, built.training), engines)
        self._first = first_weights(built, engines.trainer)
        first, phases = share_states_of(task.phases, self._first, built.model)
        task = replace(task, phases=phases, noise_seed=self._seed(json.dumps(self.run, sort_keys=True).encode()))
        self._base = base_digest(self._first, built.model)
        self.task = with_sent_counts(task)
        self._check_rows()
        self.site = Site(self.task)
        self.memory = Memory(folder, to_device(first, "cpu"), {**self.run, "client": client})
        self.allowed = rounds_a_client_may_play(self.task, self._first, self.rounds)
        with lock(folder / SPENT_LOCK, wait=True):
            _lines(folder / SPENT_FILE)  # a damaged file is refused before the first order

    def answer(self, common: bytes, own: bytes) -> bytes:
        """Return the answer to an order: an upload, an answer to a question, or the reason why there is none.

        common: the part of the order that all clients get. own: this client's part.
        """
        began, noted = time.time(), digest_of(common)
        try:
            made = self._answer(common, own, noted)
        except FedstillError as error:
            reason = shown(error, 300)
            made = Made("refused", b"", {"reason": reason}, {"reason": reason})
        except Exception as error:  # of the client's own work; its text may hold data, and stays with the client
            kind, words = type(error).__name__, shown(error, 200)
            reason = f"{kind} in the client's own work: its audit has the text"
            made = Made("refused", b"", {"reason": f"{kind}: {words}"}, {"reason": reason})
        facts = {"order": noted, "client": self.client}
        data = seal({**facts, "kind": made.kind, **made.facts}, made.body)
        note = {"time": round(began, 3), "order": noted, "sent": made.kind, **made.about}
        note |= {"bytes_in": len(common) + len(own), "bytes_out": len(data), "seconds": round(time.time() - began, 3)}
        try:
            _add_line(self.folder / AUDIT_FILE, note)
        except OSError:  # what is not noted does not leave
            data = seal({**facts, "kind": "refused", "reason": "this client cannot write its audit"})
        return data

    def _answer(self, common: bytes, own: bytes, noted: str) -> Made:
        facts, body = unseal(common, limit=self.largest)
        mine = unseal(own, limit=self.largest).facts
        self._check_facts(facts, mine, noted)
        tree = unpack_tree(body)
        if not is_finite(tree):
            raise FedstillError("the order holds NaN or Inf")
        if facts["kind"] == "ask":
            return self._ask(facts, tree, common, noted)
        if facts.get("base", "") != self._base:
            raise FedstillError(
                "the server's model has other frozen tensors than this client's, and they do not travel: set "
                "model.start to the same file at both, or leave it out at both"
            )
        return self._play(facts["round"], tree, mine, common, noted)

    def _check_facts(self, facts: Mapping[str, Any], mine: Mapping[str, Any], noted: str) -> None:
        for name, expected in self.run.items():
            if facts.get(name) != expected:
                theirs = shown(facts.get(name), 80)
                raise FedstillError(
                    f"the server's {name} is '{theirs}', and this client's is '{expected}': use the same at both"
                )
        if facts.get("kind") not in ("play", "ask"):
            raise FedstillError(f"unknown kind of order: '{shown(facts.get('kind'))}'")
        if type(facts.get("round")) is not int or not 1 <= facts["round"] <= self.rounds:
            raise FedstillError(f"an order of round {shown(facts.get('round'))}: this run has {self.rounds} rounds")
        if mine.get("order") != noted or mine.get("client") != self.client:
            raise FedstillError("the order is another client's, or its two parts do not belong together")
        last = facts["round"] - (facts["kind"] == "play")  # a model is measured after its round
        past = [0, mine.get("oldest"), mine.get("memory_of"), last]
        if any(type(number) is not int for number in past) or past != sorted(past):
            raise FedstillError(f"an order of round {facts['round']} cannot name the memories of rounds {past[1:3]}")

    def _play(self, number: int, tree: Tree, mine: Mapping[str, Any], common: bytes, noted: str) -> Made:
        if tree.keys() != {"start", "received"} or not isinstance(tree["received"], dict):
            raise FedstillError("the order holds something else than a model and slots")
        check_form({"start": tree["start"]}, {"start": moving(self._first, self.task.model)._asdict()}, "the order")
        self._check_received(number, tree["received"])
        memory, lost = self._memory(mine["memory_of"])
        kept = pack_tree(memory)
        method, device = self.task.method(number), self.task.engine.device
        if any(release.multiplier is not None and release.when == "round" for release in method.releases):
            self._spend(noted, number, memory=digest_of(kept))
        tree = to_device(tree, device)
        start = with_rest(Weights(**tree["start"]), to_device(self._first, device))
        order = Order(number, start, tree["received"])
        states = to_device(stack([memory]), device)
        uploads, after = self.site.play(order, np.asarray([self.client]), states, self._seed(common, kept))
        assert isinstance(uploads, Uploads)  # its engine trains in this process
        # noise on the way hides from the server, by intention, whose training broke
        after = states if method.per_client and not is_finite(after) else after
        self.memory.write(number, to_device(rows(after, 0), "cpu"))
        self.memory.forget(mine["oldest"])
        upload = travelling(select(uploads, 0), self.client, self.task.model, self.task.training)
        about = {"round": number, "from_memory_of": mine["memory_of"], **lost}
        return Made("upload", encode(upload, round=number), about, lost)

    def _check_received(self, number: int, received: Tree) -> None:
        """Compare slots with the first ones of this client's own copy of the method, where these have a form."""
        method = self.task.method(number)
        for slot, first in broadcast_of(method, first_state(method, self._first)).items():
            if form_of(first):
                sent = {slot: received[slot]} if slot in received else {}
                check_form(sent, {slot: first}, "the order's slot ")

    def _memory(self, round: int) -> tuple[Tree, dict[str, Any]]:
        """Return the memory of a round, and facts about it: that the client has begun anew, and why."""
        try:
            return self.memory.read(round), {}
        except FedstillError as error:
            if not self.begin_anew:
                raise
            return self.memory.first, {"begun_anew": str(error)}

    def _ask(self, facts: Mapping[str, Any], sent: Tree, common: bytes, noted: str) -> Made:
        number, name = facts["round"], facts.get("question")
        if name == EVALUATION:
            return self._evaluate(number, sent)
        method = self.task.method(number)
        question = next((question for question in method.questions if question.name == name), None)
        if question is None:
            raise FedstillError(f"this client's own copy of the method has no question '{shown(name)}'")
        if any(release.what == name and release.multiplier is not None for release in method.releases):
            self._spend(noted, number, question=question.name)
        elif self.allowed is not None:
            raise FedstillError(f"the answer to '{question.name}' has no noise, and this client has a budget")
        sent = to_device(sent, self.task.engine.device)
        answer = self.site.answer(question, self.client, sent, round=number, noise_seed=self._seed(common))
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return Made("answer", pack_tree(to_device(answer, "cpu")), {"round": number, "question": question.name})

    def _evaluate(self, number: int, sent: Tree) -> Made:
        """Count right answers of a model on the rows that this client holds back, and sum its losses over them."""
        if not self.evaluates:
            raise FedstillError("this client's operator did not agree to measure models")
        if self.allowed is not None:
            raise FedstillError("what a model gets right has no noise, and this client has a budget")
        held = self.task.federation.client_test
        if held is None or not len(held[0]):
            raise FedstillError("this client holds back no rows to measure on: set data.client_test_share, e.g. 0.2")
        check_form(sent, self._first._asdict(), "the model to measure")
        weights = Weights(**to_device(sent, self.task.engine.device))
        x, y = self.task.federation.train.x[held[0]], self.task.federation.train.y[held[0]]
        logits = self.task.trainer.outputs(weights, x, features=False, keep=False).logits.float().cpu()
        right = (logits.argmax(dim=1) == y).sum()
        loss = torch.nn.functional.cross_entropy(logits.double(), y, reduction="sum")
        measured = {"right": right, "loss": loss, "count": torch.tensor(len(y))}
        return Made("answer", pack_tree(measured), {"round": number, "question": EVALUATION})

    def _spend(self, noted: str, number: int, *, memory: str = "", question: str = "") -> None:
        """Note an order before it gets noise. The same order is free, because its answer has the same bits.

        The file is read anew each time, under a lock, because a second desk may stand over the same folder.
        """
        if self.allowed is None:
            return
        path = self.folder / SPENT_FILE
        with lock(self.folder / SPENT_LOCK, wait=True):
            line = {"order": noted, "round": number, "memory": memory, "question": question}
            spent = _lines(path)
            if line in spent:
                return
            same = [line for line in spent if line["question"] == question]
            if question and same:
                raise FedstillError(f"this client's budget allows one answer to '{question}', and it has given it")
            played = len(same) if len(self.task.phases) == 1 else max(number - 1, len(same))
            if not question and played >= self.allowed:
                raise FedstillError(
                    f"this client's budget is spent: privacy.epsilon = {self.task.privacy.epsilon:g} allows "
                    f"{self.allowed} rounds, and it has answered so many"
                )
            _add_line(path, line, durable=True)

    def _check_rows(self) -> None:
        """Refuse other rows than this client had before, where noise protects them.

        The noise of an order is drawn once, so that it would cancel between two sets of rows, and noisy label counts
        leave once a run.
        """
        now = fingerprint(self.task, self.run, "", start=self._first, secret=self._secret)
        path = self.folder / ROWS_FILE
        if not now:
            return
        if not path.exists():
            write_whole(path, now)
        if path.read_text(encoding="utf-8") != now:
            raise FedstillError(
                f"this client's rows or settings are not those of {path}, and its noise protects these: restore them, "
                "or begin a run of another name in another folder"
            )

    def _seed(self, *parts: bytes) -> Secret:
        """Return a secret that follows from the client's own, the bytes of an order, and the memory it goes on from.

        So the same order gets the same noise, and asking again tells nothing new. Any other order, or the same one with
        another memory, gets other noise, because equal noise would cancel between two uploads that differ.
        """
        hashed = hashlib.blake2b(key=self._secret)
        for part in parts:
            hashed.update(len(part).to_bytes(8, "little"))
            hashed.update(part)
        return Secret.of(hashed.digest())


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
    """Return the lines of a file; half a line at its end is taken away, because the answer it is about never left."""
    if not path.exists():
        return []
    try:
        whole, end, torn = read_text(path).rpartition("\n")
        lines = [from_json(line) for line in whole.splitlines()]
    except ValueError:
        raise FedstillError(f"{path} is damaged: without it nobody knows how much of the budget is spent") from None
    if torn:
        write_whole(path, whole + end)
    return lines


def _add_line(path: Path, line: Mapping[str, Any], *, durable: bool = False) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
