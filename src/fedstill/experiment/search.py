"""A search for the best point of some ranges by Optuna, with pruning of points that fall behind.

Nothing of the search itself is stored. A search that goes on asks the same questions again in the same order, and the
folders of its runs give the answers at once, so that it comes to the same points as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import FedstillError
from fedstill.experiment.points import Axis
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Row
from fedstill.report.sensitivity import score_of

if TYPE_CHECKING:
    from optuna.trial import Trial

DIGITS = 3  # of a number that a range gives, so that it can be read and typed
LEAST = 4  # trials before any is pruned: a median of fewer says little


class Search:
    """Asks for points, and learns from their scores; the same seed and the same scores lead to the same points."""

    def __init__(self, axes: Sequence[Axis], *, trials: int, seed: int, rounds: int, at_once: int) -> None:
        try:
            import optuna
        except ImportError:
            raise FedstillError("--search needs Optuna: pip install 'fedstill[search]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.axes, self.trials = axes, trials
        self.study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(
                seed=seed % 2**32, n_startup_trials=max(LEAST, trials // 4), constant_liar=at_once > 1
            ),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=LEAST, n_warmup_steps=rounds // 4),
        )

    def ask(self) -> tuple[Trial, tuple[str, ...]]:
        """Return the next trial and the settings of its point."""
        trial = self.study.ask()
        return trial, tuple(f"{axis.key}={_draw(trial, axis)}" for axis in self.axes)

    def tell(self, trial: Trial, score: float | None) -> None:
        """Note the score of a trial; None: it was pruned, or its score is not a number."""
        import optuna

        if score is None or not math.isfinite(score):
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, score)


def _draw(trial: Trial, axis: Axis) -> str:
    if not axis.is_range:
        return str(trial.suggest_categorical(axis.key, axis.values))
    low, high = axis.numbers
    if isinstance(low, int) and isinstance(high, int):
        return str(trial.suggest_int(axis.key, low, high, log=True))
    return f"{trial.suggest_float(axis.key, low, high, log=True):.{DIGITS}g}"


class Pruner(Callback):
    """Ends a run whose score is below the median of the finished trials at the same round.

    A resumed run replays its past rows first, so it ends in the round where it would have ended.
    """

    def __init__(self, trial: Any, rounds: int) -> None:
        self._trial, self._rounds = trial, rounds
        self.ended: int | None = None  # the round after which the trial was pruned

    def on_start(self, info: RunInfo) -> bool | None:
        return any(self.on_round(row) for row in info.past)

    def on_round(self, row: Row) -> bool | None:
        score = score_of(row)
        if self.ended is None and score is not None and row["round"] < self._rounds:  # the last round ends it anyway
            self._trial.report(score, row["round"])
            if self._trial.should_prune():
                self.ended = int(row["round"])
        return self.ended is not None
