"""Rounds as they happen, on stderr: one bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from fedstill.core.errors import printable
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Result, Row

LINES_A_RUN = 10
QUIET_SECONDS = 20.0  # elsewhere than on a terminal: a line at least this often
FIELDS = ("round", "accuracy", "rate", "left")  # of the bar


class Progress(Callback):
    """Counts rounds over all runs of a command, and what a method prepares before them, and shows both."""

    def __init__(self, title: str, *, runs: int, rounds: int, terminal: bool | None = None) -> None:
        self.title, self.runs, self.rounds = title, runs, rounds
        self.goal, self.total = rounds, runs * rounds  # of this run, and of all: a budget for privacy may cut them
        self.finished = self.over = self.done = self.resumed = self.round = self.begun = 0
        self.label, self.accuracy = "", ""
        self.prepared: tuple[float, float, float] | None = None  # share now, first share, and when that was
        self.terminal = sys.stderr.isatty() if terminal is None else terminal
        self.bar: Any = None
        self.mark: tuple[int, str] = (0, "")  # the last line was about this tenth of this work
        self.began = self.heard = self.last_printed = time.perf_counter()

    def on_start(self, info: RunInfo) -> bool | None:
        if self.title:  # not before: a mistake that is found on the way here is one line
            print(printable(self.title), file=sys.stderr, flush=True)
            self.title, self.began = "", time.perf_counter()
        self.goal = min(info.rounds, self.rounds)
        self.total -= self.rounds - self.goal
        self.round = self.begun = len(info.past)
        self.accuracy, self.heard = "", time.perf_counter()
        self.resumed, self.done = self.resumed + self.round, self.done + self.round
        if self.terminal:
            self._show_rounds()
        return None

    def on_prepare(self, line: str, share: float) -> None:
        now = time.perf_counter()
        self.began, self.heard = self.began + now - self.heard, now  # it does not count as slow rounds
        if self.prepared is None or share < self.prepared[0]:
            self.prepared = (share, share, now)
        _, first, since = self.prepared
        self.prepared = (share, first, since)
        left = f"{duration((1.0 - share) * (now - since) / (share - first))} left" if share > first else ""
        mark = int(LINES_A_RUN * share), f"{self.finished} {line.partition(':')[0]}"
        self._show(mark, share, 1.0, (line, "", "", left))

    def on_round(self, row: Row) -> bool | None:
        self.prepared, self.heard = None, time.perf_counter()
        self.round, self.done = int(row["round"]), self.done + 1
        if row.get("accuracy") is not None:
            self.accuracy = f"{100 * row['accuracy']:.1f} %"
        self._show_rounds()
        return None

    def beside(self, label: str) -> Callback:
        """Return a callback for one of several runs that go on at the same time; it counts into this progress."""
        return _Beside(self, label)

    def on_end(self, result: Result) -> None:
        self.finished, self.prepared = self.finished + 1, None
        self.over += self.goal
        self.done = self.over  # a run that stopped early owes nothing

    @property
    def rate(self) -> float:
        return (self.done - self.resumed) / max(time.perf_counter() - self.began, 1e-9)

    @property
    def left(self) -> str:
        rate = self.rate
        return f"{duration((self.total - self.done) / rate)} left" if rate > 0 else ""

    def _show_rounds(self) -> None:
        words = (f"round {self.round}/{self.goal}", self.accuracy, f"{self.rate:.1f} rounds/s", self.left)
        self._show((LINES_A_RUN * self.done // self.total, ""), self.done, self.total, words)

    def _show(self, mark: tuple[int, str], done: float, total: float, words: tuple[str, ...]) -> None:
        """Move the bar; elsewhere print a line when another tenth or other work begins, or after a long silence."""
        if self.terminal:
            if self.bar is None:
                self._open_bar()
            fields = dict(zip(("description", *FIELDS), map(printable, (self.label, *words)), strict=True))
            self.bar.update(self.bar.task_ids[0], total=total, completed=done, **fields)
        elif mark != self.mark or time.perf_counter() - self.last_printed > QUIET_SECONDS:
            self.mark, self.last_printed = mark, time.perf_counter()
            runs = f"run {min(self.finished + 1, self.runs)}/{self.runs}  " if self.runs > 1 else ""
            print(printable("  ".join(filter(None, (f"{runs}{self.label}", *words)))), file=sys.stderr, flush=True)

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in FIELDS]
        columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), *texts]
        self.bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self.bar.add_task("", total=self.total, **dict.fromkeys(FIELDS, ""))
        self.bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()


class _Beside(Callback):
    """Counts the rounds of one run among others at the same time; its end is its last round."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress, self._label = progress, label
        self._goal = self._round = 0

    def on_start(self, info: RunInfo) -> None:
        progress = self._progress
        if progress.title:
            print(printable(progress.title), file=sys.stderr, flush=True)
            progress.title, progress.began = "", time.perf_counter()
        self._goal, self._round = min(info.rounds, progress.rounds), len(info.past)
        progress.total -= progress.rounds - self._goal
        progress.resumed, progress.done = progress.resumed + self._round, progress.done + self._round
        self._count()

    def on_prepare(self, line: str, share: float) -> None:
        progress = self._progress
        progress.label = self._label
        progress._show(progress.mark, progress.done, progress.total, (line, "", "", progress.left))

    def on_round(self, row: Row) -> None:
        progress = self._progress
        progress.label, progress.goal, progress.round = self._label, self._goal, int(row["round"])
        self._round, progress.done = progress.round, progress.done + 1
        progress.accuracy = "" if row.get("accuracy") is None else f"{100 * row['accuracy']:.1f} %"
        progress._show_rounds()
        self._count()

    def _count(self) -> None:
        self._progress.finished += self._round >= self._goal


def duration(seconds: float) -> str:
    """Write seconds for people.

    >>> duration(8.4), duration(75), duration(7300)
    ('8 s', '1:15 min', '2:01 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
