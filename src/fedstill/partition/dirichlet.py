"""Dirichlet matrices of clients x classes, normalised in two papers' ways (MrTF, FedAUX)."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_clients,
    check_labels,
    check_positive,
    check_share,
    deal_counts,
    drop_small,
    hold_out,
    log_gamma_draws,
    rows_by_class,
    stream,
)

_SINKHORN_SWEEPS = 1000
_MOST_REDRAWS = 1000


def mrtf(
    labels: np.ndarray, clients: int, *, seed: int, alpha: float = 1.0, min_size: int = 5, held_out: float = 0.0
) -> Parts:
    """Dir(alpha) over classes on each client, columns scaled to 1, counts rounded (MrTF's code).

    p_k ~ Dir(alpha 1_K); share_kc = p_kc / sum_j p_jc; count_kc = round-half-even(share_kc n_c), consecutive
    slices in file order. Rounding loses samples or asks for too many (the last clients then get less); clients
    with fewer than `min_size` samples are dropped, so fewer than `clients` may come back. Of each client's rows a
    random share `held_out`, at least one, is then left out: the released code keeps 20% as a local test set that
    it never uses, and the paper's class counts are those of the other 80%.

    Reference: Li, Yang & Zhan, MrTF: Model Refinery for Transductive Federated Learning (released code).
    """
    labels = check_labels(labels)
    check_clients(clients, samples=len(labels))
    check_positive("alpha", alpha)
    check_at_least("min_size", min_size, 0)
    check_share("held_out", held_out)
    rng = stream(seed, "mrtf")
    class_rows = rows_by_class(labels)
    class_sizes = np.array([len(rows) for rows in class_rows])
    log_draws = _log_dirichlet(rng, alpha, (clients, len(class_rows)))
    # Columns are normalised anyway; scaled by their maximum, none can underflow (the released code divides 0 by 0).
    draws = np.exp(log_draws - log_draws.max(axis=0))
    parts = deal_counts(class_rows, column_counts(draws, class_sizes))
    return hold_out(drop_small([rng.permutation(part) for part in parts], min_size), held_out)


def column_counts(draws: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Counts (clients, classes) from rows of shares: columns to 1, rounded half to even, cut off at n_c."""
    wanted = np.rint(draws / draws.sum(axis=0) * class_sizes).astype(np.int64)
    taken = np.minimum(np.cumsum(wanted, axis=0), class_sizes)
    return np.diff(taken, axis=0, prepend=0)


def fedaux(labels: np.ndarray, clients: int, *, seed: int, alpha: float = 0.1) -> Parts:
    """Dir(alpha) over clients for each class, balanced to nearly equal sizes by Sinkhorn (FedAUX's code).

    A (classes, clients) matrix with rows ~ Dir(alpha 1_N); 1000 sweeps scale columns, then rows, to 1; class c
    is cut in file order at floor(cumsum(row) n_c). All samples are used and, with classes of one size, sizes are
    n / N within a few samples. A draw in which a client's shares all underflow is drawn again.

    Differs from the paper's text, which cites Hsu et al.: this is another procedure (see `hsu`).
    Reference: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in FL, TNNLS 2021 (released code).
    """
    labels = check_labels(labels)
    check_clients(clients, samples=len(labels))
    check_positive("alpha", alpha)
    rng = stream(seed, "fedaux")
    class_rows = rows_by_class(labels)
    class_sizes = np.array([len(rows) for rows in class_rows])
    for _ in range(_MOST_REDRAWS):
        shares = np.exp(_log_dirichlet(rng, alpha, (len(class_rows), clients)))
        if (shares.sum(axis=0) > 0).all():
            return deal_counts(class_rows, floor_counts(sinkhorn(shares), class_sizes))
    raise FedstillError(
        f"partition.alpha = {alpha} leaves some of {clients} clients no share of any class: raise partition.alpha or "
        "use fewer clients"
    )


def sinkhorn(shares: np.ndarray) -> np.ndarray:
    """Scale columns to 1, then rows to 1, 1000 times (or until a fixed point): rows end at 1, columns at C / N."""
    for _ in range(_SINKHORN_SWEEPS):
        swept = shares / shares.sum(axis=0)
        swept /= swept.sum(axis=1, keepdims=True)
        if np.array_equal(swept, shares):
            break
        shares = swept
    return shares


def floor_counts(shares: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Counts (clients, classes) from rows of shares (classes, clients), cut at floor(cumsum n_c)."""
    cuts = np.floor(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
    cuts[:, -1] = class_sizes
    counts: np.ndarray = np.diff(cuts, axis=1, prepend=0).T
    return counts


def _log_dirichlet(rng: np.random.Generator, alpha: float, shape: tuple[int, int]) -> np.ndarray:
    """Logarithms of rows of Dir(alpha), also where alpha is so small that plain Gamma draws would all be 0."""
    logs = log_gamma_draws(rng, alpha, shape)
    logs -= logs.max(axis=1, keepdims=True)
    rows: np.ndarray = logs - np.log(np.exp(logs).sum(axis=1, keepdims=True))
    return rows
