"""What every partition scheme shares: checks, rows by class, and handing rows out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.storage.cache import Cache

Parts = list[np.ndarray]  # row indices (int64) of each client


def check_labels(labels: np.ndarray, clients: int | None = None, *, may_share: bool = False) -> np.ndarray:
    """Return the labels as int64 (n,); refuse labels that are no classes, and fewer clients than one.

    may_share: there may be more clients than samples.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iub":
        raise FedstillError(
            f"labels must be a non-empty 1-D integer array, got {labels.dtype} of shape {labels.shape}: "
            "partitions need one class index per row"
        )
    if clients is not None:
        check_at_least("clients", clients, 1)
        if clients > len(labels) and not may_share:
            raise FedstillError(
                f"partition.clients = {clients} is more than the {len(labels)} samples: use fewer clients"
            )
    return labels.astype(np.int64, copy=False)


def check_option(name: str, value: float, fine: bool, wanted: str) -> None:
    """Refuse the value of an option that is not fine, and say which value is wanted."""
    if not fine:
        raise FedstillError(f"partition.{name} = {value} is not allowed: use {wanted}")


def check_positive(name: str, value: float) -> None:
    check_option(name, value, bool(np.isfinite(value) and value > 0), "a finite number above 0")


def check_at_least(name: str, value: int, least: int) -> None:
    check_option(name, value, value >= least, f"{least} or more")


def stream(seed: int, scheme: str) -> np.random.Generator:
    """The scheme's own random stream."""
    return numpy_generator(seed_for(seed, "partition", scheme))


def rows_by_class(labels: np.ndarray) -> Parts:
    """Rows of each class that occurs, classes ascending, rows in file order (a class without rows is no class)."""
    order = np.argsort(labels, kind="stable").astype(np.int64, copy=False)
    return cut(order, np.unique(labels, return_counts=True)[1])


def cut(rows: np.ndarray, sizes: np.ndarray) -> Parts:
    """Consecutive slices of `rows` with these sizes (plain slicing: np.split takes 10 times as long)."""
    bounds = [0, *np.cumsum(sizes).tolist()]
    return [rows[start:stop] for start, stop in pairwise(bounds)]


def deal(rows: np.ndarray, owners: np.ndarray, clients: int) -> Parts:
    """Rows grouped by the client that owns them, in the order given."""
    return cut(rows[np.argsort(owners, kind="stable")], np.bincount(owners, minlength=clients))


def deal_counts(class_rows: Parts, counts: np.ndarray) -> Parts:
    """Cut each class's rows into consecutive slices of counts[:, class]; counts is (clients, classes)."""
    clients = np.arange(len(counts))
    owners = [np.repeat(clients, column) for column in counts.T]
    rows = [mine[: len(owner)] for mine, owner in zip(class_rows, owners, strict=True)]
    return deal(np.concatenate(rows), np.concatenate(owners), len(counts))


def occurrence(values: np.ndarray) -> np.ndarray:
    """How many equal values stand before each value: [5, 7, 5] -> [0, 0, 1]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(new, np.diff(new, append=len(values)))
    return rank


def log_gamma_draws(rng: np.random.Generator, shape: np.ndarray | float, size: tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(shape) draws: their softmax is a Dirichlet draw that cannot underflow.

    G(a) = G(a + 1) U^(1/a) and -log U is exponential (Devroye 1986, ch. IX).
    """
    grown = np.log(rng.standard_gamma(np.asarray(shape) + 1.0, size))
    drawn: np.ndarray = grown - rng.standard_exponential(size) / shape
    return drawn


def keep_large(parts: Parts, min_size: int, *, held_out: float) -> Parts:
    """Drop clients with fewer than `min_size` rows, then leave out a share `held_out` of every other's.

    Left out are a client's last rows, at least one: its local test set, which nobody uses. A single row is kept.
    """
    check_option("held_out", held_out, 0 <= held_out < 1, "a share from 0 to below 1")
    kept = [part for part in parts if len(part) >= min_size]
    if not kept:
        largest = max(len(part) for part in parts)
        raise FedstillError(
            f"no client has partition.min_size = {min_size} samples (the largest has {largest}): "
            "lower partition.min_size or use fewer clients"
        )
    if not held_out:
        return kept
    return [part[: max(1, len(part) - max(1, int(held_out * len(part) + 1e-9)))] for part in kept]


FORMAT = 2  # raise it when a scheme draws other parts from the same seed
SLOW = 2.0  # seconds; a faster partition is drawn again


def cached_parts(
    draw: Callable[[], Sequence[np.ndarray]],
    labels: np.ndarray,
    options: Mapping[str, Any],
    *,
    cache_dir: Path | None = None,
) -> list[np.ndarray]:
    """The parts that were stored for these labels and options, else `draw()`, stored if it took long.

    LDA at alpha = 0.05 accepts one attempt in tens of thousands: replaying the published stream takes 15 s or more.
    """
    digest = hashlib.sha256(np.ascontiguousarray(labels, np.int64).data).hexdigest()
    cache, identity = Cache("partitions", cache_dir), {"format": FORMAT, "labels": digest, "options": dict(options)}
    tree = cache.load(identity)
    if tree is not None:
        return np.split(tree["rows"], np.cumsum(tree["sizes"])[:-1])
    began = time.perf_counter()
    parts = list(draw())
    if time.perf_counter() - began > SLOW:
        cache.save(identity, {"rows": np.concatenate(parts), "sizes": [len(part) for part in parts]})
    return parts
