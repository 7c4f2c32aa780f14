"""A Source and the rows of each client become a Federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.data.load import from_tensors
from fedstill.data.scale import public_facts, scale_inputs
from fedstill.data.source import Source, Unlabeled, as_array, as_tensor
from fedstill.data.tables import storage_form


def make_federation(
    source: Source,
    parts: Sequence[np.ndarray],
    *,
    unlabeled: Unlabeled | Tensor | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
    partition: str = "",
    shared_rows: bool = False,
) -> Federation:
    """Client k owns the train rows parts[k]; no row has two owners unless `shared_rows` (D2C-FL's partitions).

    unlabeled, validation: samples that the server holds, validation with labels. Rows of a tensor are named by number.
    A client may be empty (some papers' procedures leave such clients): it is never drawn into a cohort.
    """
    sizes = np.fromiter((len(part) for part in parts), np.int64, len(parts))
    if len(sizes) == 0:
        raise FedstillError("partition: there is no client")
    if sizes.sum() == 0:
        raise FedstillError("partition: no client holds any sample; take fewer clients or more data")
    indices = np.concatenate([np.asarray(part) for part in parts])
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise FedstillError(f"partition: rows must be 1-d integers, got {indices.dtype} of {indices.ndim} dimensions")
    _check_rows(indices.astype(np.int64), sizes, len(source.train.y), shared_rows)
    if isinstance(unlabeled, Tensor):
        unlabeled = Unlabeled(unlabeled, tuple(str(row) for row in range(len(unlabeled))))
    _check_samples(source, None if unlabeled is None else unlabeled.x, "data.unlabeled")
    _check_samples(source, None if validation is None else validation[0], "data.validation")
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Federation(
        train=source.train,
        test=source.test,
        indices=torch.from_numpy(indices.astype(np.int64)),
        offsets=torch.from_numpy(offsets.astype(np.int64)),
        unlabeled=None if unlabeled is None else unlabeled.x,
        unlabeled_truth=None if unlabeled is None else unlabeled.truth,
        unlabeled_ids=None if unlabeled is None else unlabeled.ids,
        unlabeled_skipped=() if unlabeled is None else unlabeled.skipped,
        validation=validation,
        partition=partition,
        public_facts=public_facts(source),
    )


def _check_rows(indices: np.ndarray, sizes: np.ndarray, rows: int, shared_rows: bool) -> None:
    if indices.min() < 0 or indices.max() >= rows:
        raise FedstillError(
            f"partition: row {indices.min() if indices.min() < 0 else indices.max()} is not in 0..{rows - 1}"
        )
    owners = np.bincount(indices, minlength=rows)
    if owners.max() > 1 and not shared_rows:
        row = int(owners.argmax())
        shared = np.repeat(np.arange(len(sizes)), sizes)[indices == row]
        raise FedstillError(
            f"partition: row {row} belongs to clients {shared[0]} and {shared[1]}; each row has one owner"
        )


def _check_samples(source: Source, got: Tensor | None, key: str) -> None:
    wanted = source.train.x
    if got is None:
        return
    if got.shape[1:] != wanted.shape[1:] or got.dtype != wanted.dtype:
        raise FedstillError(
            f"{key}: samples are {tuple(got.shape[1:])} {got.dtype}, "
            f"the task's are {tuple(wanted.shape[1:])} {wanted.dtype}"
        )


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
    """A Federation from one (x, y) pair of tensors or arrays a client, and a test pair for all.

    scale: whose mean and deviation inputs are scaled by, as in `scale_inputs`.
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
