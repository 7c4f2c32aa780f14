"""From an experiment to the objects that a run needs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.needs import check_phases
from fedstill.core.seeds import seed_for
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
from fedstill.engine import check_compiler, choose_device
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import build_network
from fedstill.experiment.overrides import describe_partition
from fedstill.loop.federate import check_promise
from fedstill.loop.guard import Guard
from fedstill.methods.lookup import build_method, write
from fedstill.methods.options import find
from fedstill.partition import SHARES_ROWS
from fedstill.partition.cached import cached_parts
from fedstill.privacy.plan import Privacy

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
    return cached_parts(lambda: scheme(labels, partition.clients, seed=seed, **options), labels, identity)


def check_ready(experiment: Experiment, federation: Federation) -> None:
    """Every mistake that can be found before the first round: device, model, method, what it needs and promises."""
    where = choose_device(experiment.engine.device)
    if experiment.engine.compile:
        check_compiler(where)
    parts = arguments(experiment, federation)
    named, wanted = f"method.name = '{experiment.method.name}'", ("model", "federation", "training")
    check_phases(phases_of(parts["method"]), **{key: parts[key] for key in wanted}, label=named)
    spoken = ("method", *wanted, "rounds", "cohort", "seed", "guard", "sampling", "privacy")
    try:
        check_promise(**{key: parts[key] for key in spoken})
    except FedstillError as error:
        method = write(experiment.method.name, experiment.method.options)
        raise FedstillError(f"{method}: {error}") from None


def arguments(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """What an experiment says, in the words of `federate`."""
    engine = experiment.engine
    return {
        "method": build_method(experiment.method.name, experiment.method.options),
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


def _owner_columns(experiment: Experiment) -> list[str]:
    """partition.keys of a natural split: the columns whose values are the clients."""
    if experiment.partition.scheme != "natural":
        return []
    given = experiment.partition.options.get("keys", [])
    return [given] if isinstance(given, str) else list(given)
