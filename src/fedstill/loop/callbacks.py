"""What may watch a run, and stop it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedstill.core.errors import FedstillError
from fedstill.loop.evaluate import is_lower_better, number_of
from fedstill.loop.history import Result, Row


@dataclass(frozen=True)
class RunInfo:
    """The facts that are known before the first round. `past` holds the rows of a resumed run."""

    method: str
    rounds: int
    population: int
    cohort: int
    engine: str
    device: str
    model: str
    parameters: int
    run_dir: Path | None
    past: tuple[Row, ...] = ()


class Callback(Protocol):
    """Subclass it and write only the methods you need."""

    def on_start(self, info: RunInfo) -> bool | None:
        """Before the first round of this call; True: there is nothing left to do."""
        return None

    def on_prepare(self, line: str, share: float) -> None:
        """While a method prepares its first round (pre-training, ...): a line, and the share that is done."""
        return

    def on_round(self, row: Row) -> bool | None:
        """After each round; True stops the run after it."""
        return None

    def on_end(self, result: Result) -> None:
        """After the last round."""
        return


class EarlyStop(Callback):
    """Stop when `metric` has not improved by more than `margin` in `patience` evaluations.

    A resumed run replays its past rows first, so it stops in the round where it would have stopped.
    """

    def __init__(self, patience: int, metric: str = "accuracy", *, margin: float = 0.0) -> None:
        if patience < 1:
            raise FedstillError(f"early_stop.patience = {patience}: use at least 1 evaluation")
        self.patience, self.metric, self.margin = patience, metric, margin
        self.reason = ""  # why the run ended early, in words; empty: it did not
        self._best: float | None = None
        self._waited = 0

    def on_start(self, info: RunInfo) -> bool | None:
        return self.replay(info.past)

    def replay(self, rows: Iterable[Row]) -> bool:
        """Forget every round, look at these rows instead, and return whether the run ended with the last of them."""
        self._best, self._waited, self.reason = None, 0, ""
        answers = [self.on_round(row) for row in rows]
        return bool(answers and answers[-1])

    def on_round(self, row: Row) -> bool | None:
        value = number_of(row, self.metric, asked="early stop") if "accuracy" in row else row.get(self.metric)
        if value is None:
            return False
        score = -value if is_lower_better(self.metric) else value
        if self._best is None or score > self._best + self.margin:
            self._best, self._waited = score, 0
        else:
            self._waited += 1
        if self._waited < self.patience:
            return False
        times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
        self.reason = f"ended in round {row['round']}, because {self.metric} did not improve in {times} (early_stop)"
        return True
