"""Run an experiment, or resume the run in a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.data import AT_SITES, GIVEN
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import given_threads
from fedstill.core.types import Federation
from fedstill.data import Source
from fedstill.experiment.build import build, build_early_stop, build_federation, load_source, split_settings
from fedstill.experiment.config import Experiment, PartitionSection, checked_experiment
from fedstill.experiment.model import Network, build_network, describe_model
from fedstill.experiment.more_rounds import with_rounds
from fedstill.experiment.run_folder import (
    CONFIG_FILE,
    check_run_folder,
    check_same_experiment,
    check_same_run,
    make_contract,
    read_description,
    with_given_data,
    with_given_network,
    write_description,
)
from fedstill.experiment.trackers import build_trackers
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.checkpoint import list_checkpoints
from fedstill.loop.evaluate import label_counts
from fedstill.loop.federate import Built, closes_folder, federate
from fedstill.loop.history import Result
from fedstill.loop.references import REFERENCES_FILE, References, find_references
from fedstill.methods.fedavg import fedavg
from fedstill.models.mixed import MIXED
from fedstill.report import draw_all
from fedstill.report.curves import Curve, learning_curves
from fedstill.report.generated import show_generated
from fedstill.report.parties import PICTURE_FILE, parties_of, party_picture, write_parties
from fedstill.report.partition import COUNTS_FILE, partition_picture, write_counts
from fedstill.report.pseudo_labels import has_pseudo_labels, pseudo_label_picture
from fedstill.report.table import reference_rows
from fedstill.storage.files import working_in
from fedstill.storage.secrets import secret_of

_log = logging.getLogger("fedstill.run")


def run(
    experiment: Experiment,
    *,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    data: Any = None,
    model: Network | None = None,
    resume: bool = False,
    pictures: bool = True,
) -> Result:
    """Run an experiment and return its result; configuration, numbers, models and pictures go into `run_dir`.

    federation: a federation that is built already (by default it is built from the experiment).
    data: data that take the place of data.source: (x, y) or (x, y, owners), where x is a DataFrame, an array, a tensor
        or a list of texts; a DataFrame with its label column; a torch Dataset; or a Source. Each owner is a client.
    model: a network that takes the place of [model]: an nn.Module, a function that builds one, or a Model.
    resume: go on with the run in `run_dir`, with the same data and the same network.
    """
    checked_experiment(experiment)
    if data is not None:
        if federation is not None:
            raise FedstillError("federation and data both say whose rows there are: give one of them")
        experiment, source = read_data(experiment, data)
        federation = build_federation(experiment, source)
    if model is not None:
        federation = build_federation(experiment) if federation is None else federation
        model = build_network(experiment, federation, model)
        experiment = with_given_network(experiment, model, reads_ids=federation.train.text)
    built = build(experiment, federation, model)
    if run_dir is not None and not resume:
        _say_what_no_file_holds(experiment, built.federation)
    return run_built(experiment, built, run_dir=run_dir, callbacks=callbacks, resume=resume, pictures=pictures)


def read_data(experiment: Experiment, data: Any) -> tuple[Experiment, Source]:
    """Read data in Python, and return the experiment that suits their owners, and the data.

    Owners become the clients of an experiment that leaves its partition at the default. A cohort that is left at its
    default has at most all of them.
    """
    owner = ""
    if not isinstance(data, Source) and isinstance(data, tuple) and len(data) == 3:
        from fedstill.data.given import owner_name

        owner = owner_name(data[0], data[2])
        if experiment.partition == PartitionSection():
            natural = PartitionSection.model_validate({"scheme": "natural", "keys": owner, "clients": 0})
            experiment = experiment.model_copy(update={"partition": natural})
        elif experiment.partition.scheme != "natural":
            raise FedstillError(
                f"data name the owner of each row, and partition.scheme = '{experiment.partition.scheme}' shares them "
                "out otherwise: leave out the owners, or the partition"
            )
    source = data if isinstance(data, Source) else load_source(experiment, data)
    if owner and experiment.cohort == Experiment.model_fields["cohort"].default:
        count = len(np.unique(source.keys[owner]))
        experiment = experiment.model_copy(update={"cohort": min(experiment.cohort, count)})
    return experiment, source


def _say_what_no_file_holds(experiment: Experiment, federation: Federation) -> None:
    """Log how to go on with a run, and how to predict with it, where its data or its network are in Python only."""
    if federation.built_from != split_settings(experiment):
        _log.warning(
            "the data are in Python only: to go on with this run, call fedstill.run with the same data and "
            "resume=True; `fedstill resume` cannot"
        )
    if experiment.model.name == GIVEN:
        _log.warning(
            "the network is in Python only: to predict, call fedstill.load_run(folder, model=network); "
            "`fedstill predict` and `fedstill resume` cannot build it"
        )


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
    if federation.built_from != split_settings(experiment) and experiment.data.source != AT_SITES:
        experiment = with_given_data(experiment)
    experiment = experiment.with_scale_of(federation.train.mean, federation.train.std)
    with ExitStack() as stack:
        if folder is not None:
            if not (folder / CONFIG_FILE).exists():
                check_run_folder(experiment, folder, asked="run_dir")
            stack.enter_context(working_in(folder))  # before anything is read that another process may be writing
        stack.enter_context(_threads_of(experiment))
        return _run_here(experiment, built, folder, callbacks, resume=resume, pictures=pictures)


def _run_here(
    experiment: Experiment,
    built: Built,
    folder: Path | None,
    callbacks: Sequence[Callback],
    *,
    resume: bool,
    pictures: bool,
) -> Result:
    """Run an experiment in a folder that is ours for this time."""
    federation = built.federation
    watchers = [*callbacks, *(build_trackers(experiment, folder) if experiment.track else ())]
    closed = folder is not None and closes_folder(built)
    secret = secret_of(folder) if closed else b""
    built = replace(built, secret=secret)
    if folder is not None:
        if not (folder / CONFIG_FILE).exists():
            contract = make_contract(experiment, federation, secret)
            watchers = [_Describe(experiment, folder, federation, contract, closed=closed), *watchers]
            built = replace(built, contract=contract["seal"])
        elif resume or not list_checkpoints(folder / "checkpoints"):
            built = replace(built, contract=check_same_run(experiment, federation, folder, secret))
            watchers = [_Describe(experiment, folder, federation, closed=closed), *watchers]
    stop = build_early_stop(experiment)
    watchers += [] if stop is None else [stop]
    result = federate(built, run_dir=folder, callbacks=watchers, resume=resume)
    if stop is not None and len(result.history.rows) < experiment.rounds:
        result = replace(result, ended_early=stop.reason)
    if experiment.compare.references:
        file = None if folder is None else folder / REFERENCES_FILE
        references = measure_references(experiment, built, file=file, callbacks=callbacks, resume=resume)
        result = replace(result, references=references)
    if result.samples is not None and folder is not None:
        result = show_generated(result, federation, folder, seed=experiment.seed, closed=closed)
    if folder is not None and pictures:
        known = [] if result.references is None else [result.references]
        draw_pictures(experiment, federation, {result.method: [result]}, folder, known, closed=closed)
    if folder is not None and (parties := parties_of(federation, result)):
        write_parties(parties, folder)
        title = f"{result.method} on {federation.train.name}: {federation.partition}"
        if pictures:
            draw_all({PICTURE_FILE: lambda path: party_picture(parties, path, title=title)}, folder)
    return result


def measure_references(
    experiment: Experiment, built: Built, *, file: Path | None, callbacks: Sequence[Callback], resume: bool
) -> References:
    """Return the reference points of a run; see loop/references.py. They are the same for all methods."""
    with _threads_of(experiment):
        return find_references(built, fedavg(), file=file, callbacks=callbacks, resume=resume)


def _threads_of(experiment: Experiment) -> AbstractContextManager[None]:
    count = experiment.engine.threads
    return nullcontext() if count is None else given_threads(count)


class _Describe(Callback):
    """Writes contract.json, config.toml, env.json and partition.json once all checks have passed, before round 1.

    closed: how many samples clients hold is left out, see loop/closed_folder.py.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        federation: Federation,
        contract: Mapping[str, Any] | None = None,
        *,
        closed: bool = False,
    ) -> None:
        self._experiment, self._folder, self._federation = experiment, folder, federation
        self._contract, self._closed = contract, closed

    def on_start(self, info: RunInfo) -> None:
        write_description(self._experiment, self._folder, self._contract)
        if not (self._folder / COUNTS_FILE).exists():
            federation = self._federation
            counts = label_counts(federation).numpy()
            write_counts(
                counts, self._folder, classes=federation.train.classes, names=federation.names, hidden=self._closed
            )


def resume_run(run_dir: str | Path, *, rounds: int | None = None, callbacks: Sequence[Callback] = ()) -> Result:
    """Go on with the run in a folder from its newest checkpoint; the result equals that of an uninterrupted run.

    rounds: go on to so many rounds instead of the experiment's.
    """
    experiment = read_description(Path(run_dir))
    check_same_experiment(experiment, Path(run_dir))  # before the data are read, because it names the setting
    if rounds is not None:
        experiment, notes = with_rounds(experiment, rounds, Path(run_dir))
        for note in notes:
            _log.warning(note)
    return run(experiment, run_dir=run_dir, callbacks=callbacks, resume=True)


def draw_pictures(
    experiment: Experiment,
    federation: Federation,
    results: dict[str, list[Result]],
    folder: Path,
    references: Sequence[References] = (),
    *,
    closed: bool = False,
) -> list[Path]:
    """Draw partition.png, curves.png and, where a method makes pseudo-labels, pseudo_labels.png; return their paths.

    closed: without partition.png, which shows what clients hold.
    """
    title, classes = f"{federation.train.name}: {federation.partition}", federation.train.classes
    network = describe_model(experiment.model.name, experiment.model.options)
    trained = f"{title}; {network}" if experiment.model.name == MIXED else title
    rows = {method: [result.history.rows for result in runs] for method, runs in results.items()}
    counts = label_counts(federation).numpy()
    levels = {row.method: row.mean for row in reference_rows(references)}
    pictures: dict[str, Callable[[Path], Any]] = {
        "partition.png": lambda path: partition_picture(counts, path, title=title, classes=classes),
        "curves.png": lambda path: learning_curves(
            _curves(results), path, title=trained, target=experiment.target, references=levels
        ),
    }
    if any(has_pseudo_labels(history) for histories in rows.values() for history in histories):
        pictures["pseudo_labels.png"] = lambda path: pseudo_label_picture(rows, path, title=title, classes=classes)
    if closed:
        del pictures["partition.png"]
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
