"""A question to every client before the first round, and the check of each answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.population import Population
from fedstill.core.setup import AnyQuestion, Question
from fedstill.core.tree import byte_size, stack, to_device
from fedstill.core.types import Answers, Tree
from fedstill.loop.guard import AuditRecord, is_finite
from fedstill.loop.outliers import outliers, slot_norms

UNUSUAL = "its answer has another form than most answers"


class Asked:
    """Asks the clients that hold data, and counts what leaves them and what they are sent for it.

    A client that fails is left out and recorded. So is one whose answer holds NaN or Inf, has another form than most
    answers, or is far larger than most. Nothing that one client does ends the run.

    releases: what the method tells the privacy accountant that clients answer, each client once.
    strict: a question that belongs to none of them is refused before anybody is asked.
    outlier: as in Guard.
    tell: hears the name of a question and the share of the clients that have answered.
    """

    def __init__(
        self,
        population: Population,
        clients: np.ndarray,
        device: torch.device,
        round: int,
        *,
        releases: Collection[str] = (),
        strict: bool = False,
        outlier: float = 0.0,
        tell: Callable[[str, float], None] = lambda line, share: None,
    ) -> None:
        self.population, self.clients, self.device, self.round = population, clients, device, round
        self.outlier, self.tell = outlier, tell
        self.strict, self.open = strict, {name: set(clients.tolist()) for name in releases}
        self.records: list[AuditRecord] = []
        self.bytes_up = self.bytes_down = 0
        self.questions_open = 0  # that no release speaks of

    def ask(
        self, question: AnyQuestion, /, among: Collection[int] | None = None, *, sent: Any = None, release: str = ""
    ) -> Answers:
        """The answers of all clients (`among` some ids), stacked in the order of their ids."""
        good: dict[int, Tree] = {}
        faults: dict[int, str] = {}
        asked = [client for client in self.clients.tolist() if among is None or client in among]
        self._account(release, set(asked))
        self.bytes_down += len(asked) * (0 if sent is None else byte_size(sent))
        answers = self.population.ask(question, asked, round=self.round, sent=sent)
        for count, (client, answer) in enumerate(answers, 1):
            if isinstance(answer, str):
                faults[client] = answer
            elif not is_finite(answer):
                faults[client] = "its answer holds NaN or Inf"
            else:
                good[client] = answer
            if isinstance(question, Question):
                self.tell(question.name, count / len(asked))
        usual = _usual_form(good)
        faults |= {client: UNUSUAL for client, answer in good.items() if _form(answer) != usual}
        good = {client: answer for client, answer in sorted(good.items()) if client not in faults}
        faults |= self._outliers(good)
        good = {client: answer for client, answer in good.items() if client not in faults}
        for client, fault in sorted(faults.items()):
            self.records.append({"round": self.round, "client": client, "reason": f"preparation: {fault}"})
        if not good:
            raise FedstillError(f"round {self.round}: no client gave an answer that can be used: see audit.jsonl")
        values = to_device(stack(list(good.values())), self.device)
        self.bytes_up += byte_size(values)
        return Answers(torch.tensor(list(good), dtype=torch.int64), values)

    def _outliers(self, answers: Mapping[int, Tree]) -> dict[int, str]:
        """Return the clients whose answers are far larger than most, with the reason."""
        if not self.outlier or not answers:
            return {}
        norms = {name: values.double().cpu().numpy() for name, values in slot_norms(stack([*answers.values()])).items()}
        clients = list(answers)
        return {clients[place]: reason for place, reason in outliers(norms, [], self.outlier).items()}

    def _account(self, release: str, asked: set[int]) -> None:
        """A release covers one answer of each client: another one, or one without a release, has no noise."""
        left = self.open.get(release, set())
        if asked <= left:
            left -= asked
            return
        self.questions_open += 1
        if self.strict:
            answer = (
                f"a second answer of '{release}'" if release in self.open else "an answer that no release speaks of"
            )
            raise FedstillError(f"privacy.epsilon cannot be kept: the method wants {answer}: take privacy.epsilon away")


def _usual_form(answers: Mapping[int, Tree]) -> frozenset[object]:
    """Return the form that most answers have; of equally many, the form of the lowest id."""
    forms = Counter(_form(answer) for _, answer in sorted(answers.items()))
    return max(forms, key=forms.__getitem__, default=frozenset())


def _form(node: Any, path: tuple[str, ...] = ()) -> frozenset[object]:
    """Return what answers must have alike to be stacked: names, nesting with its empty parts, shapes and types."""
    if not isinstance(node, dict):
        return frozenset([(path, node.shape, node.dtype)])
    return frozenset([path]).union(*(_form(child, (*path, name)) for name, child in node.items()))
