"""Where clients live: orders and questions go to a `Population`, uploads and answers come back. Types only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedstill.core.setup import AnyQuestion
from fedstill.core.trainer import Messages, Trained
from fedstill.core.types import Seed, Tree, Uploads, Weights

ClientRows = tuple[np.ndarray, Tree]  # (ids, what they remember, stacked in that order)
Answer = Tree | str  # or the reason why there is none


class Stay(NamedTuple):
    """The rounds in which a client is a member of the run."""

    first: int = 1
    last: int | None = None  # None: to the end

    def holds(self, round: int) -> bool:
        return self.first <= round and (self.last is None or round <= self.last)


class Order(NamedTuple):
    """The order that the server sends to every client of a cohort."""

    round: int
    start: Weights
    received: Tree  # slots that the server broadcasts


class Population(Protocol):
    """The clients of a run, wherever they live. Nothing that one of them does ends the run."""

    def play(self, order: Order, ids: np.ndarray) -> Uploads | Messages:
        """Let the clients `ids` train by an order; return what they send, stacked where they are trusted."""
        ...

    def keep(self, round: int, ids: np.ndarray) -> None:
        """Hear that the server took the uploads of these clients: they remember that round. The others do not."""
        ...

    def ask(
        self, question: AnyQuestion, ids: Collection[int], *, round: int, sent: Any
    ) -> Iterator[tuple[int, Answer]]:
        """Ask clients, and yield the answer of each as it comes, or the reason why there is none."""
        ...

    def snapshot(self) -> Iterator[ClientRows]:
        """Yield everything that a checkpoint must hold about clients, in parts that fit in memory."""
        ...

    def restore(self, parts: Iterable[ClientRows]) -> None:
        """Take up what `snapshot` gave."""
        ...


class Host(Protocol):
    """Trains clients whose memories its caller keeps: this process, or several that are as good as it."""

    def play(self, order: Order, ids: np.ndarray, states: Tree, noise_seed: Seed) -> Trained:
        """Train the clients `ids`, whose memories are `states`; return what leaves them, and their memories after it.

        noise_seed: of the noise that they put on their uploads.
        """
        ...

    def answers(
        self, question: AnyQuestion, ids: Collection[int], sent: Any, *, round: int, noise_seed: Seed
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the answer of each client as it comes, or the error in which it ended."""
        ...
