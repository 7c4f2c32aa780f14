"""Clients with a favourite class, drawn from shared queues (D2C-FL); the only schemes where clients overlap."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition.common import Parts, check_at_least, check_labels, check_option, rows_by_class, stream


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
    return _serve(rng, class_rows, _biased_quotas(rng, len(class_rows), clients, round(bias * size), size))


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


def _biased_quotas(rng: np.random.Generator, classes: int, clients: int, favourite: int, size: int) -> np.ndarray:
    if classes == 1:
        return np.full((clients, 1), size)
    least, longer = divmod(size - favourite, classes - 1)
    rank = rng.permuted(np.tile(np.arange(classes - 1), (clients, 1)), axis=1)
    others = least + (rank < longer)
    favourites = np.empty(clients, np.int64)
    favourites[rng.permutation(clients)] = np.arange(clients) % classes
    quotas = np.full((clients, classes), favourite)
    quotas[np.arange(classes) != favourites[:, None]] = others.ravel()
    return quotas


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
    own = np.isin(refill, taken)
    queue = np.concatenate([refill[~own], refill[own]])
    queues[c] = queue[missing:]
    return np.concatenate([taken, queue[:missing]])
