"""From an experiment to the objects that a run needs."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np

from fedstill.core.errors import FedstillError, suggest
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
from fedstill.engine import Engines, build_engines
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import build_network
from fedstill.experiment.overrides import describe_partition
from fedstill.loop.evaluate import EVALUATIONS, Evaluate
from fedstill.loop.federate import Built, Schedule
from fedstill.methods.lookup import aggregate_part, build_phases, label, own_function
from fedstill.methods.options import find
from fedstill.partition import SHARES_ROWS
from fedstill.partition.common import cached_parts
from fedstill.storage.cache import Cache

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


def build(experiment: Experiment, federation: Federation | None = None) -> Built:
    """Everything that a run of this experiment needs; no other function turns its text into objects.

    federation: an already built one (by default it is built from the experiment).
    """
    server = experiment.server  # the method first: two parts that clash are told before the data are read
    aggregate = aggregate_part(server.aggregate)
    method = build_phases(experiment.method.phases, aggregate=aggregate, buffers=server.buffers)
    federation = build_federation(experiment) if federation is None else federation
    engine = experiment.engine
    how = engine.model_dump(exclude={"name", "device", "threads"})
    return Built(
        method=method,
        model=build_network(experiment, federation),
        federation=federation,
        training=experiment.local,
        schedule=Schedule(**{key: getattr(experiment, key) for key in Schedule.__dataclass_fields__}),
        engines=partial(_engines, engine.name, engine.device, **how),
        guard=experiment.guard,
        privacy=experiment.privacy,
        evaluate=_evaluation(experiment.evaluate),
        cache=Cache("prepared"),
        label=label(experiment.method.name),
        settings=experiment.options_text(),
    )


def _engines(name: str, device: str, **how: Any) -> Engines:
    """The engines of a run; FILE.py:function makes a cohort's engine of one's own, called as those in ENGINES are."""
    return build_engines(own_function(name, "engine.name")(device, **how) if ":" in name else name, device, **how)


def _evaluation(name: str) -> Evaluate:
    """A registered way to measure a model, or the function that FILE.py:function names."""
    if ":" in name:
        return own_function(name, "evaluate")
    if name not in EVALUATIONS:
        raise FedstillError(
            f"evaluate = '{name}' is unknown: {suggest(name, EVALUATIONS)} (your own: FILE.py:function)"
        )
    return EVALUATIONS[name]


def _owner_columns(experiment: Experiment) -> list[str]:
    """partition.keys of a natural split: the columns whose values are the clients."""
    if experiment.partition.scheme != "natural":
        return []
    given = experiment.partition.options.get("keys", [])
    return [given] if isinstance(given, str) else list(given)
