"""Clients that the data itself names: writers, users, hospitals."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition.common import Parts, check_at_least, check_labels, cut, stream


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
