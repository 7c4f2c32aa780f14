"""Many runs as they happen, on stderr: one bar on a terminal, a line a finished run elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from fedstill.bench.estimate import Estimate, roughly
from fedstill.bench.plan import Job
from fedstill.bench.results import curve_of
from fedstill.bench.summary import best, last_ten
from fedstill.bench.workers import Message

QUIET_SECONDS = 60.0  # a line at least this often
LEAST_SECONDS = 1e-3  # of a run: shares are of a sum that is not zero


class BenchProgress:
    """Counts runs and rounds; time left by what was estimated, at the speed seen so far."""

    def __init__(self, orders: Sequence[Job], known: Estimate, *, terminal: bool | None = None) -> None:
        self.orders = orders
        seconds = [known.of(order) for order in orders]
        rounds = [float(order.experiment.rounds) for order in orders]
        self._work = rounds if None in seconds else [max(spent or 0.0, LEAST_SECONDS) for spent in seconds]
        self._share = [0.0] * len(orders)  # done of each run
        self._before: dict[int, float] = {}  # done of it when it began here
        self._errors: set[str] = set()  # each is told once
        self._began = time.perf_counter()
        self.finished = self.failed = 0
        on_terminal = sys.stderr.isatty() if terminal is None else terminal
        self.screen: Screen = Bar() if on_terminal else Lines()

    def hear(self, message: Message) -> None:
        number = message["number"]
        order = self.orders[number]
        if message["kind"] == "round":
            self._share[number] = message["round"] / order.experiment.rounds
            self._before.setdefault(number, self._share[number])
            self.screen.show(self, order, f"round {message['round']}/{order.experiment.rounds}")
            return
        if message["kind"] == "prepare":
            self.screen.show(self, order, message["what"])
            return
        self._share[number] = 1.0
        self.finished += 1
        if message["kind"] == "failed":
            self.failed += 1
            self._before[number] = 1.0  # what was not computed is no speed
            error = "for the same reason" if message["error"] in self._errors else message["error"]
            self._errors.add(message["error"])
            self.screen.say(self, f"{order.label} failed: {error}")
            return
        curve, seconds = curve_of(message["answer"]), message["answer"]["seconds"]
        self.screen.say(
            self, f"{order.label}: best {best(curve):.2f} %, last 10 {last_ten(curve):.2f} %, {roughly(seconds)}"
        )

    @property
    def done(self) -> float:
        """Share of all work."""
        return self._sum(self._share) / sum(self._work)

    def _sum(self, shares: Sequence[float]) -> float:
        return sum(share * work for share, work in zip(shares, self._work, strict=True))

    @property
    def left(self) -> str:
        before = self._sum([self._before.get(number, 0.0) for number in range(len(self.orders))])
        here = self._sum(self._share) - before
        spent = time.perf_counter() - self._began
        return f"{roughly(spent * (1 - self.done) * sum(self._work) / here)} left" if here > 0 and self.done < 1 else ""

    @property
    def count(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished}/{len(self.orders)} runs{failed}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.screen.close()


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, progress: BenchProgress, order: Job, doing: str) -> None: ...

    def say(self, progress: BenchProgress, line: str) -> None: ...

    def close(self) -> None: ...


class Bar:
    """One line that redraws itself, below a line a run."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def show(self, progress: BenchProgress, order: Job, doing: str) -> None:
        self._update(progress, f"{order.label}, {doing}")

    def say(self, progress: BenchProgress, line: str) -> None:
        self._update(progress, "")
        self._bar.console.print(line, markup=False, highlight=False)

    def _update(self, progress: BenchProgress, label: str) -> None:
        if self._bar is None:
            self._open()
        shown = {"count": progress.count, "left": progress.left, "label": label}
        self._bar.update(self._task, completed=progress.done, **shown)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("count", "left", "label")]
        self._bar = RichProgress(BarColumn(bar_width=24), *texts, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=1.0, count="", left="", label="")
        self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Lines:
    """A line a finished run, and one when nothing was said for a while."""

    def __init__(self) -> None:
        self._said = time.perf_counter()

    def show(self, progress: BenchProgress, order: Job, doing: str) -> None:
        if time.perf_counter() - self._said > QUIET_SECONDS:
            self.say(progress, f"{order.label}, {doing}")

    def say(self, progress: BenchProgress, line: str) -> None:
        self._said = time.perf_counter()
        words = [progress.count, line, progress.left]
        print("  ".join(word for word in words if word), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass
