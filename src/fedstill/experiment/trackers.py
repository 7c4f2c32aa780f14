"""Send the numbers of a run to experiment trackers; a package is imported when an experiment names it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.experiment.config import Experiment
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Result, Row

Log = Callable[[int, dict[str, float]], Any]  # (round, numbers)
Close = Callable[[], Any]
Start = Callable[[Any, Experiment, Path | None, RunInfo], tuple[Log, Close]]  # the package comes first


def numbers(row: Row) -> dict[str, float]:
    """Return the plain numbers of a round, without lists such as class accuracies."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "round"
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table with dotted keys, as trackers show hyper-parameters; keys without a value are left out."""
    dotted: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            dotted.update(flat(value, f"{prefix}{key}."))
        elif value is not None:
            dotted[prefix + key] = list(value) if isinstance(value, tuple) else value
    return dotted


class Tracker(Callback):
    """Sends the numbers of each round to a tracking package."""

    def __init__(self, start: Callable[[RunInfo], tuple[Log, Close]]) -> None:
        self._start = start

    def on_start(self, info: RunInfo) -> None:
        self._log, self._close = self._start(info)

    def on_round(self, row: Row) -> None:
        self._log(int(row["round"]), numbers(row))

    def on_end(self, result: Result) -> None:
        self._close()


def tensorboard(package: Any, experiment: Experiment, folder: Path | None, info: RunInfo) -> tuple[Log, Close]:
    """Write event files under <run>/tensorboard, which `tensorboard --logdir runs` shows."""
    writer = package.SummaryWriter(log_dir=f"{folder}/tensorboard", purge_step=len(info.past) + 1)

    def log(step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return log, writer.close


def mlflow(package: Any, experiment: Experiment, folder: Path | None, info: RunInfo) -> tuple[Log, Close]:
    """Log a run of the MLflow experiment of the same name to the server that MLFLOW_TRACKING_URI names."""
    package.set_experiment(experiment.name)
    package.start_run(run_name=f"{info.method}-seed{experiment.seed}")
    package.log_params({key: str(value) for key, value in flat(experiment.model_dump()).items()})
    return lambda step, values: package.log_metrics(values, step=step), package.end_run


def project_run(package: Any, experiment: Experiment, folder: Path | None, info: RunInfo) -> tuple[Log, Close]:
    """Log a run to the project of the experiment's name, at Weights & Biases or in trackio, which has its calls."""
    place = {"dir": str(folder)} if folder is not None and package.__name__ == "wandb" else {}
    name = f"{info.method}-seed{experiment.seed}"
    package.init(project=experiment.name, name=name, config=flat(experiment.model_dump()), **place)
    return lambda step, values: package.log(values, step=step), package.finish


TRACKERS: dict[str, tuple[str, Start]] = {  # by name: the module to import, and how a run is begun with it
    "tensorboard": ("torch.utils.tensorboard", tensorboard),
    "mlflow": ("mlflow", mlflow),
    "wandb": ("wandb", project_run),
    "trackio": ("trackio", project_run),
}


def build_trackers(experiment: Experiment, folder: Path | None) -> Sequence[Tracker]:
    """Return the trackers that the experiment names, in its order."""
    trackers = []
    for name in experiment.track:
        module, start = TRACKERS[name]
        try:
            package = importlib.import_module(module)
        except ImportError:
            raise FedstillError(f"track = '{name}' needs the package {name}: pip install {name}") from None
        if name == "tensorboard" and folder is None:
            raise FedstillError("track = 'tensorboard' writes files: give the run a folder (run_dir)")
        trackers.append(Tracker(partial(start, package, experiment, folder)))
    return trackers
