"""Another number of rounds for a run or a comparison that has begun."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.experiment.build import build_early_stop
from fedstill.experiment.config import Experiment
from fedstill.experiment.run_folder import CONFIG_FILE
from fedstill.loop.checkpoint import list_checkpoints
from fedstill.report import counted
from fedstill.storage.files import from_json, read_text


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
    notes = _early_ends(experiment, places, folder)
    if experiment.rounds == done < rounds and done % experiment.evaluate_every:
        notes.append(
            f"round {done} stays evaluated, because it was the last: a run of {rounds} rounds at a stretch would skip "
            f"it (evaluate_every = {experiment.evaluate_every}); its models are the same, its best one may differ"
        )
    return longer, notes


def _early_ends(experiment: Experiment, places: list[Path], folder: Path) -> list[str]:
    """Return a line if runs of the folder ended early, because more rounds do not let them go on."""
    stop = build_early_stop(experiment)
    files = [place / "metrics.jsonl" for place in places]
    rows = [list(map(from_json, read_text(file).splitlines())) for file in files if file.is_file()]
    ended = 0 if stop is None else sum(map(stop.replay, rows))
    if not ended:
        return []
    runs = "the run" if len(rows) == 1 else f"{ended} of {len(rows)} runs"
    return [
        f"{runs} ended early and will not go on (early_stop): for more rounds, remove the section [early_stop] "
        f"from '{folder / CONFIG_FILE}' and resume again"
    ]
