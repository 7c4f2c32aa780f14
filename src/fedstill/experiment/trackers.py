"""Experiment trackers as callbacks of a run; a package is imported when an experiment names it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError, suggest
from fedstill.experiment.config import Experiment
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Result, Row

Log = Callable[[int, dict[str, float]], Any]  # (round, numbers)
Close = Callable[[], Any]
Start = Callable[[RunInfo], tuple[Log, Close]]


def numbers(row: Row) -> dict[str, float]:
    """The plain numbers of a round; lists such as class accuracies stay in metrics.jsonl."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "round"
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested table: what trackers show as hyper-parameters."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        elif value is not None:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found


class Tracker(Callback):
    """Rounds go to `log(step, numbers)`, the end to `close()`; what these are is the package's business."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._log: Log | None = None
        self._close: Close | None = None

    def on_start(self, info: RunInfo) -> bool | None:
        self._log, self._close = self._start(info)
        return None

    def on_round(self, row: Row) -> bool | None:
        if self._log is not None:
            self._log(int(row["round"]), numbers(row))
        return None

    def on_end(self, result: Result) -> None:
        if self._close is not None:
            self._close()
        self._log = self._close = None


def tensorboard(experiment: Experiment, folder: Path | None) -> Tracker:
    """Event files under <run>/tensorboard; look at them with `tensorboard --logdir runs`."""
    package = _package("torch.utils.tensorboard", "tensorboard")
    if folder is None:
        raise FedstillError("track = 'tensorboard' writes files: give the run a folder (run_dir)")

    def start(info: RunInfo) -> Any:
        writer = package.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=len(info.past) + 1)

        def log(step: int, values: dict[str, float]) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        return log, writer.close

    return Tracker(start)


def mlflow(experiment: Experiment, folder: Path | None) -> Tracker:
    """A run of the MLflow experiment of the same name; where to is MLflow's own setting (MLFLOW_TRACKING_URI)."""
    package = _package("mlflow", "mlflow")

    def start(info: RunInfo) -> Any:
        package.set_experiment(experiment.name)
        package.start_run(run_name=f"{info.method}-seed{experiment.seed}")
        package.log_params({key: str(value) for key, value in flat(experiment.model_dump()).items()})
        return lambda step, values: package.log_metrics(values, step=step), package.end_run

    return Tracker(start)


def wandb(experiment: Experiment, folder: Path | None) -> Tracker:
    """A run of the Weights & Biases project of the experiment's name."""
    package = _package("wandb", "wandb")

    def start(info: RunInfo) -> Any:
        run = package.init(
            project=experiment.name,
            name=f"{info.method}-seed{experiment.seed}",
            config=flat(experiment.model_dump()),
            dir=None if folder is None else str(folder),
        )
        return lambda step, values: run.log(values, step=step), run.finish

    return Tracker(start)


def trackio(experiment: Experiment, folder: Path | None) -> Tracker:
    """A run of the trackio project of the experiment's name."""
    package = _package("trackio", "trackio")

    def start(info: RunInfo) -> Any:
        package.init(
            project=experiment.name,
            name=f"{info.method}-seed{experiment.seed}",
            config=flat(experiment.model_dump()),
        )
        return lambda step, values: package.log(values, step=step), package.finish

    return Tracker(start)


TRACKERS: dict[str, Callable[[Experiment, Path | None], Tracker]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
    "trackio": trackio,
}


def build_trackers(experiment: Experiment, folder: Path | None) -> Sequence[Tracker]:
    """The trackers that the experiment names, in its order."""
    for name in experiment.track:
        if name not in TRACKERS:
            raise FedstillError(f"track = '{name}' is unknown: {suggest(name, TRACKERS)}")
    return [TRACKERS[name](experiment, folder) for name in experiment.track]


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedstillError(f"track = '{package}' needs the package {package}: pip install {package}") from None
