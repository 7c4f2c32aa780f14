"""A question to every client before the first round: a function runs on its own data, and its answer is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.tree import byte_size, flatten, stack, to_device
from fedstill.core.types import Answers, ClientData, Federation, Tree
from fedstill.guard import AuditRecord, is_finite


class Asked:
    """Asks the clients that hold data, and counts what leaves them.

    A client that fails, or whose answer has another form than the first good one or holds NaN or Inf, is left out and
    recorded; nothing that one client does ends the run.
    """

    def __init__(self, federation: Federation, clients: np.ndarray, device: torch.device, round: int) -> None:
        self.federation, self.clients, self.device, self.round = federation, clients, device, round
        self.records: list[AuditRecord] = []
        self.bytes_up = 0

    def ask(self, question: Callable[[ClientData], Tree], /, among: Collection[int] | None = None) -> Answers:
        """The answers of all clients (`among` some ids), stacked in the order of their ids."""
        good: dict[int, Tree] = {}
        for client in (one for one in self.clients.tolist() if among is None or one in among):
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
