"""A question to every client before the first round: a function runs on its own data, and its answer is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.tree import byte_size, flatten, stack, to_device
from fedstill.core.types import Answers, ClientData, Federation, Tree
from fedstill.loop.guard import AuditRecord, is_finite


class Asked:
    """Asks the clients that hold data, and counts what leaves them and what they are sent for it.

    A client that fails, or whose answer has another form than the first good one or holds NaN or Inf, is left out and
    recorded; nothing that one client does ends the run.

    releases: what the method tells the privacy accountant that clients answer, each client once.
    strict: a question that belongs to none of them is refused before anybody is asked.
    """

    def __init__(
        self,
        federation: Federation,
        clients: np.ndarray,
        device: torch.device,
        round: int,
        *,
        releases: Collection[str] = (),
        strict: bool = False,
    ) -> None:
        self.federation, self.clients, self.device, self.round = federation, clients, device, round
        self.strict, self.open = strict, {name: set(clients.tolist()) for name in releases}
        self.records: list[AuditRecord] = []
        self.bytes_up = self.bytes_down = 0
        self.questions_open = 0  # that no release speaks of

    def ask(
        self,
        question: Callable[[ClientData], Tree],
        /,
        among: Collection[int] | None = None,
        *,
        sent: Any = None,
        release: str = "",
    ) -> Answers:
        """The answers of all clients (`among` some ids), stacked in the order of their ids."""
        good: dict[int, Tree] = {}
        asked = [one for one in self.clients.tolist() if among is None or one in among]
        self._account(release, set(asked))
        self.bytes_down += len(asked) * (0 if sent is None else byte_size(sent))
        for client in asked:
            answer = self._answer(question, client, next(iter(good.values()), None))
            if isinstance(answer, str):
                self.records.append({"round": self.round, "client": client, "reason": f"preparation: {answer}"})
            else:
                good[client] = answer
        if not good:
            raise FedstillError(f"round {self.round}: no client gave an answer that can be used: see audit.jsonl")
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

    def _answer(self, question: Callable[[ClientData], Tree], client: int, like: Tree | None) -> Tree | str:
        """A client's answer, or what is wrong with it."""
        try:
            answer = question(self._data(client))
        except FedstillError:
            raise  # a mistake of the user's, not a client's fault
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not is_finite(answer):
            return "its answer holds NaN or Inf"
        if like is not None and _form(answer) != _form(like):
            return "its answer has another form than the others"
        return answer

    def _data(self, client: int) -> ClientData:
        first, last = self.federation.offsets[client : client + 2].tolist()
        rows = self.federation.indices[first:last]
        train = self.federation.train
        return ClientData(client, train.x[rows].to(self.device), train.y[rows].to(self.device))


def _form(tree: Tree) -> dict[str, object]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in flatten(tree).items()}
