"""An experiment's text becomes the objects that a run needs: data, federation, network, method, engines."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedstill.core.author_mistakes import call, name_of
from fedstill.core.data import AT_SITES, GIVEN, InputColumn
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.seeds import seed_for
from fedstill.core.types import Dataset, Federation
from fedstill.data import (
    Source,
    central_pool,
    hold_client_tests,
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
from fedstill.data.federation import check_scale
from fedstill.data.load import Options
from fedstill.data.source import statistics
from fedstill.data.split import match_storage
from fedstill.data.tokens import read_tokenizer
from fedstill.engine import Engines, build_engines
from fedstill.experiment.cluster import in_one_process, population_of
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import Network, build_network
from fedstill.experiment.overrides import describe_partition
from fedstill.experiment.warm_start import start_weights
from fedstill.loop.attacked import measured_under
from fedstill.loop.callbacks import EarlyStop
from fedstill.loop.evaluate import EVALUATIONS, Evaluate
from fedstill.loop.federate import Built, Schedule
from fedstill.methods.lookup import aggregate_part, build_attack, build_phases, label
from fedstill.methods.options import find, parameters
from fedstill.methods.own_code import own_function
from fedstill.partition import SHARES_ROWS
from fedstill.partition.common import cached_parts
from fedstill.storage.cache import Cache

_log = logging.getLogger("fedstill.run")


def load_source(experiment: Experiment, given: Any = None) -> Source:
    """Load the experiment's data, which do not depend on the seed, so that all seeds share one test set.

    given: data in Python that take the place of data.source, as `fedstill.run` takes them.
    Texts are not tokens yet, because the seed decides from whose texts a tokenizer learns (see build_federation).
    """
    if experiment.data.source == GIVEN and given is None:
        raise FedstillError(
            "the data of this run were handed over in Python, and no file holds them: call fedstill.run or "
            "fedstill.compare with the same data and resume=True"
        )
    if experiment.data.source == AT_SITES and given is None:
        raise FedstillError(
            "the rows of this run are at its sites: go on with it by `fedstill deploy run FOLDER`, where FOLDER is the "
            "deployment's"
        )
    data, options = experiment.data, reading_options(experiment)
    if given is None:
        source = load(data.source, **options)
    else:
        from fedstill.data.given import from_data

        parts = given if isinstance(given, tuple) else (given, data.label)
        if not 2 <= len(parts) <= 3:
            raise FedstillError(
                f"data: a tuple is (x, y) or (x, y, owners), and this one has {len(parts)} parts; for a test set of "
                "your own give fedstill.from_data(x, y, groups=owners, test=(x, y))"
            )
        x, y, groups = (*parts, None)[:3]
        source = from_data(x, y, groups=groups, **options)
    if data.shape:
        source = in_shape(source, data.shape)
    if data.test is not None:
        source = with_test_of(source, data.test, label=data.label)
    if data.client_rows is not None:
        source = central_pool(source, data.client_rows, test_share=data.test_share)
    source = source if data.test_limit is None else limit_test(source, data.test_limit)
    return source._replace(built_from=data_settings(experiment) if given is None else "")


def reading_options(experiment: Experiment) -> Options:
    """Return the options by which the experiment's data are read."""
    data = experiment.data
    return {
        "label": data.label,
        "inputs": tuple(data.columns) or data.inputs,
        "like": agreed_columns(experiment),
        "like_classes": data.classes,
        "fit": (data.shape[1], data.shape[2]) if data.shape else None,
        "keys": [*data.keys, *(key for key in _owner_columns(experiment) if key not in data.keys)],
        "size": data.size,
        "window": data.window,
        "text": data.tokens is not None,
        "drop": data.drop,
        "missing": data.missing,
        "unknown": data.unknown,
    }


def in_shape(source: Source, shape: tuple[int, ...]) -> Source:
    """Return a source of images with the channels of data.shape, as bytes; height and width are right already."""
    like = torch.zeros(0, *shape, dtype=torch.uint8)
    train, test = (
        replace(part, x=match_storage(part.x, like, where=f"'{part.name}'", key="data.source"))
        for part in (source.train, source.test)
    )
    if train.x.shape[1] != source.train.x.shape[1]:  # statistics of other channels say nothing of these
        mean, std = statistics(train.x.numpy(), train.name)
        train, test = (replace(part, mean=mean, std=std) for part in (train, test))
    return source._replace(train=train, test=test)


def agreed_columns(experiment: Experiment) -> tuple[InputColumn, ...]:
    """Return the columns of a table as data.columns says them; empty where the data decide.

    Where gaps are filled (data.missing = 'mean'), a column of numbers has a second feature that marks them, and
    data.mean fills them. A column of words has a word for them.
    """
    data, columns = experiment.data, list[InputColumn]()
    for name, form in data.columns.items():
        fills = data.missing == "mean" and form == "numbers"
        words = tuple(form) if isinstance(form, tuple) else ()
        width = len(words) or (form if isinstance(form, int) else 1 + fills)
        columns.append(InputColumn(name, width, words, data.missing, 0.0, fills, data.unknown))
    total = sum(column.width for column in columns)
    if columns and data.mean and len(data.mean) not in (1, total):
        raise FedstillError(
            f"data.mean has {len(data.mean)} numbers, and data.columns make {total} features: give {total}"
        )
    first = 0
    for place, column in enumerate(columns):
        if column.flag:
            columns[place] = column._replace(fill=data.mean[first] if len(data.mean) > 1 else data.mean[0])
        first += column.width
    return tuple(columns)


def agreed_data(experiment: Experiment) -> Dataset:
    """Return the task without any row, as data.classes, data.columns or data.shape, data.mean and data.std say it."""
    data, columns, tokenizer = experiment.data, agreed_columns(experiment), None
    mean, std = data.mean, data.std
    shape: tuple[int, ...]
    if data.tokens is not None and data.tokenizer is not None:
        tokenizer = read_tokenizer(data.tokenizer, data.tokens)
        shape, dtype, mean, std = (data.tokens,), torch.int32, (0.0,), (1.0,)
        columns = (InputColumn(data.inputs[0] if data.inputs else "text", 1, missing=data.missing),)
    elif columns:
        shape, dtype = (sum(column.width for column in columns),), torch.float32
    else:
        shape, dtype = tuple(data.shape), torch.uint8
    if data.scale == "none" and not mean:
        mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    lacking = [
        key
        for key, there in (("classes", data.classes), ("columns (or data.shape)", shape), ("mean", mean))
        if not there
    ]
    if lacking:
        raise FedstillError(
            f"data.{lacking[0]} is not there, and parties whose rows never meet agree on it in the experiment file: "
            "`fedstill deploy init` writes it"
        )
    nothing = torch.zeros(0, *shape, dtype=dtype)
    agreed = Dataset(
        experiment.name, nothing, torch.zeros(0, dtype=torch.int64), data.classes, mean, std, tokenizer, columns,
        data.label or "",
    )  # fmt: skip
    if tokenizer is None:
        check_scale(agreed, mean, std)
    return agreed


def build_federation(experiment: Experiment, source: Source | None = None) -> Federation:
    """Share the data out to clients and server. Only [data], [partition] and the seed decide, so methods share it."""
    source = load_source(experiment) if source is None else source
    as_configured = source.built_from == data_settings(experiment)
    data, partition, seed = experiment.data, experiment.partition, experiment.seed
    source, unlabeled = split_unlabeled(source, data.unlabeled, seed=seed, limit=data.unlabeled_limit)
    if unlabeled is not None and (names := unlabeled.skipped):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        count = f"{len(names)} of {len(names) + len(unlabeled.ids)} files or rows cannot be read and are left out"
        _log.warning("data.unlabeled: %s: %s%s", count, ", ".join(names[:5]), more)
    if data.tokens is not None:
        source, unlabeled = tokenise(
            source, unlabeled, length=data.tokens, vocabulary=data.vocabulary, tokenizer=data.tokenizer
        )
    source = scale_inputs(source, unlabeled, data.scale, mean=data.mean, std=data.std)
    source, validation = hold_validation(source, data.validation, seed=seed)
    options = partition.options
    if columns := _owner_columns(experiment):
        options["keys"] = owners(source, *columns)
    parts = _draw_parts(experiment, source.train.y.numpy(), options)
    owner_names = (
        [" / ".join(str(source.keys[column][part[0]]) for column in columns) for part in parts] if columns else []
    )
    federation = make_federation(
        source,
        parts,
        unlabeled=unlabeled,
        validation=validation,
        partition=describe_partition(experiment),
        shared_rows=partition.scheme in SHARES_ROWS,
        names=owner_names,
    )
    if data.client_test_share:
        federation = hold_client_tests(federation, data.client_test_share, seed=seed)
    return replace(federation, built_from=split_settings(experiment) if as_configured else "")


def data_settings(experiment: Experiment) -> str:
    """Return the settings that the rows follow from, as JSON."""
    return json.dumps([experiment.data.model_dump(), _owner_columns(experiment)], sort_keys=True)


def split_settings(experiment: Experiment) -> str:
    """Return the settings that the federation follows from, as JSON."""
    settings = [experiment.data.model_dump(), experiment.partition.model_dump(), experiment.seed]
    return json.dumps(settings, sort_keys=True)


def _draw_parts(experiment: Experiment, labels: np.ndarray, options: dict[str, Any]) -> list[np.ndarray]:
    """Return the rows of each client; a replay of a published stream does not depend on the seed."""
    partition = experiment.partition
    scheme, seed = find("partition", partition.scheme), seed_for(experiment.seed, "partition")
    drawn_from = None if options.get("legacy_seed") is not None else int(seed)
    identity = {"scheme": partition.scheme, "clients": partition.clients, "seed": drawn_from, **partition.options}

    def draw() -> list[np.ndarray]:
        parts = call(scheme, "a partition, (labels, clients, *, seed)", labels, partition.clients, seed=seed, **options)
        count = len(parts) if isinstance(parts, (list, tuple)) and all(np.ndim(part) == 1 for part in parts) else 0
        if not count or (count != partition.clients and "min_size" not in parameters("partition", partition.scheme)):
            raise FedstillError(
                f"the partition {name_of(scheme)} must return a list with an array of row numbers for each of the "
                f"{partition.clients} clients (only a scheme with the option min_size may leave clients out)"
            )
        return list(parts)

    return draw() if "keys" in options else cached_parts(draw, labels, identity)


def build(experiment: Experiment, federation: Federation | None = None, model: Network | None = None) -> Built:
    """Make everything that a run of this experiment needs; no other function turns its text into objects.

    federation: a federation that is built already (by default it is built from the experiment).
    model: a network in Python that takes the place of the experiment's [model].
    """
    server = experiment.server  # the method first, so that two parts that clash are reported before the data are read
    aggregate = aggregate_part(server.aggregate)
    method = build_phases(experiment.method.phases, aggregate=aggregate, buffers=server.buffers)
    attack = build_attack(experiment.attack.name, experiment.attack.share)
    federation = build_federation(experiment) if federation is None else federation
    engine, start = in_one_process(experiment).engine, experiment.model.start
    how = engine.model_dump(exclude={"name", "device", "threads"})
    network = build_network(experiment, federation, model)
    return Built(
        method=method,
        model=network,
        federation=federation,
        training=experiment.local,
        schedule=Schedule(**{key: getattr(experiment, key) for key in Schedule.__dataclass_fields__}),
        engines=partial(_engines, engine.name, engine.device, **how),
        guard=experiment.guard,
        privacy=experiment.privacy,
        evaluate=measured_under(attack, _evaluation(experiment.evaluate)),
        cache=Cache("prepared"),
        label=label(experiment.method.name),
        settings=experiment.options_text(),
        sealed=server.sealed,
        start=None if start is None else start_weights(start, network, federation.train, experiment.seed),
        attack=attack,
        population=population_of(experiment, None if model is None else network),
    )


def build_early_stop(experiment: Experiment) -> EarlyStop | None:
    """Return the callback that ends a run early; None where the experiment has no patience."""
    section = experiment.early_stop
    if section.patience is None:
        return None
    return EarlyStop(section.patience, section.metric or experiment.best, margin=section.margin)


def _engines(name: str, device: str, **how: Any) -> Engines:
    """Make the engines of a run; FILE.py:function names a user's engine, which is called as the ENGINES are."""
    return build_engines(own_function(name, "engine.name") if ":" in name else name, device, **how)


def _evaluation(name: str) -> Evaluate:
    """Return the registered function that measures a model, or the user's function that FILE.py:function names."""
    if ":" in name:
        return partial(call, own_function(name, "evaluate"), "an evaluation, (weights, test, trainer)")
    if name not in EVALUATIONS:
        raise FedstillError(
            f"evaluate = '{name}' is unknown: {suggest(name, EVALUATIONS)} (your own: FILE.py:function)"
        )
    return EVALUATIONS[name]


def _owner_columns(experiment: Experiment) -> list[str]:
    """Return partition.keys of a natural split: the columns whose values are the clients."""
    if experiment.partition.scheme != "natural":
        return []
    columns = experiment.partition.options.get("keys", [])
    return [columns] if isinstance(columns, str) else list(columns)
