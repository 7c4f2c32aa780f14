"""What is under way in run folders: which runs are at work, how far they are, and how much time is left."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from fedstill.report import counted
from fedstill.report.charts import Point, line_chart
from fedstill.report.panels import Panel, Table, mean_line, percent
from fedstill.report.runs import CONFIG_FILE, RESULTS_FILE, Run, Runs, best_first, list_of, number, table_of
from fedstill.storage.files import RUNNING_FILE, is_held, read_text
from fedstill.storage.toml import split_outside

LATEST = 20  # rounds whose seconds tell how long the next ones take
MOST = 40  # runs in the table


@dataclass(frozen=True)
class Work:
    """The work of one command: a run, or a comparison with the runs that it has begun."""

    folder: Path
    runs: Sequence[Run]
    at_work: frozenset[Path] = frozenset()  # its own folder and those of its runs in which a process works
    rounds: int = 0  # of each run; 0 where nobody knows
    planned: int = 1  # runs
    seeds: int = 1
    jobs: int = 1  # runs at a time

    @property
    def is_going(self) -> bool:
        return bool(self.at_work)

    @property
    def is_comparison(self) -> bool:
        return not any(run.folder == self.folder for run in self.runs)

    def is_over(self, run: Run) -> bool:
        """Return whether a run has played its rounds, or has ended early and is not asked for more."""
        if run.folder in self.at_work:
            return False
        ended = bool(run.files["calibration.json"])  # a run writes it at its end
        rounds = run.config.get("rounds")
        return len(run.rows) >= self.rounds > 0 or (ended and isinstance(rounds, int) and len(run.rows) < rounds)

    @property
    def over(self) -> list[Run]:
        return [run for run in self.runs if self.is_over(run)]

    @property
    def total(self) -> int:
        return self.planned * self.rounds

    @property
    def done(self) -> int:
        """Rounds that need not be played any more."""
        return sum(self.rounds if self.is_over(run) else min(len(run.rows), self.rounds) for run in self.runs)

    def seconds_left(self, waited: Mapping[Path, float]) -> float | None:
        """Return about how long the rounds take that are left; None where no round has been played.

        waited: seconds since the last round of each run that is at work.
        """
        speeds = {run.folder: speed for run in self.runs if (speed := _seconds_a_round(run)) is not None}
        if not speeds or not self.rounds:
            return None
        usual = statistics.fmean(speeds.values())
        methods: dict[Path, list[Run]] = {}
        for run in self.runs:
            methods.setdefault(run.folder.parent, []).append(run)
        left, waiting = 0.0, self.planned - len(self.runs)
        for same in methods.values():
            known = [speeds[run.folder] for run in same if run.folder in speeds]
            speed = statistics.fmean(known) if known else usual
            for run in same:
                if not self.is_over(run):
                    mine = speeds.get(run.folder, speed)
                    left += max(0, self.rounds - len(run.rows)) * mine - min(waited.get(run.folder, 0.0), mine)
            more = min(waiting, max(0, self.seeds - len(same))) if self.is_comparison else 0
            left, waiting = left + more * self.rounds * speed, waiting - more
        left += waiting * self.rounds * usual
        at_once = min(self.jobs, max(1, self.planned - len(self.over)))
        return max(0.0, left / at_once)


def _seconds_a_round(run: Run) -> float | None:
    known = [value for row in run.rows[-LATEST:] if (value := number(row.get("seconds"))) is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class UnderWay:
    """Everything that goes on in the folders that a reader watches."""

    work: Sequence[Work]
    waiting_for: Sequence[str] = ()  # names of folders that hold no run yet
    waited: Mapping[Path, float] = field(default_factory=dict)  # seconds since the last round of runs at work

    @property
    def is_going(self) -> bool:
        return any(work.is_going for work in self.work)

    @property
    def left_out(self) -> list[Run]:
        """The runs at work of comparisons that have results already; half a run would spoil their means."""
        return [run for work in self.work if work.over for run in work.runs if run.folder in work.at_work]

    @property
    def share(self) -> float | None:
        """Rounds that are played, of all that are planned."""
        total = sum(work.total for work in self.work)
        return sum(work.done for work in self.work) / total if total else None

    def in_words(self) -> str:
        """Say how far it is, in words that change seldom."""
        words = [f"Waiting for a run in '{name}'." for name in self.waiting_for]
        done, total = sum(work.done for work in self.work), sum(work.total for work in self.work)
        if self.is_going:
            times = [work.seconds_left(self.waited) for work in self.work if work.is_going]
            known = [seconds for seconds in times if seconds is not None]
            left = f"{about(max(known))} left" if known else "the first round will tell how much time is left"
            words.append(f"{done:,} of {total:,} rounds are played: {left}." if total else f"At work: {left}.")
        elif self.work:
            runs, over = sum(work.planned for work in self.work), sum(len(work.over) for work in self.work)
            if runs == over:
                words.append(f"{counted(runs, 'run')}: all is done.")
            else:
                words.append(f"Nothing is at work. Finished: {over} of {counted(runs, 'run')}.")
                words.append("`fedstill resume FOLDER` goes on with a run or a comparison that was stopped.")
        return " ".join(words)


def about(seconds: float) -> str:
    """
    >>> about(3), about(33), about(80), about(600), about(8000), about(400_000)
    ('a few seconds', 'about 35 seconds', 'about a minute', 'about 10 minutes', 'about 2.2 hours', 'about 4.6 days')
    """
    if seconds < 8:
        return "a few seconds"
    if seconds < 58:
        return f"about {5 * round(seconds / 5)} seconds"
    if seconds < 90:
        return "about a minute"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours" if seconds < 172_800 else f"about {seconds / 86_400:.1f} days"


def find_work(runs: Sequence[Run], folders: Sequence[Path]) -> list[Work]:
    """Return the comparisons, and the runs on their own, that some runs in the watched folders belong to."""
    by_owner: dict[Path, list[Run]] = {}
    for run in runs:
        above = run.folder.parent.parent
        inside = any(above.is_relative_to(folder) for folder in folders)
        compared = inside and (above / RESULTS_FILE).is_file() and (above / CONFIG_FILE).is_file()
        by_owner.setdefault(above if compared else run.folder, []).append(run)
    return [_work(folder, mine) for folder, mine in by_owner.items()]


def _work(folder: Path, runs: Sequence[Run]) -> Work:
    places = {folder, *(run.folder for run in runs)}
    at_work = frozenset(place for place in places if is_held(place / RUNNING_FILE))
    if len(runs) == 1 and runs[0].folder == folder:
        return Work(folder, runs, at_work, _whole(runs[0].config.get("rounds"), least=0))
    config: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):  # a section names damaged files
        config = tomllib.loads(read_text(folder / CONFIG_FILE))
    compare = table_of(config.get("compare"))
    seeds = _whole(compare.get("seeds"))
    entries = len(list_of(compare.get("methods")))
    if over := list_of(compare.get("over")):
        entries = _whole(compare.get("search"), least=0) or prod(len(split_outside(str(axis), ",")) for axis in over)
    planned = max(len(runs), entries * seeds)
    rounds = _whole(config.get("rounds"), least=0)
    return Work(folder, runs, at_work, rounds, planned, seeds, _whole(compare.get("jobs")))


def _whole(value: Any, least: int = 1) -> int:
    """Return a whole number of a file; the least one for everything else that may stand there."""
    known = number(value)
    return least if known is None else max(least, int(known))


def panel(under_way: UnderWay, shown: Runs | None) -> Panel | None:
    """Return the runs at work, and their lines beside the lines of runs that the other sections show."""
    if not under_way.is_going:
        return None
    sentences = []
    for work in under_way.work:
        going = [run for run in work.runs if run.folder in work.at_work]
        stopped = len(work.runs) - len(work.over) - len(going)
        counts = {"ended": len(work.over), "at work": len(going), "stopped": stopped}
        counts["not begun"] = work.planned - len(work.runs)
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        sentences.append(f"{work.folder.name}: {counted(work.planned, 'run')} ({states}).")
    rows: list[tuple[str, ...]] = []
    for work in under_way.work:
        for run in work.runs:
            if run.folder in work.at_work and len(rows) < MOST:
                speed, accuracy = _seconds_a_round(run), run.accuracy
                rows.append(
                    (
                        _name(run),
                        f"{len(run.rows):,}" + (f" of {work.rounds:,}" if work.rounds else ""),
                        "" if accuracy is None else percent(accuracy),
                        "" if speed is None else f"{speed:.3g}",
                    )
                )
    charts = []
    lines: dict[str, list[Point]] = {}
    for run in under_way.left_out:
        lines[_name(run)] = mean_line([run.series("accuracy")], scale=100)
    if lines and shown is not None:
        sentences.append("A run at work is in this section only. It joins the other sections when it ends.")
        lines |= {
            method: mean_line([run.series("accuracy") for run in each], scale=100, most=100)
            for method, each in shown.by_method.items()
        }
        lines = {name: points for name, points in lines.items() if points}
        ends = "; ".join(f"{name} {points[-1].y:.1f} %" for name, points in list(lines.items())[:10])
        alt = f"Lines: test accuracy by round, of runs at work and of methods with results. Ends: {ends}."
        charts.append(line_chart(lines, x="round", y="test accuracy (%)", alt=alt, height=220))
    head = ("run", "round", "accuracy", "seconds a round")
    table = Table(head, rows, "Runs at work.") if rows else None
    return Panel("Under way", sentences, charts, table)


def _name(run: Run) -> str:
    return f"{run.name}, seed {run.seed}"


def without(runs: Runs, left_out: Collection[Run]) -> dict[str, Sequence[Run]]:
    """Return the runs by method without some of them; the best method of the others is first."""
    places = {run.folder for run in left_out}
    kept = {method: [run for run in each if run.folder not in places] for method, each in runs.by_method.items()}
    return best_first({method: each for method, each in kept.items() if each})
