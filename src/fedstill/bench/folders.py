"""The folder of one run: its name, what a finished one says, and how an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedstill.bench.metrics import evaluates
from fedstill.bench.order import Order
from fedstill.bench.results import BESIDE, Run, engine_of, engine_text, fault_of, method_text
from fedstill.comparison import folder_name
from fedstill.config import Experiment
from fedstill.core.errors import FedstillError
from fedstill.environment import version_of
from fedstill.experiment import CONFIG_FILE, read_description
from fedstill.history import Row

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


def make_run(order: Order, rows: Sequence[Row], seconds: float, made: dict[str, Any]) -> Run:
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


def finished_run(order: Order) -> Run | None:
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


def begun_as(order: Order) -> Experiment:
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


def _make_room(order: Order, begun: Experiment) -> None:
    """Names of folders did not always hold the engine: a run of another one goes where it belongs."""
    own = order.experiment.replace(engine=begun.engine.model_dump())
    place = run_folder(order.folder.parents[1], own, order.key)
    if (place / CONFIG_FILE).exists():  # the same engine on another device, or begun anew where it belongs
        shutil.rmtree(order.folder)
    else:
        _move(order.folder, place)


def _take_up(order: Order) -> None:
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
