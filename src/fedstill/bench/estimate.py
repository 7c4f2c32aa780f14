"""How long it will take, before it starts: from earlier runs of the same cells, or from a few rounds of one each."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedstill.bench.plan import Job, device_name
from fedstill.bench.results import Run, cell_id, engine_of, engine_text, portable, run_id
from fedstill.bench.workers import Message, Probe, WorkerPool
from fedstill.core.needs import needs_of
from fedstill.core.types import Need, Phase
from fedstill.experiment.config import Experiment
from fedstill.methods.lookup import build_method
from fedstill.report.table import counted

QUIET_SECONDS = 20.0  # between two lines about what a method prepares
FROZEN_COST = 1 / 3  # of a step: forward alone, where the step is forward and twice as much backward


@dataclass(frozen=True)
class Estimate:
    """Seconds by run (None: not known, and why), and runs that cannot be done for want of data."""

    seconds: Mapping[tuple[str, int, str], float | None]  # by run_id
    failures: tuple[str, ...] = ()
    no_data: Mapping[str, str] = field(default_factory=dict)  # group -> why

    def of(self, order: Job) -> float | None:
        return self.seconds.get(order.run_id)

    def total(self, orders: Sequence[Job], jobs: int) -> float | None:
        """Of those that are known: shared by the jobs, but never less than the longest."""
        known = [spent for order in orders if (spent := self.of(order)) is not None]
        return max(sum(known) / jobs, *known) if known else None

    def lacks_data(self, order: Job) -> str | None:
        """Why its data cannot be had, if so."""
        return self.no_data.get(group_of(order.experiment))


def group_of(experiment: Experiment) -> str:
    """Cells that cost the same but for their method's step; those whose server learns too are a group of their own.

    So are those of another engine.
    """
    sections = {"data", "partition", "model", "local", "cohort", "evaluate_every"}
    looks = {Need.UNLABELED, Need.INDIVIDUAL_UPLOADS}  # at data, or at each client's model: with a generator
    learns = any(looks & needs_of(phase.method) for phase in _phases(experiment))
    alike = portable(experiment.model_dump(mode="json", include=sections))
    return f"{alike}{' and a server that learns' * learns}{engine_text(engine_of(experiment))}"


def _phases(experiment: Experiment) -> tuple[Phase, ...]:
    return build_method(experiment.method.name, experiment.method.options)


def step_cost(experiment: Experiment) -> float:
    """A method's step over FedAvg's: frozen models run forward on every batch; the mean over phases."""
    spent, past = 0.0, 0
    for phase in _phases(experiment):
        until = experiment.rounds if phase.until is None else min(phase.until, experiment.rounds)
        spent += max(until - past, 0) * (1 + FROZEN_COST * len(phase.method.objective.frozen))
        past = max(past, until)
    return spent / experiment.rounds


def silent(line: str) -> None:
    pass


def estimate(
    orders: Sequence[Job],
    table: Sequence[Job],
    runs: Sequence[Run],
    crew: WorkerPool,
    *,
    jobs: int,
    tell: Callable[[str], None] = silent,
) -> Estimate:
    """Seconds of every order; where nothing of its kind in the table was ever run like this, a probe tells."""
    groups: dict[str, list[Job]] = {}
    for order in orders:
        groups.setdefault(group_of(order.experiment), []).append(order)
    earlier = _earlier(table, runs, jobs)
    rates = _rates(table, earlier)
    longest = {name: max(some, key=lambda order: order.experiment.rounds) for name, some in groups.items()}
    unknown = {name: order for name, order in longest.items() if name not in rates}
    probes, failures, no_data = _probe(unknown, crew, jobs, tell)
    seconds: dict[tuple[str, int, str], float | None] = {}
    for name, some in groups.items():
        for order in some:
            if name in rates:
                spent: float | None = earlier.get(cell_id(order.experiment), rates[name] * _size(order))
            else:
                spent = _from_probe(order, longest[name], probes.get(name))
            seconds[order.run_id] = spent
    return Estimate(seconds, failures, no_data)


def _rates(table: Sequence[Job], earlier: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Seconds of a round at FedAvg's cost, by group, from the cells that were run before."""
    found: dict[str, list[float]] = {}
    for order in table:
        if (spent := earlier.get(cell_id(order.experiment))) is not None:
            found.setdefault(group_of(order.experiment), []).append(spent / _size(order))
    return {name: statistics.fmean(values) for name, values in found.items()}


def _size(order: Job) -> float:
    return order.experiment.rounds * step_cost(order.experiment)


def _earlier(orders: Sequence[Job], runs: Sequence[Run], jobs: int) -> dict[tuple[str, str], float]:
    """Seconds by cell and engine, of runs on this kind of device with as many beside them.

    What was prepared before the first round is left out: it is no part of a round, and mostly done once for all runs.
    """
    wanted = {(*cell_id(order.experiment), device_name(order.experiment.engine.device)) for order in orders}
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        key, _, engine = run_id(run)
        if (key, engine, run["device"]) in wanted and run["at_once"] == jobs:
            found.setdefault((key, engine), []).append(max(run["seconds"] - run.get("prepared", 0.0), 0.0))
    return {cell: statistics.fmean(values) for cell, values in found.items()}


def _probe(
    firsts: Mapping[str, Job], crew: WorkerPool, jobs: int, tell: Callable[[str], None]
) -> tuple[dict[str, Probe], tuple[str, ...], dict[str, str]]:
    """A cell of each group on all workers at once, because runs that share a device slow each other down.

    Seconds by group, what failed, and groups without data.
    """
    copies = [(name, order) for name, order in firsts.items() for _ in range(jobs)]
    answers: dict[str, list[Probe]] = {}
    failures: dict[str, None] = {}
    no_data: dict[str, str] = {}
    left = Counter(name for name, _ in copies)
    told, done = _Sometimes(tell), _done_to(firsts.values())

    def hear(message: Message) -> None:
        name, order = copies[message["number"]]
        if message["kind"] == "prepare":
            told(f"{order.row} {order.column}, {message['what']}")
            return
        if message["kind"] == "done":
            answers.setdefault(name, []).extend(Probe(*found) for found in [message["answer"]] if found)
        elif message.get("no_data"):
            no_data[name] = message["error"]
        else:
            failures[f"{order.row} {order.column}: {message['error']}"] = None
        left[name] -= 1
        if not left[name] and len(firsts) > 1:
            tell(f"{done} {sum(not count for count in left.values())} of {len(firsts)}")

    if firsts:
        tell(_doing(firsts.values()))
    crew.do("probe", [order for _, order in copies], hear)
    means = {
        name: Probe(statistics.fmean(one.first for one in probes), statistics.fmean(one.later for one in probes))
        for name, probes in answers.items()
        if probes
    }
    return means, tuple(failures), no_data


def _doing(probed: Collection[Job]) -> str:
    """A run of one round is not measured: of its setting only the data are looked at."""
    measured = sum(order.experiment.rounds > 1 for order in probed)
    doing = [f"measuring a few rounds of {counted(measured, 'setting')}"] if measured else []
    if rest := len(probed) - measured:
        doing.append(f"looking at the data of {f'{rest} more' if measured else counted(rest, 'setting')}")
    return f"{', '.join(doing)} ..."


def _done_to(probed: Collection[Job]) -> str:
    measured = {order.experiment.rounds > 1 for order in probed}
    return "looked at" if measured == {False} else "measured" if measured == {True} else "measured or looked at"


class _Sometimes:
    """Passes a line on if the last one was a while ago."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._said = tell, -math.inf

    def __call__(self, line: str) -> None:
        if (now := time.perf_counter()) - self._said > QUIET_SECONDS:
            self._said = now
            self._tell(line)


def _from_probe(order: Job, probed: Job, probe: Probe | None) -> float | None:
    if probe is None:
        return None
    relative = step_cost(order.experiment) / step_cost(probed.experiment)
    return probe.first + (order.experiment.rounds - 1) * probe.later * relative


def longest_first(orders: Sequence[Job], known: Estimate) -> list[Job]:
    """Seed by seed, so that partial results cover every method; within a seed the long ones first: a short tail."""
    return sorted(orders, key=lambda order: (order.experiment.seed, -(known.of(order) or 0.0)))


def estimate_line(orders: Sequence[Job], known: Estimate, *, jobs: int, device: str) -> str:
    """36 runs of 200 rounds, about 14 min with 3 at a time on cuda"""
    lengths = sorted({order.experiment.rounds for order in orders})
    rounds = counted(lengths[0], "round") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} rounds"
    runs = f"{counted(len(orders), 'run')} of {rounds}"
    total, unknown = known.total(orders, jobs), sum(known.of(order) is None for order in orders)
    if total is None:
        return f"{runs}, time unknown, {_at_once(jobs)} on {device}"
    rest = f" ({unknown} not estimated)" if unknown else ""
    return f"{runs}, about {roughly(total)} {_at_once(jobs)} on {device}{rest}"


def _at_once(jobs: int) -> str:
    return "one at a time" if jobs == 1 else f"with {jobs} at a time"


def roughly(seconds: float) -> str:
    """A guess does not pretend to be exact.

    >>> roughly(0.2), roughly(75), roughly(840), roughly(9000)
    ('1 s', '75 s', '14 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
