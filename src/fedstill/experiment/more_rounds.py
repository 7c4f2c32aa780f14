"""Another number of rounds for a run or a comparison that has begun."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.loop.checkpoint import list_checkpoints
from fedstill.report import counted


def with_rounds(experiment: Experiment, rounds: int, folder: Path) -> tuple[Experiment, list[str]]:
    """Return the experiment with so many rounds, and lines that say how it will differ from an uninterrupted run.

    folder: holds the begun run, or the begun runs of a comparison. Fewer rounds than they have done are refused.
    """
    longer = experiment.replace(rounds=rounds)
    places = [folder, *folder.glob("*/seed-*")]
    done = max((number for place in places for number, _ in list_checkpoints(place / "checkpoints")), default=0)
    if rounds < done or rounds == done < experiment.rounds:  # the last round of a run is evaluated when it ends
        least = done if done >= experiment.rounds else done + 1
        raise FedstillError(
            f"--rounds {rounds}: '{folder}' has done {counted(done, 'round')} already: give at least {least}, or start "
            "a new run"
        )
    notes = []
    if experiment.rounds == done < rounds and done % experiment.evaluate_every:
        notes.append(
            f"round {done} stays evaluated, because it was the last: a run of {rounds} rounds at a stretch would skip "
            f"it (evaluate_every = {experiment.evaluate_every}); its models are the same, its best one may differ"
        )
    return longer, notes
