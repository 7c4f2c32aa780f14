"""Clients that are all alike, or hold shards or a fixed number of classes (FedNTD, FedLMD, MrTF)."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import published_streams as legacy
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_labels,
    cut,
    deal,
    keep_large,
    rows_by_class,
    stream,
)


def iid(labels: np.ndarray, clients: int, *, seed: int, stratified: bool = False) -> Parts:
    """Shuffle and cut into clients whose sizes differ by at most one.

    `stratified=True` deals each class out in turn, so that class counts also differ by at most one (FedDyn's
    CIFAR-100). All samples are used; the papers' codes drop or misplace the remainder.
    """
    labels = check_labels(labels, clients)
    rows = stream(seed, "iid").permutation(len(labels))
    if stratified:
        rows = rows[np.argsort(labels[rows], kind="stable")]
        return [rows[client::clients] for client in range(clients)]
    least, longer = divmod(len(labels), clients)
    return cut(rows, least + (np.arange(clients) < longer))


def shards(
    labels: np.ndarray, clients: int, *, seed: int, shards_per_client: int = 2, legacy_seed: int | None = None
) -> Parts:
    """Cut every class into equal shards and give each client `shards_per_client` of them at random.

    q = int(s N / K) shards a class, in file order, remainders one each to the first shards; the labels of the
    q K shards are shuffled and dealt s at a time, and each takes a random shard of its class. A client may get
    a class twice. `legacy_seed` (19940817 in the papers) replays the published random streams.

    Reference: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in FL, NeurIPS 2022.
    """
    labels = check_labels(labels, clients)
    check_at_least("shards_per_client", shards_per_client, 1)
    class_rows = rows_by_class(labels)
    classes = len(class_rows)
    per_class = shards_per_client * clients // classes
    if per_class == 0 or per_class * classes % clients:
        raise FedstillError(
            f"partition.shards_per_client = {shards_per_client} does not deal out evenly: {classes} classes x "
            f"{per_class} shards over {clients} clients; choose it so that shards_per_client x clients is a "
            f"multiple of {classes}"
        )
    stacks = [cut_evenly(rows, per_class) for rows in class_rows]
    if legacy_seed is not None:
        return legacy.deal_shards(stacks, clients, seed=legacy_seed)
    rng = stream(seed, "shards")
    hands = rng.permutation(np.tile(np.arange(classes), per_class)).reshape(clients, -1)
    # A shuffled stack dealt from the top is "one random remaining shard" each time.
    shuffled = [iter(rng.permutation(per_class).tolist()) for _ in stacks]
    return [np.concatenate([stacks[c][next(shuffled[c])] for c in hand]) for hand in hands.tolist()]


def cut_evenly(rows: np.ndarray, pieces: int) -> Parts:
    """Equal pieces of consecutive rows; what is left at the end goes one each to the first pieces."""
    size, left = divmod(len(rows), pieces)
    body = rows[: size * pieces].reshape(pieces, size)
    tail = rows[size * pieces :]
    return [np.append(body[i], tail[i]) if i < left else body[i] for i in range(pieces)]


def label_split(
    labels: np.ndarray,
    clients: int,
    *,
    seed: int,
    classes_per_client: int = 2,
    min_size: int = 5,
    held_out: float = 0.0,
) -> Parts:
    """Give each client `classes_per_client` classes and an equal share of each of them.

    The class list is shuffled once per client and the shuffles are laid end to end; client k takes entries
    k s .. (k+1) s - 1. A class handed out r times gives floor(n / r) shuffled samples to each. A client that
    draws one class twice holds a double share of it; remainders are dropped, and so are clients with fewer
    than `min_size` samples (the released code keeps a malformed record of them). Of each client's rows a random
    share `held_out`, at least one, is then left out (20% in the released code, see `mrtf`).

    Reference: Li, Yang & Zhan, MrTF: Model Refinery for Transductive Federated Learning (released code).
    """
    labels = check_labels(labels, clients, may_share=True)
    check_at_least("classes_per_client", classes_per_client, 1)
    rng = stream(seed, "label_split")
    class_rows = [rng.permutation(rows) for rows in rows_by_class(labels)]
    classes = len(class_rows)
    if classes_per_client > classes or classes_per_client * clients < classes:
        raise FedstillError(
            f"partition.classes_per_client = {classes_per_client} does not fit {classes} classes on {clients} clients: "
            f"use {-(-classes // clients)} to {classes}, so that every class has a client"
        )
    shuffles = rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)
    hands = shuffles.ravel()[: clients * classes_per_client]
    rows, owners = [], []
    for c, mine in enumerate(class_rows):
        holders = np.flatnonzero(hands == c) // classes_per_client
        share = len(mine) // len(holders)
        rows.append(mine[: share * len(holders)])
        owners.append(np.repeat(holders, share))
    parts = deal(np.concatenate(rows), np.concatenate(owners), clients)
    return keep_large([rng.permutation(part) for part in parts], min_size, held_out=held_out)
