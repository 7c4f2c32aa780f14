"""Make a Federation from a source and the rows of each client, and choose how inputs are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.seeds import seed_for
from fedstill.core.types import Dataset, Federation
from fedstill.data.load import from_tensors, is_embedded
from fedstill.data.source import (
    Source,
    Unlabeled,
    as_array,
    as_tensor,
    published_statistics,
    statistics,
    stratified_holdout,
)
from fedstill.data.tables import storage_form


def make_federation(
    source: Source,
    parts: Sequence[np.ndarray],
    *,
    unlabeled: Unlabeled | Tensor | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    partition: str = "",
    shared_rows: bool = False,
    names: Sequence[str] = (),
) -> Federation:
    """Make the federation in which client k owns the train rows parts[k].

    unlabeled, validation: samples that the server holds, validation with labels. Rows of a tensor are named by number.
    shared_rows: a row may have several owners (D2C-FL's partitions).
    names: one for each client; empty: they have none.
    A client may be empty (some papers' procedures leave such clients): it is never drawn into a cohort.
    """
    sizes = np.fromiter((len(part) for part in parts), np.int64, len(parts))
    if len(sizes) == 0:
        raise FedstillError("partition: there is no client")
    if sizes.sum() == 0:
        raise FedstillError("partition: no client holds any sample; take fewer clients or more data")
    if names and len(names) != len(sizes):
        raise FedstillError(f"names: {len(names)} names for {len(sizes)} clients; give one for each, or none")
    indices = np.concatenate([np.asarray(part) for part in parts])
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise FedstillError(f"partition: rows must be 1-d integers, got {indices.dtype} of {indices.ndim} dimensions")
    indices, rows = indices.astype(np.int64), len(source.train.y)
    outside = indices[(indices < 0) | (indices >= rows)]
    if len(outside):
        raise FedstillError(f"partition: row {outside[0]} is not in 0..{rows - 1}")
    owners = np.bincount(indices, minlength=rows)
    if owners.max() > 1 and not shared_rows:
        row = int(owners.argmax())
        shared = np.repeat(np.arange(len(sizes)), sizes)[indices == row]
        raise FedstillError(
            f"partition: row {row} belongs to clients {shared[0]} and {shared[1]}; each row has one owner"
        )
    if isinstance(unlabeled, Tensor):
        unlabeled = Unlabeled(unlabeled, tuple(str(row) for row in range(len(unlabeled))))
    if unlabeled is not None:
        _check_form("data.unlabeled", unlabeled.x, source)
    if validation is not None:
        _check_form("data.validation", validation[0], source)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = source.train
    published = is_embedded(source.origin) or (data.mean, data.std) == published_statistics(data.name)
    facts = () if data.text or source.scale != "train" or published else (CLIENTS_STATISTICS,)
    return Federation(
        train=source.train,
        test=source.test,
        indices=torch.from_numpy(indices),
        offsets=torch.from_numpy(offsets.astype(np.int64)),
        unlabeled=None if unlabeled is None else unlabeled.x,
        unlabeled_truth=None if unlabeled is None else unlabeled.truth,
        unlabeled_ids=None if unlabeled is None else unlabeled.ids,
        unlabeled_skipped=() if unlabeled is None else unlabeled.skipped,
        validation=validation,
        names=tuple(names),
        partition=partition,
        public_facts=(*source.public_facts, *facts),
    )


def hold_client_tests(federation: Federation, share: float, *, seed: int) -> Federation:
    """Let each client hold back a share of its rows to test on, each class by its share; nobody trains on them.

    A client with a single row trains on it and tests on none.
    """
    if not 0 < share < 1:
        raise FedstillError(f"data.client_test_share = {share:g}: give a share above 0 and below 1, e.g. 0.2")
    rows, labels = federation.indices.numpy(), federation.train.y.numpy()
    if len(np.unique(rows)) < len(rows):
        raise FedstillError(
            "data.client_test_share: in this partition several clients share a row, so one client would train on "
            "another's test rows; take another partition.scheme, or leave the key out"
        )
    kept, held = [], []
    for client, part in enumerate(np.split(rows, federation.offsets.numpy()[1:-1])):
        split = part, part[:0]
        if len(part) > 1:
            places = stratified_holdout(labels[part], share, seed=seed_for(seed, "client_test", client))
            split = part[places[0]], part[places[1]]
        kept.append(split[0])
        held.append(split[1])
    trained, tested = (
        (torch.from_numpy(np.concatenate(parts)), torch.tensor([0, *np.cumsum([len(part) for part in parts])]))
        for parts in (kept, held)
    )
    return replace(federation, indices=trained[0], offsets=trained[1], client_test=tested)


def _check_form(key: str, x: Tensor, source: Source, *, cure: str = "") -> None:
    """Refuse samples of another shape or type than the task's."""
    task = source.train.x
    if x.shape[1:] != task.shape[1:] or x.dtype != task.dtype:
        form = f"{tuple(x.shape[1:])} {x.dtype}, the task's are {tuple(task.shape[1:])} {task.dtype}"
        raise FedstillError(f"{key}: samples are {form}{cure}")


def federation_from_tensors(
    clients: Sequence[tuple[Any, Any]],
    *,
    test: tuple[Any, Any],
    unlabeled: Any = None,
    classes: Sequence[str] | None = None,
    name: str = "tensors",
    partition: str = "as given",
    scale: str = "train",
) -> Federation:
    """Make a Federation from one (x, y) pair of tensors or arrays for each client, and a test pair for all.

    scale: the samples whose mean and deviation scale the inputs, as in `scale_inputs`.
    """
    if not clients:
        raise FedstillError("clients: expected one (x, y) pair a client, got none")
    pairs = [(as_array(x), as_array(y)) for x, y in clients]
    for k, (x, y) in enumerate(pairs):
        if len(x) != len(y) or x.shape[1:] != pairs[0][0].shape[1:]:
            raise FedstillError(f"clients: x {x.shape} and y {y.shape} of client {k} do not fit {pairs[0][0].shape}")
    x, y = (np.concatenate([pair[i] for pair in pairs]) for i in range(2))
    source = from_tensors(x, y, test=test, classes=classes, name=name)
    cuts = np.cumsum([len(labels) for _, labels in pairs])[:-1]
    extra = None if unlabeled is None else as_tensor(storage_form(as_array(unlabeled)))
    source = scale_inputs(source, extra, scale)
    return make_federation(source, np.split(np.arange(len(y)), cuts), unlabeled=extra, partition=partition)


SCALES = ("train", "unlabeled", "none")
CLIENTS_STATISTICS = "mean and deviation of all clients' inputs (data.scale can change that)"

Constants = tuple[tuple[float, ...], tuple[float, ...]]  # mean, std


def scale_inputs(
    source: Source,
    unlabeled: Unlabeled | Tensor | None = None,
    how: str = "train",
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Source:
    """Return the source with another mean and deviation for all its inputs; the stored samples stay as they are.

    how: 'train' (as it was loaded: by the train rows, or published constants), 'unlabeled' (by the server's samples,
    so that no client's row moves another client's inputs) or 'none' (inputs as they are, images from 0 to 1).
    mean, std: scale by these numbers instead: one for all channels or columns, or one for each.
    """
    if how not in SCALES:
        raise FedstillError(f"data.scale = '{how}' is unknown: {suggest(how, SCALES)}")
    if source.train.text and (mean or std or how == "unlabeled"):
        key = "data.mean" if mean or std else "data.scale = 'unlabeled'"
        raise FedstillError(f"{key}: {source.train.name} is read as text, which is not scaled; leave it out")
    width = source.train.x.shape[1]
    if mean or std:
        check_scale(source.train, mean, std)
        how, constants = "given", (tuple(mean), tuple(std))
    elif how == "unlabeled":
        constants = _of_unlabeled(source, unlabeled)
    elif how == "none" and not source.train.text:
        constants = (0.0,) * width, (1.0,) * width
    else:
        return source
    train, test = (replace(part, mean=constants[0], std=constants[1]) for part in (source.train, source.test))
    return source._replace(train=train, test=test, scale=how)


def _of_unlabeled(source: Source, unlabeled: Unlabeled | Tensor | None) -> Constants:
    key = "data.scale = 'unlabeled'"
    x = unlabeled.x if isinstance(unlabeled, Unlabeled) else unlabeled
    if x is None or not len(x):
        raise FedstillError(
            f"{key}: the server has no unlabeled set to take mean and deviation from; set data.unlabeled (a number of "
            "rows, a folder or a file), or data.scale = 'none'"
        )
    _check_form(key, x, source, cure="; give samples of the same kind, or data.scale = 'none'")
    return statistics(x.numpy())


def check_scale(train: Dataset, mean: Sequence[float], std: Sequence[float]) -> None:
    """Refuse means and deviations that are neither one for all channels or columns nor one for each."""
    width = train.x.shape[1]
    for key, numbers in (("data.mean", mean), ("data.std", std)):
        if len(numbers) not in (1, width):
            wanted = "1" if width == 1 else f"1 or {width}"
            unit = "channels" if train.x.ndim > 2 else "columns (a word of a column counts as one)"
            raise FedstillError(f"{key} has {len(numbers)} numbers, {train.name} has {width} {unit}: give {wanted}")
    if min(std) <= 0:
        raise FedstillError(f"data.std holds {min(std):g}; deviations are above 0")
