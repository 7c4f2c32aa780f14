"""Clients that are all alike."""

from __future__ import annotations

import numpy as np

from fedstill.partition.common import Parts, check_clients, check_labels, cut, stream


def iid(labels: np.ndarray, clients: int, *, seed: int, stratified: bool = False) -> Parts:
    """Shuffle and cut into clients whose sizes differ by at most one.

    `stratified=True` deals each class out in turn, so that class counts also differ by at most one (FedDyn's
    CIFAR-100). All samples are used; the papers' codes drop or misplace the remainder.
    """
    labels = check_labels(labels)
    check_clients(clients, samples=len(labels))
    rows = stream(seed, "iid").permutation(len(labels))
    if stratified:
        rows = rows[np.argsort(labels[rows], kind="stable")]
        return [rows[client::clients] for client in range(clients)]
    least, longer = divmod(len(labels), clients)
    return cut(rows, least + (np.arange(clients) < longer))
