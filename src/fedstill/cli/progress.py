"""Rounds as they happen, on stderr: one bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Result, Row

LINES_A_RUN = 10
QUIET_SECONDS = 20.0  # in a comparison: a line at least this often


class Progress(Callback):
    """Counts rounds over all runs of a command and lets a screen show them."""

    def __init__(self, title: str, *, runs: int, rounds: int, terminal: bool | None = None) -> None:
        self.title, self.runs, self.rounds = title, runs, rounds
        self.goal, self.total = rounds, runs * rounds  # of this run, and of all: a budget for privacy may cut them
        self.finished = self.over = self.done = self.resumed = self.round = self.begun = 0
        self.label, self.accuracy = "", ""
        self.preparing: Preparing | None = None
        self.began = self.heard = time.perf_counter()
        on_terminal = sys.stderr.isatty() if terminal is None else terminal
        self.screen: Screen = Bar() if on_terminal else Lines()

    def on_start(self, info: RunInfo) -> bool | None:
        if self.title:  # not before: a mistake that is found on the way here is one line
            print(self.title, file=sys.stderr, flush=True)
            self.title, self.began = "", time.perf_counter()
        self.goal = min(info.rounds, self.rounds)
        self.total -= self.rounds - self.goal
        self.round = self.begun = len(info.past)
        self.accuracy, self.heard = "", time.perf_counter()
        self.resumed, self.done = self.resumed + self.round, self.done + self.round
        self.screen.show(self)
        return None

    def on_prepare(self, what: str, share: float) -> None:
        now = time.perf_counter()
        self.began, self.heard = self.began + now - self.heard, now  # it does not count as slow rounds
        if self.preparing is None or share < self.preparing.share:
            self.preparing = Preparing(what, share, share, now, now)
        else:
            self.preparing = replace(self.preparing, what=what, share=share, now=now)
        self.screen.show(self)

    def on_round(self, row: Row) -> bool | None:
        self.preparing, self.heard = None, time.perf_counter()
        self.round, self.done = int(row["round"]), self.done + 1
        if row.get("accuracy") is not None:
            self.accuracy = f"{100 * row['accuracy']:.1f} %"
        self.screen.show(self)
        return None

    def on_end(self, result: Result) -> None:
        self.finished, self.preparing = self.finished + 1, None
        self.over += self.goal
        self.done = self.over  # a run that stopped early owes nothing

    @property
    def rate(self) -> float:
        return (self.done - self.resumed) / max(time.perf_counter() - self.began, 1e-9)

    @property
    def left(self) -> str:
        rate = self.rate
        return f"{duration((self.total - self.done) / rate)} left" if rate > 0 else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.screen.close()


@dataclass(frozen=True)
class Preparing:
    """What a method does before its first round: a line, the share that is done, and when which share was."""

    what: str
    share: float
    first_share: float
    since: float
    now: float

    @property
    def left(self) -> str:
        done = self.share - self.first_share
        return f"{duration((1.0 - self.share) * (self.now - self.since) / done)} left" if done > 0 else ""


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class Bar:
    """One line that redraws itself and is gone at the end."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def show(self, progress: Progress) -> None:
        if self._bar is None:
            self._open(progress)
        preparing = progress.preparing
        if preparing is not None:
            words = {"round": preparing.what, "accuracy": "", "rate": "", "left": preparing.left}
            self._bar.update(self._task, total=1.0, completed=preparing.share, description=progress.label, **words)
            return
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            description=progress.label,
            round=f"round {progress.round}/{progress.goal}",
            accuracy=progress.accuracy,
            rate=f"{progress.rate:.1f} rounds/s",
            left=progress.left,
        )

    def _open(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("round", "accuracy", "rate", "left")]
        columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), *texts]
        self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        fields = {"round": "", "accuracy": "", "rate": "", "left": ""}
        self._task = self._bar.add_task("", total=progress.total, **fields)
        self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Lines:
    """A line each tenth of a run; with several runs, each tenth of them or when nothing was said for a while."""

    def __init__(self) -> None:
        self._tenth = 0
        self._prepared = (-1, "")
        self._said = time.perf_counter()

    def show(self, progress: Progress) -> None:
        if progress.preparing is not None:
            self._show_preparing(progress, progress.preparing)
            return
        tenth = LINES_A_RUN * progress.done // progress.total
        waited = time.perf_counter() - self._said > QUIET_SECONDS
        if progress.round == progress.begun or (tenth == self._tenth and not waited):
            return
        self._tenth, self._said = tenth, time.perf_counter()
        words = [f"round {progress.round}/{progress.goal}", progress.accuracy]
        self._say(progress, *words, f"{progress.rate:.1f} rounds/s", progress.left)

    def _show_preparing(self, progress: Progress, preparing: Preparing) -> None:
        """A line each tenth of it, and one when something else begins."""
        mark = int(LINES_A_RUN * preparing.share), f"{progress.finished} {preparing.what.partition(':')[0]}"
        if mark == self._prepared and time.perf_counter() - self._said <= QUIET_SECONDS:
            return
        self._prepared, self._said = mark, time.perf_counter()
        self._say(progress, preparing.what, preparing.left)

    def _say(self, progress: Progress, *words: str) -> None:
        runs = f"run {min(progress.finished + 1, progress.runs)}/{progress.runs}  " if progress.runs > 1 else ""
        print("  ".join(word for word in (f"{runs}{progress.label}", *words) if word), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(8.4), duration(75), duration(7300)
    ('8 s', '1:15 min', '2:01 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
