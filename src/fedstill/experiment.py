"""From an Experiment to its result: build the parts, run, resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedstill import toml_io
from fedstill.callbacks import Callback
from fedstill.config import Experiment, ModelSection, checked_experiment
from fedstill.core.errors import FedstillError
from fedstill.core.needs import check_phases
from fedstill.core.phases import phases_of
from fedstill.core.seeds import seed_for
from fedstill.core.threads import threads
from fedstill.core.types import Federation
from fedstill.data import (
    Source,
    Unlabeled,
    central_pool,
    hold_validation,
    limit_test,
    load,
    make_federation,
    owners,
    scale_inputs,
    split_unlabeled,
    tokenise,
    with_test_of,
)
from fedstill.data.kept_parts import kept_parts
from fedstill.data.load import is_embedded
from fedstill.engine import check_compiler, choose_device
from fedstill.environment import environment
from fedstill.evaluate import label_counts
from fedstill.expression import anchored, label, write
from fedstill.guard import Guard
from fedstill.history import Result
from fedstill.kept_results import KeptResults
from fedstill.methods import build_method
from fedstill.networks import build_network
from fedstill.options import find
from fedstill.partition import SHARES_ROWS
from fedstill.places import check_run_folder, unlabeled_place
from fedstill.privacy.budget import Privacy
from fedstill.prototypes import MIXED, describe_model
from fedstill.report.curves import Curve, learning_curves
from fedstill.report.generated import show_generated
from fedstill.report.pseudo_labels import has_pseudo_labels, pseudo_label_picture
from fedstill.rounds import check_promise, federate
from fedstill.settings import describe_partition
from fedstill.trackers import build_trackers

CONFIG_FILE = "config.toml"
TOKENIZER_FILE = "tokenizer.json"
_log = logging.getLogger("fedstill.run")


def load_source(experiment: Experiment) -> Source:
    """The experiment's data; it does not depend on the seed, so that seeds share one test set.

    Texts are not tokens yet: whose texts a tokenizer may learn from depends on the seed (see build_federation).
    """
    data = experiment.data
    keys = [*data.keys, *(key for key in _owner_columns(experiment) if key not in data.keys)]
    source = load(
        data.source,
        label=data.label,
        inputs=data.inputs,
        keys=keys,
        size=data.size,
        window=data.window,
        text=data.tokens is not None,
    )
    if data.test is not None:
        source = with_test_of(source, data.test, label=data.label)
    if data.client_rows is not None:
        source = central_pool(source, data.client_rows, test_share=data.test_share)
    return source if data.test_limit is None else limit_test(source, data.test_limit)


def build_federation(experiment: Experiment, source: Source | None = None) -> Federation:
    """Who holds what: a function of [data], [partition] and the seed only, so that methods can share it."""
    source = load_source(experiment) if source is None else source
    data, partition, seed = experiment.data, experiment.partition, experiment.seed
    source, unlabeled = split_unlabeled(source, data.unlabeled, seed=seed, limit=data.unlabeled_limit)
    _tell_skipped(unlabeled)
    if data.tokens is not None:
        how: dict[str, Any] = {"vocabulary": data.vocabulary, "tokenizer": data.tokenizer}
        source, unlabeled = tokenise(source, unlabeled, length=data.tokens, **how)
    source = scale_inputs(source, unlabeled, data.scale, mean=data.mean, std=data.std)
    source, validation = hold_validation(source, data.validation, seed=seed)
    options = partition.options
    if columns := _owner_columns(experiment):
        options["keys"] = owners(source, *columns)
    parts = _draw_parts(experiment, source.train.y.numpy(), options)
    return make_federation(
        source,
        parts,
        unlabeled=unlabeled,
        validation=validation,
        partition=describe_partition(experiment),
        shared_rows=partition.scheme in SHARES_ROWS,
    )


def _tell_skipped(unlabeled: Unlabeled | None) -> None:
    if unlabeled is None or not unlabeled.skipped:
        return
    names = unlabeled.skipped
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    told = f"{len(names)} of {len(names) + len(unlabeled.ids)} files or rows cannot be read and are left out"
    _log.warning("data.unlabeled: %s: %s%s", told, ", ".join(names[:5]), more)


def _draw_parts(experiment: Experiment, labels: np.ndarray, options: dict[str, Any]) -> list[np.ndarray]:
    """The experiment's split; a replay of a published stream does not depend on the seed."""
    partition = experiment.partition
    scheme, seed = find("partition", partition.scheme), seed_for(experiment.seed, "partition")
    drawn_from = None if options.get("legacy_seed") is not None else int(seed)
    identity = {"scheme": partition.scheme, "clients": partition.clients, "seed": drawn_from, **partition.options}
    if "keys" in options:
        return list(scheme(labels, partition.clients, seed=seed, **options))
    return kept_parts(lambda: scheme(labels, partition.clients, seed=seed, **options), labels, identity)


def check_ready(experiment: Experiment, federation: Federation) -> None:
    """Every mistake that can be found before the first round: device, model, method, what it needs and promises."""
    where = choose_device(experiment.engine.device)
    if experiment.engine.compile:
        check_compiler(where)
    parts = arguments(experiment, federation)
    named, wanted = f"algorithm.name = '{experiment.algorithm.name}'", ("model", "federation", "training")
    check_phases(phases_of(parts["algorithm"]), **{key: parts[key] for key in wanted}, method=named)
    spoken = ("algorithm", *wanted, "rounds", "cohort", "seed", "guard", "sampling", "privacy")
    try:
        check_promise(**{key: parts[key] for key in spoken})
    except FedstillError as error:
        method = write(experiment.algorithm.name, experiment.algorithm.options)
        raise FedstillError(f"{method}: {error}") from None


def run(
    experiment: Experiment,
    *,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    resume: bool = False,
    pictures: bool = True,
) -> Result:
    """Run an experiment; with `run_dir` its configuration, numbers, models and pictures are written there.

    federation: an already built one (by default it is built from the experiment).
    """
    federation = build_federation(checked_experiment(experiment)) if federation is None else federation
    check_ready(experiment, federation)
    folder = None if run_dir is None else Path(run_dir)
    experiment = experiment.with_scale_of(federation.train.mean, federation.train.std)
    if folder is not None:
        if resume and (folder / CONFIG_FILE).exists():
            _check_same(experiment, folder)
        write_description(experiment, folder)
        _keep_tokenizer(federation, folder)
    trackers = build_trackers(experiment, folder)
    with threads(experiment.engine.threads):
        result = federate(
            **arguments(experiment, federation),
            run_dir=folder,
            callbacks=[*callbacks, *trackers],
            method=label(experiment.algorithm.name),
            resume=resume,
            keeper=KeptResults(),
        )
    result = show_generated(result, federation, folder, seed=experiment.seed)
    if folder is not None and pictures:
        draw_pictures(experiment, federation, {result.method: [result]}, folder)
    return result


def arguments(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """What an experiment says, in the words of `federate`."""
    engine = experiment.engine
    return {
        "algorithm": build_method(experiment.algorithm.name, experiment.algorithm.options),
        "model": build_network(experiment, federation),
        "federation": federation,
        "training": experiment.local.to_training(),
        "rounds": experiment.rounds,
        "cohort": experiment.cohort_size(federation.population),
        "sampling": experiment.sampling,
        "privacy": Privacy(**experiment.privacy.model_dump()),
        "settings": experiment.options_text(),
        "seed": experiment.seed,
        "engine": engine.name,
        "device": engine.device,
        "checkpoint_every": experiment.checkpoint_every,
        "evaluate_every": experiment.evaluate_every,
        "evaluate_batch": experiment.evaluate_batch,
        "guard": Guard(**experiment.guard.model_dump()),
        "target": experiment.target,
        "engine_options": engine.model_dump(include={"chunk", "precision", "graphs", "compile"}),
    }


def resume_run(run_dir: str | Path, *, callbacks: Sequence[Callback] = ()) -> Result:
    """Go on with the run in a folder from its newest checkpoint; the result equals an uninterrupted run."""
    experiment = read_description(Path(run_dir))
    return run(experiment, run_dir=run_dir, callbacks=callbacks, resume=True)


def new_run_dir(experiment: Experiment, root: str | Path = "runs") -> Path:
    """runs/<name>/<utc>-<hash>: unique for the experiment and the second."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = Path(root) / experiment.name / f"{stamp}-{experiment.digest()}"
    twin = 2
    while folder.exists():
        folder = folder.with_name(f"{stamp}-{experiment.digest()}-{twin}")
        twin += 1
    return folder


def write_description(experiment: Experiment, folder: Path) -> None:
    """config.toml (every default spelled out) and env.json; a resumed run keeps those of its start."""
    if not (begun := (folder / CONFIG_FILE).exists()):
        check_run_folder(experiment, folder, asked="run_dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not begun:
            write_whole(folder / "env.json", json.dumps(environment(), indent=2) + "\n")
            write_whole(folder / CONFIG_FILE, _anchored(experiment).resolved().to_toml())
    except OSError as error:
        raise FedstillError(
            f"cannot write into '{folder}' ({error.strerror or error}): choose another folder"
        ) from error


def _keep_tokenizer(federation: Federation, folder: Path) -> None:
    """tokenizer.json, so that other texts can be read as the run's were, whatever becomes of the data."""
    if federation.train.tokenizer is None:
        return
    path, file = folder / TOKENIZER_FILE, federation.train.tokenizer.file
    if path.exists() and path.read_text(encoding="utf-8") != file:
        raise FedstillError(
            f"'{path}' is not the tokenizer that this data gives now: the data have changed since the run began, "
            "start a new one"
        )
    write_whole(path, file)


def write_whole(path: Path, text: str) -> None:
    """All of the text or nothing, whenever the process ends."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _anchored(experiment: Experiment) -> Experiment:
    """Files and folders by their full path, so that a run can be resumed from anywhere."""
    data = experiment.data
    places = {"source": data.source, "unlabeled": unlabeled_place(experiment)}
    places |= {"test": data.test, "tokenizer": data.tokenizer}
    here = {key: str(Path(str(place)).resolve()) for key, place in places.items() if is_local(place)}
    model = _anchored_model(experiment.model)
    if model != experiment.model.model_dump():
        experiment = experiment.replace(model=model)
    method = anchored(experiment.algorithm.name)
    if method != experiment.algorithm.name:
        experiment = experiment.replace(algorithm={**experiment.algorithm.model_dump(), "name": method})
    methods = [anchored(entry) for entry in experiment.compare.methods]
    if methods != list(experiment.compare.methods):
        experiment = experiment.replace(compare={**experiment.compare.model_dump(), "methods": methods})
    return experiment.replace(data={**data.model_dump(), **here}) if here else experiment


def _anchored_model(section: ModelSection) -> dict[str, Any]:
    found = {**section.model_dump(), "name": anchored(section.name)}
    if "prototypes" in found:
        found["prototypes"] = [anchored(text) for text in found["prototypes"]]
    return found


def is_local(place: object) -> bool:
    """A file or folder of this machine; the embedded sets come before folders of the same name."""
    return isinstance(place, str) and not is_embedded(place) and Path(place).exists()


def _check_same(experiment: Experiment, folder: Path) -> None:
    """A run is only resumed as what it was; it may get more rounds."""
    written = toml_io.loads(_anchored(experiment).resolved().to_toml(), where=CONFIG_FILE)  # as the folder's was
    asked, begun = (
        one.resolved().model_dump() for one in (Experiment.model_validate(written), read_description(folder))
    )
    other = [key for key in asked if key not in ("rounds", "track") and asked[key] != begun[key]]
    if other:
        raise FedstillError(
            f"'{folder}' holds a run with another {' and '.join(other)}: use `fedstill resume`, or a new folder"
        )


def read_description(folder: Path) -> Experiment:
    if not (folder / CONFIG_FILE).is_file() or not (folder / CONFIG_FILE).stat().st_size:
        raise FedstillError(f"'{folder}' holds no run (no {CONFIG_FILE}): give the folder that `fedstill run` named")
    return Experiment.from_toml(folder / CONFIG_FILE)


def draw_pictures(
    experiment: Experiment, federation: Federation, results: dict[str, list[Result]], folder: Path
) -> list[Path]:
    """partition.png, curves.png, and pseudo_labels.png where a method makes them; without matplotlib a line of how."""
    drawn = [folder / "partition.png", folder / "curves.png"]
    try:
        from fedstill.report.partition_picture import partition_picture

        title = f"{federation.train.name}: {federation.partition}"
        counts = label_counts(federation).numpy()
        partition_picture(counts, folder / "partition.png", title=title, classes=federation.train.classes)
        curves, network = _curves(results), describe_model(experiment.model.name, experiment.model.options)
        trained = f"{title}; {network}" if experiment.model.name == MIXED else title
        learning_curves(curves, folder / "curves.png", title=trained, target=experiment.target)
        rows = {method: [one.history.rows for one in runs] for method, runs in results.items()}
        if any(has_pseudo_labels(one) for runs in rows.values() for one in runs):
            drawn.append(folder / "pseudo_labels.png")
            pseudo_label_picture(rows, drawn[-1], title=title, classes=federation.train.classes)
    except FedstillError as error:
        _log.warning("no pictures: %s", error)
        return []
    return drawn


def _curves(results: dict[str, list[Result]]) -> dict[str, list[Curve]]:
    """A line a method; a single run of several architectures shows each of them, too."""
    curves = {method: [_curve(one) for one in runs] for method, runs in results.items()}
    runs = [one for same in results.values() for one in same]
    if len(runs) == 1:
        others = (name for name in runs[0].prototypes if name != runs[0].reported)
        curves |= {f"{runs[0].method}: {name}": [_curve(runs[0], f"accuracy_{name}")] for name in others}
    return curves


def _curve(result: Result, metric: str = "accuracy") -> Curve:
    rows = result.history.evaluated
    return [row["round"] for row in rows], [row[metric] for row in rows]


def _owner_columns(experiment: Experiment) -> list[str]:
    """partition.keys of a natural split: the columns whose values are the clients."""
    if experiment.partition.scheme != "natural":
        return []
    given = experiment.partition.options.get("keys", [])
    return [given] if isinstance(given, str) else list(given)
