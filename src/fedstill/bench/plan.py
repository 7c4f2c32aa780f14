"""What is to be run: every cell and seed that neither the results file nor a finished folder holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedstill.bench.folders import finished_run, run_folder
from fedstill.bench.form import Cell
from fedstill.bench.order import Order
from fedstill.bench.results import Records, Run, cell_key, run_id
from fedstill.bench.selection import with_data
from fedstill.core.errors import FedstillError
from fedstill.engine import choose_device

MOST_AT_ONCE = 8
BYTES_A_RUN = 8 << 30  # of GPU memory: data, a cohort of models, a captured graph


def make_orders(cells: Sequence[Cell], *, preset: str, seeds: int, device: str, out: Path) -> list[Order]:
    """All runs of the cells, seed by seed, so that partial results cover every method; a cell twice is one run."""
    orders: dict[tuple[str, int, str], Order] = {}
    for seed in range(seeds):
        for cell in cells:
            engine = {**cell.experiment.engine.model_dump(), "device": device}
            experiment = cell.experiment.replace(seed=seed, engine=engine)
            key = cell_key(experiment)
            folder = run_folder(out, experiment, key)
            order = Order(cell.row, cell.column, preset, key, experiment, folder)
            orders.setdefault(order.run_id, order)
    return list(orders.values())


def split_done(orders: Sequence[Order], runs: Sequence[Run]) -> tuple[list[Order], list[Run]]:
    """(what is left to do, runs whose folder is finished but which the results do not hold yet)."""
    known, records = {run_id(run) for run in runs}, Records(runs)
    left: list[Order] = []
    found: list[Run] = []
    for order in orders:
        if order.run_id in known:
            continue
        if (run := finished_run(order)) is not None:
            found.append(run)
        elif order.experiment.seed not in records.of(order.experiment):
            left.append(order)
    return left, found


def place_data(orders: Sequence[Order], folder: Path | None, skip: Callable[[str], None]) -> list[Order]:
    """Orders with their data taken from `folder`; columns whose data are not there are told to `skip`, once each."""
    placed: list[Order] = []
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
