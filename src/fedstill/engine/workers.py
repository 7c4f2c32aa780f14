"""Clients side by side on a CPU: each worker is a thread that takes the next piece of work, and torch has one thread.

Torch's own threads share one operation and wait for each other at its end, by spinning. As soon as something else runs
on a core, all wait for the one that lost its turn, at every operation. Workers wait for each other once a round. A
piece is computed by one thread, so its bits do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from fedstill.core.trainer import threads, threads_are_given

Piece = TypeVar("Piece")


class Workers:
    """The threads of an engine beside the one that calls it. They stay, because torch keeps memory for each thread.

    There are as many workers as torch has threads when the engine is made. Where somebody gave the number of threads
    (`engine.threads`), and on a GPU, the caller works alone, and torch has its threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.given = threads_are_given() or device.type != "cpu"
        self.count = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def quiet(self) -> AbstractContextManager[None]:
        """Let torch have one thread, unless somebody gave the number."""
        return threads(torch.get_num_threads() if self.given else 1)

    def loud(self) -> AbstractContextManager[None]:
        """Let torch have all its threads, for one model that trains alone."""
        return threads(self.count)

    def do(self, pieces: Sequence[Piece], work: Callable[[int, Iterator[Piece]], None]) -> None:
        """Call `work` once in each worker, with its number and the pieces; whoever is free takes the next piece."""
        waiting = iter(pieces)  # the interpreter takes a piece in one step: no two workers get the same
        count = 1 if self.given else min(self.count, len(pieces))
        if count <= 1:
            work(0, waiting)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count - 1, "fedstill-worker")
        with self.quiet():
            others = [self._pool.submit(work, number, waiting) for number in range(1, count)]
            try:
                work(0, waiting)
            finally:
                for _ in waiting:  # after a failure nobody takes another piece
                    pass
                errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error
