"""How long runs will take, from the seconds of the runs that are recorded; nothing is run to find it out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from fedstill.bench.plan import Job
from fedstill.bench.results import Run, run_id
from fedstill.report.table import counted


class Seconds:
    """Mean seconds of runs on one kind of device with so many at once: of a cell or, by the round, of its column.

    Seconds before the first round are left out, because pre-training is mostly done once for many runs.
    """

    def __init__(self, runs: Iterable[Run], *, device: str, at_once: int) -> None:
        self.device, self.at_once = device, at_once
        self._of_cell: dict[tuple[str, str], list[float]] = {}  # by key and engine
        self._of_round: dict[tuple[str, str], list[float]] = {}  # by column and engine
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        if (run["device"], run["at_once"]) == (self.device, self.at_once):
            key, _, engine = run_id(run)
            spent = max(run["seconds"] - run.get("prepared", 0.0), 0.0)
            self._of_cell.setdefault((key, engine), []).append(spent)
            self._of_round.setdefault((run["column"], engine), []).append(spent / run["rounds"])

    def of(self, job: Job) -> float | None:
        """None where neither the cell nor another one of its column was run."""
        key, _, engine = job.run_id
        if (key, engine) in self._of_cell:
            return statistics.fmean(self._of_cell[key, engine])
        rounds = self._of_round.get((job.column, engine))
        return statistics.fmean(rounds) * job.experiment.rounds if rounds else None

    def total(self, jobs: Sequence[Job]) -> float | None:
        """Seconds until the jobs that have an estimate are done: never less than the longest of them takes."""
        known = [spent for job in jobs if (spent := self.of(job)) is not None]
        return max(sum(known) / self.at_once, *known) if known else None


def longest_first(jobs: Sequence[Job], seconds: Seconds) -> list[Job]:
    """Seed by seed, so that partial results cover every method; within a seed the long ones first, for a short tail."""
    return sorted(jobs, key=lambda job: (job.experiment.seed, -(seconds.of(job) or 0.0)))


def estimate_line(jobs: Sequence[Job], seconds: Seconds, device: str) -> str:
    """36 runs of 200 rounds, 3 at a time on cuda, about 14 min"""
    lengths = sorted({job.experiment.rounds for job in jobs})
    rounds = counted(lengths[0], "round") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} rounds"
    total, unknown = seconds.total(jobs), sum(seconds.of(job) is None for job in jobs)
    time = "time unknown (no such run is recorded)" if total is None else f"about {roughly(total)}"
    rest = f" ({unknown} not estimated)" if unknown and total is not None else ""
    at_once = f"{seconds.at_once if seconds.at_once > 1 else 'one'} at a time"
    return f"{counted(len(jobs), 'run')} of {rounds}, {at_once} on {device}, {time}{rest}"


def roughly(seconds: float) -> str:
    """A guess does not pretend to be exact.

    >>> roughly(0.2), roughly(75), roughly(840), roughly(9000)
    ('1 s', '75 s', '14 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
