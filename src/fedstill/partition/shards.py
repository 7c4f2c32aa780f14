"""Shards of one class each (FedNTD, FedLMD)."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import published_streams as legacy
from fedstill.partition.common import Parts, check_at_least, check_clients, check_labels, rows_by_class, stream


def shards(
    labels: np.ndarray, clients: int, *, seed: int, shards_per_client: int = 2, legacy_seed: int | None = None
) -> Parts:
    """Cut every class into equal shards and give each client `shards_per_client` of them at random.

    q = int(s N / K) shards a class, in file order, remainders one each to the first shards; the labels of the
    q K shards are shuffled and dealt s at a time, and each takes a random shard of its class. A client may get
    a class twice. `legacy_seed` (19940817 in the papers) replays the published random streams.

    Reference: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in FL, NeurIPS 2022.
    """
    labels = check_labels(labels)
    check_clients(clients, samples=len(labels))
    check_at_least("shards_per_client", shards_per_client, 1)
    class_rows = rows_by_class(labels)
    per_class = _shards_per_class(len(class_rows), clients, shards_per_client)
    stacks = [cut_evenly(rows, per_class) for rows in class_rows]
    if legacy_seed is not None:
        return legacy.deal_shards(stacks, clients, seed=legacy_seed)
    return _deal_shards(stacks, clients, stream(seed, "shards"))


def cut_evenly(rows: np.ndarray, pieces: int) -> Parts:
    """Equal pieces of consecutive rows; what is left at the end goes one each to the first pieces."""
    size, left = divmod(len(rows), pieces)
    body = rows[: size * pieces].reshape(pieces, size)
    tail = rows[size * pieces :]
    return [np.append(body[i], tail[i]) if i < left else body[i] for i in range(pieces)]


def _shards_per_class(classes: int, clients: int, shards_per_client: int) -> int:
    per_class = shards_per_client * clients // classes
    if per_class == 0 or per_class * classes % clients:
        raise FedstillError(
            f"partition.shards_per_client = {shards_per_client} does not deal out evenly: {classes} classes x "
            f"{per_class} shards over {clients} clients; choose it so that shards_per_client x clients is a "
            f"multiple of {classes}"
        )
    return per_class


def _deal_shards(stacks: list[Parts], clients: int, rng: np.random.Generator) -> Parts:
    per_class = len(stacks[0])
    hands = rng.permutation(np.tile(np.arange(len(stacks)), per_class)).reshape(clients, -1)
    # A shuffled stack dealt from the top is "one random remaining shard" each time.
    shuffled = [iter(rng.permutation(per_class).tolist()) for _ in stacks]
    return [np.concatenate([stacks[c][next(shuffled[c])] for c in hand]) for hand in hands.tolist()]
