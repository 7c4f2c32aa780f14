"""A fixed number of classes on each client (MrTF, FedRepo)."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_clients,
    check_labels,
    check_share,
    deal,
    drop_small,
    hold_out,
    rows_by_class,
    stream,
)


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
    labels = check_labels(labels)
    check_clients(clients)
    check_at_least("classes_per_client", classes_per_client, 1)
    check_share("held_out", held_out)
    rng = stream(seed, "label_split")
    class_rows = [rng.permutation(rows) for rows in rows_by_class(labels)]
    hands = _hands(rng, len(class_rows), clients, classes_per_client)
    rows, owners = [], []
    for c, mine in enumerate(class_rows):
        holders = np.flatnonzero(hands.ravel() == c) // classes_per_client
        share = len(mine) // len(holders)
        rows.append(mine[: share * len(holders)])
        owners.append(np.repeat(holders, share))
    parts = deal(np.concatenate(rows), np.concatenate(owners), clients)
    return hold_out(drop_small([rng.permutation(part) for part in parts], min_size), held_out)


def _hands(rng: np.random.Generator, classes: int, clients: int, per_client: int) -> np.ndarray:
    if per_client > classes or per_client * clients < classes:
        raise FedstillError(
            f"partition.classes_per_client = {per_client} does not fit {classes} classes on {clients} clients: "
            f"use {-(-classes // clients)} to {classes}, so that every class has a client"
        )
    shuffles = rng.permuted(np.tile(np.arange(classes), (clients, 1)), axis=1)
    hands: np.ndarray = shuffles.ravel()[: clients * per_client].reshape(clients, per_client)
    return hands
