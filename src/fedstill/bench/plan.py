"""Plan a bench: the runs that are left to do, the folder of each, their time, and the lock on the output folder."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedstill.bench.code_path import changed_modules
from fedstill.bench.recipe import Cell, with_data
from fedstill.bench.results import (
    BESIDE,
    Curve,
    Records,
    Run,
    cell_key,
    engine_of,
    engine_text,
    fault_of,
    holding,
    method_text,
    run_id,
)
from fedstill.core.errors import FedstillError
from fedstill.engine import choose_device
from fedstill.experiment.code_names import code_names
from fedstill.experiment.compare import folder_name
from fedstill.experiment.config import Experiment
from fedstill.experiment.run_folder import CONFIG_FILE, git_commit, read_description, version_of
from fedstill.loop.history import Row
from fedstill.methods.own_code import speak
from fedstill.report import counted
from fedstill.storage.files import holder, lock

LONGEST_NAME = 60
MADE = "bench.json"  # in a run's folder: which device, how many at once, which versions
BENCH_LOCK = ".bench.lock"


@dataclass(frozen=True)
class Job:
    """One run to do: its cell, with a seed, and the folder that it writes."""

    row: str
    column: str
    preset: str
    key: str
    experiment: Experiment  # with seed, device and the place of its data
    folder: Path

    @cached_property
    def run_id(self) -> tuple[str, int, str]:
        """The key, seed and engine that `results.run_id` returns for the record of this run."""
        return self.key, self.experiment.seed, engine_text(engine_of(self.experiment))

    @property
    def label(self) -> str:
        return f"{self.row} {self.column} seed {self.experiment.seed}"


@dataclass(frozen=True)
class BenchPlan:
    """The runs that a bench was asked for: which are done, which are left."""

    missing: Sequence[Job]  # not done
    left: Sequence[Job]  # the missing jobs whose data are there
    skipped: Sequence[str]  # a line for each column without data
    finished: Sequence[Run]  # done, but only in their folders, not in the results file
    runs: Sequence[Run]  # all known runs, of any table
    skipped_runs: Sequence[Run]  # the recorded runs that are not done again

    @property
    def done(self) -> int:
        return len(self.skipped_runs) + len(self.finished)


def make_jobs(cells: Sequence[Cell], *, preset: str, seeds: int, device: str, out: Path) -> list[Job]:
    """List all runs of the cells, seed by seed, so that partial results cover every method; a cell twice is one run."""
    jobs: dict[tuple[str, int, str], Job] = {}
    for seed in range(seeds):
        for cell in cells:
            engine = {**cell.experiment.engine.model_dump(), "device": device}
            privacy = {**asdict(cell.experiment.privacy), "reproducible": True}  # a record is to be repeated
            experiment = cell.experiment.replace(seed=seed, engine=engine, privacy=privacy)
            key = cell_key(experiment)
            job = Job(cell.row, cell.column, preset, key, experiment, run_folder(out, experiment, key))
            jobs.setdefault(job.run_id, job)
    return list(jobs.values())


def make_plan(jobs: Sequence[Job], runs: Sequence[Run], data: Path | None, *, rerun_changed: bool = False) -> BenchPlan:
    """Sort out the jobs that are neither in the results nor in a finished folder; `data` holds their data sets.

    rerun_changed: a run counts as not done if the source of a module that it entered has changed.
    """
    if data is not None and not data.is_dir():
        raise FedstillError(f"--data: no folder '{data}': give the folder that holds cifar10/, mnist/, ...")
    taken = [run for run in runs if not (rerun_changed and changed_modules(run))]
    known, records = {run_id(run): run for run in taken}, Records(taken)
    missing, left, finished, skipped = [], [], [], []
    lacking: dict[str, str] = {}  # why, by column
    for job in jobs:
        if job.run_id in known:
            skipped.append(known[job.run_id])
        elif (run := finished_run(job)) is not None and not (rerun_changed and changed_modules(run)):
            finished.append(run)
        elif (other := records.of(job.experiment).get(job.experiment.seed)) is not None:
            skipped.append(other)
        else:
            missing.append(job)
            try:
                left.append(replace(job, experiment=with_data(job.experiment, data)))
            except FedstillError as error:
                lacking.setdefault(job.column, f"skipped {job.column}: {error}")
    return BenchPlan(missing, left, [*lacking.values()], finished, [*runs, *finished], skipped)


def find_device(name: str) -> str:
    """Return the device that `--device` means on this machine."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise FedstillError(f"--device {name}: use auto, cpu, cuda or cuda:1")
    return str(choose_device(name))


def run_folder(out: Path, experiment: Experiment, key: str) -> Path:
    """Return the folder of a run, such as OUT/fedprox-mu-0.1-0123abcdef/seed-0; another engine adds six letters."""
    name = folder_name(method_text(experiment))[:LONGEST_NAME]
    engine = engine_text(engine_of(experiment))
    other = f"-{hashlib.sha256(engine.encode()).hexdigest()[:6]}" if engine else ""
    return out / f"{name}-{key}{other}" / f"seed-{experiment.seed}"


def device_name(device: str) -> str:
    place = torch.device(device)
    return f"cuda {torch.cuda.get_device_name(place)}" if place.type == "cuda" else f"cpu {platform.machine()}"


def circumstances(device: str, at_once: int) -> dict[str, Any]:
    """Return device, runs at once and versions, because a run's seconds and last digits depend on them."""
    versions = {"torch": str(torch.__version__), "fedstill": version_of("fedstill") or "unknown"}
    commit = git_commit()
    return {"at_once": at_once, "device": device_name(device), **versions, **({"commit": commit} if commit else {})}


def make_run(job: Job, rows: Sequence[Row], seconds: float, made: dict[str, Any]) -> Run:
    """Return the record of a finished run; accuracies in percent with two decimals."""
    experiment = job.experiment
    evaluated = [row for row in rows if row.get("accuracy") is not None]
    run = Run(
        key=job.key,
        row=job.row,
        column=job.column,
        preset=job.preset,
        method=method_text(experiment),
        seed=experiment.seed,
        rounds=experiment.rounds,
        evaluated=experiment.evaluate_every,
        accuracy=[round(100 * row["accuracy"], 2) for row in evaluated],
        seconds=round(seconds, 3),
        at_once=made["at_once"],
        device=made["device"],
        torch=made["torch"],
        fedstill=made["fedstill"],
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )
    logged = {name: [row.get(name) for row in evaluated] for name in BESIDE}
    if beside := {
        name: [None if value is None else round(BESIDE[name] * value, 2) for value in values]
        for name, values in logged.items()
        if any(value is not None for value in values)
    }:
        run["beside"] = beside
    if engine := engine_of(experiment):
        run["engine"] = engine
    if "commit" in made:
        run["commit"] = made["commit"]
    if "code" in made:
        run["code"] = made["code"]
    if prepared := round(sum(row.get("seconds_prepared", 0.0) for row in rows), 3):
        run["prepared"] = prepared
    return run


def finished_run(job: Job) -> Run | None:
    """Return the run in the job's folder if it reached its last round, on any device; else None."""
    try:
        made = json.loads((job.folder / MADE).read_text(encoding="utf-8"))
        lines = (job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        evaluated = [row["round"] for row in rows if row.get("accuracy") is not None]
        run = make_run(job, rows, sum(row["seconds"] for row in rows), made)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged
    whole = Curve(job.experiment.rounds, job.experiment.evaluate_every, ())
    return run if evaluated == whole.at and fault_of(run) is None else None


def begun_as(job: Job) -> Experiment:
    """Return the experiment to run in the job's folder: the one that was begun there, or the job's.

    The folder's name holds cell and engine, so a begun run differs at most in the place of its data. A run that was
    begun on another device starts again, because its numbers would come from two devices.
    """
    if not (job.folder / CONFIG_FILE).exists():
        return job.experiment
    speak(code_names(job.experiment.model_dump()))  # a recipe is code that the user runs
    with suppress(FedstillError):  # a version with other keys has written it
        begun = read_description(job.folder)
        if begun.engine.device == job.experiment.engine.device:
            return begun
    shutil.rmtree(job.folder)
    return job.experiment


@contextmanager
def claimed(out: Path, results: Path) -> Iterator[None]:
    """Make both places, and hold a lock on `out` while the block runs."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(out / BENCH_LOCK, wait=False))
        except BlockingIOError:
            who = holder(out / BENCH_LOCK)
            raise FedstillError(f"--out: another bench works in '{out}', {who}: wait or use another --out") from None
        except OSError as error:
            raise FedstillError(f"--out: cannot write to '{out}' ({error.strerror}): name another folder") from None
        with holding(results):
            pass  # a place that cannot be written is an error now rather than after the first run
        yield


class Seconds:
    """Estimates the seconds of a job from runs on the same device with as many at once.

    It takes the mean of the job's cell, or else the mean of a round in its column. Seconds before the first round are
    left out, because pre-training is mostly done once for many runs.
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
        """Return the estimate of a job; None where neither its cell nor another one of its column was run."""
        key, _, engine = job.run_id
        if (key, engine) in self._of_cell:
            return statistics.fmean(self._of_cell[key, engine])
        rounds = self._of_round.get((job.column, engine))
        return statistics.fmean(rounds) * job.experiment.rounds if rounds else None

    def total(self, jobs: Sequence[Job]) -> float | None:
        """Return the seconds until all jobs with an estimate are done, at least the longest; None without any."""
        known = [spent for job in jobs if (spent := self.of(job)) is not None]
        return max(sum(known) / self.at_once, *known) if known else None


def longest_first(jobs: Sequence[Job], seconds: Seconds) -> list[Job]:
    """Sort jobs by seed, because partial results must cover every method, and within a seed the longest first."""
    return sorted(jobs, key=lambda job: (job.experiment.seed, -(seconds.of(job) or 0.0)))


def estimate_line(jobs: Sequence[Job], seconds: Seconds, device: str) -> str:
    """Return the plan as one line, such as: 36 runs of 200 rounds, 3 at a time on cuda, about 14 min."""
    lengths = sorted({job.experiment.rounds for job in jobs})
    rounds = counted(lengths[0], "round") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} rounds"
    total, unknown = seconds.total(jobs), sum(seconds.of(job) is None for job in jobs)
    time = "time unknown (no such run is recorded)" if total is None else f"about {roughly(total)}"
    note = f" ({unknown} not estimated)" if unknown and total is not None else ""
    at_once = f"{seconds.at_once if seconds.at_once > 1 else 'one'} at a time"
    return f"{counted(len(jobs), 'run')} of {rounds}, {at_once} on {device}, {time}{note}"


def roughly(seconds: float) -> str:
    """Return a guess of seconds as a rough time.

    >>> roughly(0.2), roughly(75), roughly(840), roughly(9000)
    ('1 s', '75 s', '14 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
