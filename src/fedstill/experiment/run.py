"""Run an experiment, or resume the run in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedstill.core.trainer import threads
from fedstill.core.types import Federation
from fedstill.experiment.build import build, split_settings
from fedstill.experiment.config import Experiment, checked_experiment
from fedstill.experiment.model import describe_model
from fedstill.experiment.run_folder import (
    CONFIG_FILE,
    check_run_folder,
    check_same_run,
    read_description,
    with_given_data,
    write_contract,
    write_description,
)
from fedstill.experiment.trackers import build_trackers
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.evaluate import label_counts
from fedstill.loop.federate import Built, federate
from fedstill.loop.history import Result
from fedstill.models.mixed import MIXED
from fedstill.report import draw_all
from fedstill.report.curves import Curve, learning_curves
from fedstill.report.generated import show_generated
from fedstill.report.partition import partition_picture
from fedstill.report.pseudo_labels import has_pseudo_labels, pseudo_label_picture


def run(
    experiment: Experiment,
    *,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    resume: bool = False,
    pictures: bool = True,
) -> Result:
    """Run an experiment and return its result; configuration, numbers, models and pictures go into `run_dir`.

    federation: a federation that is built already (by default it is built from the experiment).
    """
    built = build(checked_experiment(experiment), federation)
    return run_built(experiment, built, run_dir=run_dir, callbacks=callbacks, resume=resume, pictures=pictures)


def run_built(
    experiment: Experiment,
    built: Built,
    *,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    pictures: bool = True,
) -> Result:
    """Run an experiment whose parts `build` has made already, and return its result."""
    folder, federation = None if run_dir is None else Path(run_dir), built.federation
    if federation.built_from != split_settings(experiment):
        experiment = with_given_data(experiment)
    experiment = experiment.with_scale_of(federation.train.mean, federation.train.std)
    watchers = [*callbacks, *(build_trackers(experiment, folder) if experiment.track else ())]
    if folder is not None:
        if not (folder / CONFIG_FILE).exists():
            check_run_folder(experiment, folder, asked="run_dir")
        elif resume:
            check_same_run(experiment, federation, folder)
        watchers = [_Describe(experiment, federation, folder), *watchers]
    count = experiment.engine.threads
    with nullcontext() if count is None else threads(count):
        result = federate(built, run_dir=folder, callbacks=watchers, resume=resume)
    if result.samples is not None and folder is not None:
        result = show_generated(result, federation, folder, seed=experiment.seed)
    if folder is not None and pictures:
        draw_pictures(experiment, federation, {result.method: [result]}, folder)
    return result


class _Describe(Callback):
    """Writes config.toml, env.json and the tokenizer once all checks have passed, before the first round."""

    def __init__(self, experiment: Experiment, federation: Federation, folder: Path) -> None:
        self._experiment, self._federation, self._folder = experiment, federation, folder

    def on_start(self, info: RunInfo) -> None:
        write_description(self._experiment, self._folder)
        write_contract(self._experiment, self._federation, self._folder)


def resume_run(run_dir: str | Path, *, callbacks: Sequence[Callback] = ()) -> Result:
    """Go on with the run in a folder from its newest checkpoint; the result equals that of an uninterrupted run."""
    experiment = read_description(Path(run_dir))
    return run(experiment, run_dir=run_dir, callbacks=callbacks, resume=True)


def draw_pictures(
    experiment: Experiment, federation: Federation, results: dict[str, list[Result]], folder: Path
) -> list[Path]:
    """Draw partition.png, curves.png and, where a method makes pseudo-labels, pseudo_labels.png; return their paths."""
    title, classes = f"{federation.train.name}: {federation.partition}", federation.train.classes
    network = describe_model(experiment.model.name, experiment.model.options)
    trained = f"{title}; {network}" if experiment.model.name == MIXED else title
    rows = {method: [result.history.rows for result in runs] for method, runs in results.items()}
    counts = label_counts(federation).numpy()
    pictures: dict[str, Callable[[Path], Any]] = {
        "partition.png": lambda path: partition_picture(counts, path, title=title, classes=classes),
        "curves.png": lambda path: learning_curves(_curves(results), path, title=trained, target=experiment.target),
    }
    if any(has_pseudo_labels(history) for histories in rows.values() for history in histories):
        pictures["pseudo_labels.png"] = lambda path: pseudo_label_picture(rows, path, title=title, classes=classes)
    return draw_all(pictures, folder)


def _curves(results: dict[str, list[Result]]) -> dict[str, list[Curve]]:
    """Return one line for each method; a single run of several architectures has one for each of them, too."""
    curves = {method: [_curve(result) for result in runs] for method, runs in results.items()}
    runs = [result for seeds in results.values() for result in seeds]
    if len(runs) == 1:
        others = (name for name in runs[0].prototypes if name != runs[0].reported)
        curves |= {f"{runs[0].method}: {name}": [_curve(runs[0], f"accuracy_{name}")] for name in others}
    return curves


def _curve(result: Result, metric: str = "accuracy") -> Curve:
    rows = result.history.evaluated
    return [row["round"] for row in rows], [row[metric] for row in rows]
