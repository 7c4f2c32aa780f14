"""Clients that are all alike, named by the data, or hold some classes: shards, a fixed number, a favourite."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import published_streams as legacy
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_labels,
    check_option,
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


def bias(labels: np.ndarray, clients: int, *, seed: int, bias: float = 0.8, size: int | None = None) -> Parts:
    """Give each client `size` samples, a share `bias` of them from its favourite class.

    The rest is spread evenly over the other classes, leftovers one each to distinct random ones. Favourites go
    round-robin over shuffled clients (the paper does not say). Classes are queues that are reshuffled when they
    run empty, so clients may share samples, but no client holds one twice. `size` defaults to n / clients.

    Reference: D2C-FL, Migrating Federated Learning to Centralized Learning with the Leverage of Unlabeled Data.
    """
    class_rows, size = _checked(labels, clients, size)
    check_option("bias", bias, 0 <= bias <= 1, "a share from 0 to 1")
    rng = stream(seed, "bias")
    classes, favourite = len(class_rows), round(bias * size)
    if classes == 1:
        return _serve(rng, class_rows, np.full((clients, 1), size))
    least, longer = divmod(size - favourite, classes - 1)
    rank = rng.permuted(np.tile(np.arange(classes - 1), (clients, 1)), axis=1)
    favourites = np.empty(clients, np.int64)
    favourites[rng.permutation(clients)] = np.arange(clients) % classes
    quotas = np.full((clients, classes), favourite)
    quotas[np.arange(classes) != favourites[:, None]] = (least + (rank < longer)).ravel()
    return _serve(rng, class_rows, quotas)


def n_class(
    labels: np.ndarray, clients: int, *, seed: int, classes_per_client: int = 2, size: int | None = None
) -> Parts:
    """Give each client `size` samples in equal shares from random distinct classes.

    An odd sample goes to the client's first class. Queues as in `bias`: clients may share samples, but no client
    holds one twice. `size` defaults to n / clients. With all classes on every client it is D2C-FL's IID split (60 of
    each of ten classes at size 600), which may ask for more samples than there are, as `iid` cannot.
    """
    class_rows, size = _checked(labels, clients, size)
    classes = len(class_rows)
    wanted = f"1 to {classes}, the number of classes"
    check_option("classes_per_client", classes_per_client, 1 <= classes_per_client <= classes, wanted)
    rng = stream(seed, "n_class")
    chosen = rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)[:, :classes_per_client]
    least, longer = divmod(size, classes_per_client)
    quotas = np.zeros((clients, classes), np.int64)
    np.put_along_axis(quotas, chosen, least + (np.arange(classes_per_client) < longer)[None], axis=1)
    return _serve(rng, class_rows, quotas)


def _checked(labels: np.ndarray, clients: int, size: int | None) -> tuple[Parts, int]:
    labels = check_labels(labels, clients, may_share=True)
    size = len(labels) // clients if size is None else size
    check_at_least("size", size, 1)
    return rows_by_class(labels), size


def _serve(rng: np.random.Generator, class_rows: Parts, quotas: np.ndarray) -> Parts:
    for rows, most in zip(class_rows, quotas.max(axis=0), strict=True):
        if most > len(rows):
            raise FedstillError(
                f"partition.size asks for {most} different samples of a class that has {len(rows)}: "
                "lower partition.size"
            )
    queues = [rng.permutation(rows) for rows in class_rows]
    parts = []
    for quota in quotas:
        wanted = np.flatnonzero(quota)
        parts.append(np.concatenate([_pop(rng, queues, class_rows, c, quota[c]) for c in wanted.tolist()]))
    return parts


def _pop(rng: np.random.Generator, queues: Parts, class_rows: Parts, c: int, count: int) -> np.ndarray:
    """The first `count` of queue c; refilled when empty, with this client's own samples at the far end."""
    taken, queues[c] = queues[c][:count], queues[c][count:]
    missing = count - len(taken)
    if missing == 0:
        return taken
    refill = rng.permutation(class_rows[c])
    already_taken = np.isin(refill, taken)
    queue = np.concatenate([refill[~already_taken], refill[already_taken]])
    queues[c] = queue[missing:]
    return np.concatenate([taken, queue[:missing]])


def natural(labels: np.ndarray, clients: int, *, seed: int, keys: np.ndarray, min_size: int = 1) -> Parts:
    """One client per distinct value of a key column, as in LEAF.

    `keys` (n,) names the owner of each row; owners with fewer than `min_size` rows are left out. `clients` = 0
    keeps all owners; a smaller number than there are keeps a random choice of them (MrTF keeps 10%). Clients
    come in the order of their keys.

    Reference: Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.
    """
    labels, keys = check_labels(labels), np.asarray(keys)
    check_at_least("clients", clients, 0)
    if keys.shape != labels.shape:
        raise FedstillError(
            f"partition.keys has shape {keys.shape} but there are {len(labels)} labels: give one key per row"
        )
    values = [] if keys.dtype.kind in "biu" else keys.tolist()  # whole numbers are never missing
    nobody = np.flatnonzero([key is None or key != key or not str(key).strip() for key in values])
    if len(nobody):
        raise FedstillError(
            f"partition.keys has no value for {len(nobody)} of {len(keys)} rows, the first is row {nobody[0] + 1} "
            "(counted from 1): name their owner or leave these rows out"
        )
    owners, sizes = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    parts = cut(np.argsort(owners, kind="stable").astype(np.int64, copy=False), sizes)
    large = np.flatnonzero(sizes >= min_size)
    if clients > len(large) or not len(large):
        raise FedstillError(
            f"partition.clients = {clients} but partition.keys names only {len(large)} with {min_size} or more "
            f"samples: lower partition.clients (0 keeps all) or partition.min_size"
        )
    chosen = stream(seed, "natural").permutation(large)[: clients or len(large)]
    return [parts[owner] for owner in np.sort(chosen)]
