"""A question to every client before the first round, and the check of each answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.population import Population
from fedstill.core.setup import AnyQuestion, Question
from fedstill.core.tree import byte_size, flatten, stack, to_device
from fedstill.core.types import Answers, Tree
from fedstill.loop.guard import AuditRecord, is_finite


class Asked:
    """Asks the clients that hold data, and counts what leaves them and what they are sent for it.

    A client that fails, or whose answer has another form than the first good one or holds NaN or Inf, is left out and
    recorded; nothing that one client does ends the run.

    releases: what the method tells the privacy accountant that clients answer, each client once.
    strict: a question that belongs to none of them is refused before anybody is asked.
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
        tell: Callable[[str, float], None] = lambda what, share: None,
    ) -> None:
        self.population, self.clients, self.device, self.round = population, clients, device, round
        self.tell = tell
        self.strict, self.open = strict, {name: set(clients.tolist()) for name in releases}
        self.records: list[AuditRecord] = []
        self.bytes_up = self.bytes_down = 0
        self.questions_open = 0  # that no release speaks of

    def ask(
        self, question: AnyQuestion, /, among: Collection[int] | None = None, *, sent: Any = None, release: str = ""
    ) -> Answers:
        """The answers of all clients (`among` some ids), stacked in the order of their ids."""
        good: dict[int, Tree] = {}
        asked = [one for one in self.clients.tolist() if among is None or one in among]
        self._account(release, set(asked))
        self.bytes_down += len(asked) * (0 if sent is None else byte_size(sent))
        answers = self.population.ask(question, asked, round=self.round, sent=sent)
        for count, (client, answer) in enumerate(answers, 1):
            if fault := self._fault(answer, next(iter(good.values()), None)):
                self.records.append({"round": self.round, "client": client, "reason": f"preparation: {fault}"})
            else:
                good[client] = cast(Tree, answer)
            if isinstance(question, Question):
                self.tell(question.name, count / len(asked))
        if not good:
            raise FedstillError(f"round {self.round}: no client gave an answer that can be used: see audit.jsonl")
        good = dict(sorted(good.items()))
        values = to_device(stack(list(good.values())), self.device)
        self.bytes_up += byte_size(values)
        return Answers(torch.tensor(list(good), dtype=torch.int64), values)

    def _account(self, release: str, asked: set[int]) -> None:
        """A release covers one answer of each client: another one, or one without a release, has no noise."""
        left = self.open.get(release, set())
        if asked <= left:
            left -= asked
            return
        self.questions_open += 1
        if self.strict:
            what = f"a second answer of '{release}'" if release in self.open else "an answer that no release speaks of"
            raise FedstillError(f"privacy.epsilon cannot be kept: the method wants {what}: take privacy.epsilon away")

    def _fault(self, answer: Tree | str, like: Tree | None) -> str:
        """Return what is wrong with an answer; empty: nothing."""
        if isinstance(answer, str):
            return answer
        if not is_finite(answer):
            return "its answer holds NaN or Inf"
        return "" if like is None or _form(answer) == _form(like) else "its answer has another form than the others"


def _form(tree: Tree) -> dict[str, object]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in flatten(tree).items()}
