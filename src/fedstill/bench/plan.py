"""Which runs are left to do, the folder of each, and the lock on the place where a bench writes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedstill.bench.recipe import Cell, with_data
from fedstill.bench.results import (
    BESIDE,
    Records,
    Run,
    cell_key,
    engine_of,
    engine_text,
    evaluates,
    fault_of,
    holding,
    method_text,
    run_id,
)
from fedstill.core.errors import FedstillError
from fedstill.engine import choose_device
from fedstill.experiment.compare import folder_name
from fedstill.experiment.config import Experiment
from fedstill.experiment.run_folder import CONFIG_FILE, read_description, version_of
from fedstill.loop.history import Row
from fedstill.storage.files import holder, released, take


@dataclass(frozen=True)
class Job:
    """The cell, its seed, and where it is written."""

    row: str
    column: str
    preset: str
    key: str
    experiment: Experiment  # with seed, device and the place of its data
    folder: Path

    @property
    def run_id(self) -> tuple[str, int, str]:
        """As `results.run_id` has it of the record that it becomes."""
        return self.key, self.experiment.seed, engine_text(engine_of(self.experiment))

    @property
    def label(self) -> str:
        return f"{self.row} {self.column} seed {self.experiment.seed}"

    def as_json(self) -> dict[str, Any]:
        """Plain values only: it goes to another process."""
        own = {"row": self.row, "column": self.column, "preset": self.preset, "key": self.key}
        return {**own, "experiment": self.experiment.model_dump(mode="json"), "folder": str(self.folder)}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Job:
        experiment = Experiment.model_validate(table["experiment"])
        return cls(**{**table, "experiment": experiment, "folder": Path(table["folder"])})


MOST_AT_ONCE = 8
BYTES_A_RUN = 8 << 30  # of GPU memory: data, a cohort of models, a captured graph


def make_orders(cells: Sequence[Cell], *, preset: str, seeds: int, device: str, out: Path) -> list[Job]:
    """All runs of the cells, seed by seed, so that partial results cover every method; a cell twice is one run."""
    orders: dict[tuple[str, int, str], Job] = {}
    for seed in range(seeds):
        for cell in cells:
            engine = {**cell.experiment.engine.model_dump(), "device": device}
            experiment = cell.experiment.replace(seed=seed, engine=engine)
            key = cell_key(experiment)
            folder = run_folder(out, experiment, key)
            order = Job(cell.row, cell.column, preset, key, experiment, folder)
            orders.setdefault(order.run_id, order)
    return list(orders.values())


def split_done(orders: Sequence[Job], runs: Sequence[Run]) -> tuple[list[Job], list[Run]]:
    """(what is left to do, runs whose folder is finished but which the results do not hold yet)."""
    known, records = {run_id(run) for run in runs}, Records(runs)
    left: list[Job] = []
    found: list[Run] = []
    for order in orders:
        if order.run_id in known:
            continue
        if (run := finished_run(order)) is not None:
            found.append(run)
        elif order.experiment.seed not in records.of(order.experiment):
            left.append(order)
    return left, found


def place_data(orders: Sequence[Job], folder: Path | None, skip: Callable[[str], None]) -> list[Job]:
    """Orders with their data taken from `folder`; columns whose data are not there are told to `skip`, once each."""
    placed: list[Job] = []
    missing: dict[str, str] = {}
    if folder is not None and not folder.is_dir():
        raise FedstillError(f"--data: no folder '{folder}': give the folder that holds cifar10/, mnist/, ...")
    for order in orders:
        try:
            cell = with_data(Cell(order.row, order.column, order.experiment), folder)
            placed.append(replace(order, experiment=cell.experiment))
        except FedstillError as error:
            missing.setdefault(order.column, str(error))
    for column, why in missing.items():
        skip(f"skipped {column}: {why}")
    return placed


def find_device(name: str) -> str:
    """The device that `--device` means on this machine."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise FedstillError(f"--device {name}: use auto, cpu, cuda or cuda:1")
    return str(choose_device(name))


def check_jobs(asked: str) -> None:
    if asked != "auto" and (not asked.isdecimal() or int(asked) < 1):
        raise FedstillError(f"--jobs {asked}: use a whole number from 1, or auto")


def choose_jobs(asked: str, *, device: str, runs: int) -> int:
    """How many runs at once: as asked, or by the room on the device (one at a time on a CPU)."""
    check_jobs(asked)
    if asked != "auto":
        return min(int(asked), max(runs, 1))
    if not device.startswith("cuda"):
        return 1
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return room_for(runs, free_bytes=free, cores=cores())


def room_for(runs: int, *, free_bytes: int, cores: int) -> int:
    """Runs that share a GPU: each needs memory, and half of two cores to launch its kernels.

    >>> room_for(36, free_bytes=140 << 30, cores=16), room_for(36, free_bytes=20 << 30, cores=16)
    (8, 2)
    """
    return max(1, min(MOST_AT_ONCE, cores // 2, runs, free_bytes // BYTES_A_RUN))


def cores() -> int:
    """Those this process may use, which is fewer than the machine's in many containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(jobs: int) -> int:
    """Torch threads of each of several workers: together no more than there are cores."""
    return max(1, min(torch.get_num_threads(), cores() // jobs))


LONGEST_NAME = 60
MADE = "bench.json"  # which device, how many at once, which versions


def run_folder(out: Path, experiment: Experiment, key: str) -> Path:
    """OUT/fedprox-mu-0.1-0123abcdef/seed-0; with another engine than the default six letters for it after the key."""
    name = folder_name(method_text(experiment))[:LONGEST_NAME]
    engine = engine_text(engine_of(experiment))
    other = f"-{hashlib.sha256(engine.encode()).hexdigest()[:6]}" if engine else ""
    return out / f"{name}-{key}{other}" / f"seed-{experiment.seed}"


def device_name(device: str) -> str:
    place = torch.device(device)
    return f"cuda {torch.cuda.get_device_name(place)}" if place.type == "cuda" else f"cpu {platform.machine()}"


def circumstances(device: str, at_once: int) -> dict[str, Any]:
    """What a run's numbers and seconds depend on beside the experiment."""
    own = version_of("fedstill") or source_version(Path(__file__).resolve().parents[3])
    versions = {"torch": version_of("torch") or torch.__version__, "fedstill": own}
    return {"at_once": at_once, "device": device_name(device), **versions}


def source_version(repository: Path) -> str:
    """What pyproject.toml says where fedstill runs from its source without having been installed."""
    try:
        return str(tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def make_run(order: Job, rows: Sequence[Row], seconds: float, made: dict[str, Any]) -> Run:
    """The record of a finished run; accuracies in percent with two decimals."""
    experiment = order.experiment
    evaluated = [row for row in rows if row.get("accuracy") is not None]
    run = Run(
        key=order.key,
        row=order.row,
        column=order.column,
        preset=order.preset,
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
    if beside := _beside(evaluated):
        run["beside"] = beside
    if engine := engine_of(experiment):
        run["engine"] = engine
    if prepared := round(sum(row.get("seconds_prepared", 0.0) for row in rows), 3):
        run["prepared"] = prepared
    return run


def _beside(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Other numbers of the evaluated rounds, where any round has them; None in a round that has not."""
    found = {name: [row.get(name) for row in rows] for name in BESIDE}
    return {
        name: [None if value is None else round(BESIDE[name] * value, 2) for value in values]
        for name, values in found.items()
        if any(value is not None for value in values)
    }


def finished_run(order: Job) -> Run | None:
    """The run that the order's folder holds, if it went to its last round with the order's engine on any device."""
    _take_up(order)
    rounds, every = order.experiment.rounds, order.experiment.evaluate_every
    try:
        engine = engine_of(read_description(order.folder))
        made = json.loads((order.folder / MADE).read_text(encoding="utf-8"))
        lines = (order.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        looked = [row["round"] for row in rows if row.get("accuracy") is not None]
        run = make_run(order, rows, sum(row["seconds"] for row in rows), made)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, FedstillError):
        return None  # damaged, or written by a version that knew other keys
    whole = looked == [number for number in range(1, rounds + 1) if evaluates(number, rounds, every)]
    return run if engine == engine_of(order.experiment) and whole and fault_of(run) is None else None


def begun_as(order: Job) -> Experiment:
    """What to run in the order's folder: the experiment that was begun there, or the order's own.

    The folder's name holds the cell and the engine, so a begun run is the same; where its data lie may have changed.
    On another device its numbers would be those of two devices: it starts again.
    """
    _take_up(order)
    if not (order.folder / CONFIG_FILE).exists():
        return order.experiment
    try:
        begun = read_description(order.folder)
    except FedstillError:
        shutil.rmtree(order.folder)  # written by a version that knew other keys
        return order.experiment
    same_engine = engine_of(begun) == engine_of(order.experiment)
    if same_engine and begun.engine.device == order.experiment.engine.device:
        return begun
    _make_room(order, begun)
    return order.experiment


def _make_room(order: Job, begun: Experiment) -> None:
    """Names of folders did not always hold the engine: a run of another one goes where it belongs."""
    own = order.experiment.replace(engine=begun.engine.model_dump())
    place = run_folder(order.folder.parents[1], own, order.key)
    if (place / CONFIG_FILE).exists():  # the same engine on another device, or begun anew where it belongs
        shutil.rmtree(order.folder)
    else:
        _move(order.folder, place)


def _take_up(order: Job) -> None:
    """A run of the order's engine from before names of folders held it."""
    before = run_folder(order.folder.parents[1], order.experiment.replace(engine={}), order.key)
    if before == order.folder or (order.folder / CONFIG_FILE).exists():
        return
    with suppress(OSError, FedstillError):
        if engine_of(read_description(before)) == engine_of(order.experiment):
            _move(before, order.folder)


def _move(folder: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)  # nothing but what a start that failed has left
    place.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(place)


def tidy(folder: Path) -> None:
    """A finished run keeps its numbers and models; its checkpoints can be as large as all clients together."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


BENCH_LOCK = ".bench.lock"


def check_places(out: Path, results: Path) -> None:
    """Could the run folders and the results be written? Looks only."""
    if os.path.isdir(results):  # unlike Path's, no error where a folder may not be read
        raise FedstillError(f"--results: '{results}' is a folder: give a file")
    for option, folder in (("--out", out), ("--results", results.parent)):
        nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
        if not nearest.is_dir():
            raise FedstillError(f"{option}: '{nearest}' is a file, not a folder: name another place")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise FedstillError(f"{option}: '{nearest}' cannot be written to: name another place")


@contextmanager
def claimed(out: Path, results: Path) -> Iterator[None]:
    """Both places made, and `out` held while the runs are done."""
    check_places(out, results)
    lock = out / BENCH_LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = take(lock, wait=False)
    except BlockingIOError:
        who = holder(lock)
        raise FedstillError(f"--out: another bench works in '{out}', {who}: wait or use another --out") from None
    except OSError as error:
        raise FedstillError(f"--out: cannot write to '{out}' ({error.strerror}): name another folder") from None
    with released(lock, held):
        with holding(results):
            pass  # a place that cannot be written is told now rather than after the first run
        yield
