"""Dirichlet over clients, class by class, with the balance rule and a smallest size (FedNTD, MOON, FedDF)."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import published_streams as legacy
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_clients,
    check_labels,
    check_positive,
    cut,
    deal_counts,
    log_gamma_draws,
    rows_by_class,
    stream,
)

_CELLS_AT_ONCE = 2**16  # attempts x clients in one batch: fits the cache
_MOST_CELLS = 3 * 10**9  # attempts x clients x classes before giving up: about 90 s on one core
_FEDDF_GROUP = 10


def lda(
    labels: np.ndarray,
    clients: int,
    *,
    seed: int,
    alpha: float = 0.1,
    min_size: int | None = None,
    legacy_seed: int | None = None,
) -> Parts:
    """Spread each class over the clients by Dir(alpha), until every client has `min_size` samples.

    Class after class: shuffle; p ~ Dir(alpha 1_N); p_k = 0 for clients that hold n / N samples or more;
    renormalise; cut at floor(cumsum(p) n_class). Start again until the smallest client has `min_size`.
    Sizes are unequal. `min_size` is 10 as in the papers, and 0 where clients hold fewer than 100 samples on average
    (10 would hardly ever be accepted there). `legacy_seed` (19940817 in FedNTD and FedLMD) replays the published
    random stream.

    Differs from the published loop: only counts are drawn until one attempt is accepted (see `balanced_counts`,
    which argues that the law is the same): at alpha = 0.05, 10 x 5000 samples and 100 clients accept
    about 1 attempt in 26,000, which takes a second instead of tens of minutes. And cuts are exact where the loop's
    floats sum to 1 - 1e-16, which gives a full last client one sample more (a replay keeps that).

    Reference: Lee et al., NeurIPS 2022, and Li et al. (MOON), CVPR 2021: released codes.
    """
    labels = check_labels(labels)
    check_clients(clients, samples=len(labels))
    check_positive("alpha", alpha)
    if min_size is None:
        min_size = 10 if len(labels) >= 100 * clients else 0
    check_at_least("min_size", min_size, 0)
    class_rows = rows_by_class(labels)
    check_feasible(clients, len(labels), min_size)
    if legacy_seed is not None:
        return legacy.lda(class_rows, clients, alpha=alpha, min_size=min_size, seed=legacy_seed)
    rng = stream(seed, "lda")
    class_sizes = np.array([len(rows) for rows in class_rows])
    counts = balanced_counts(rng, class_sizes, clients=clients, alpha=alpha, min_size=min_size)
    return deal_counts([rng.permutation(rows) for rows in class_rows], counts)


def feddf(labels: np.ndarray, clients: int, *, seed: int, alpha: float = 0.1, recut: bool = True) -> Parts:
    """Dir(alpha) over groups of ten clients, then one list re-cut into equal clients (FedDF's code).

    Shuffle and cut the data into groups of ten clients (the last may be smaller); in each group do as `lda` with
    the balance rule of that group, until the smallest client has half the group's mean. `recut=True` then joins
    all lists and cuts them into `clients` equal slices, as released: boundaries move, so a client gets the tail
    of its neighbour, and n mod clients samples are lost. `recut=False` keeps the lists as drawn.

    Reference: Lin et al., Ensemble Distillation for Robust Model Fusion in FL, NeurIPS 2020 (released code).
    """
    labels = check_labels(labels)
    check_clients(clients, samples=len(labels))
    check_positive("alpha", alpha)
    check_at_least("clients", clients, _FEDDF_GROUP)
    rng = stream(seed, "feddf")
    rows = rng.permutation(len(labels))
    members = np.full(-(-clients // _FEDDF_GROUP), _FEDDF_GROUP)
    members[-1] = clients - _FEDDF_GROUP * (len(members) - 1)
    samples = np.full(len(members), _FEDDF_GROUP * len(labels) // clients)
    samples[-1] = len(labels) - samples[:-1].sum()
    parts = []
    for group, size in zip(cut(rows, samples), members.tolist(), strict=True):
        parts += _feddf_group(rng, group, labels[group], clients=size, alpha=alpha)
    if recut:
        return cut(np.concatenate(parts), np.full(clients, len(labels) // clients))
    return parts


def _feddf_group(
    rng: np.random.Generator, group: np.ndarray, labels: np.ndarray, *, clients: int, alpha: float
) -> Parts:
    class_rows = [group[rows] for rows in rows_by_class(labels)]
    class_sizes = np.array([len(rows) for rows in class_rows])
    half = len(group) // (2 * clients)
    return deal_counts(class_rows, balanced_counts(rng, class_sizes, clients=clients, alpha=alpha, min_size=half))


def check_feasible(clients: int, samples: int, min_size: int) -> None:
    if clients * min_size > samples:
        raise FedstillError(
            f"partition.min_size = {min_size} for {clients} clients needs {clients * min_size} samples and there are "
            f"{samples}: lower partition.min_size or partition.clients"
        )


def balanced_counts(
    rng: np.random.Generator, class_sizes: np.ndarray, *, clients: int, alpha: float, min_size: int
) -> np.ndarray:
    """Class counts (clients, classes) of the first attempt in which every client gets `min_size` samples.

    Why this is the law of the naive loop. (1) Whether an attempt is accepted depends on its counts alone, and the
    counts do not depend on the shuffles: so counts given acceptance, then shuffles of the accepted attempt, is
    the joint law of the loop. (2) Attempts are independent and identically distributed and the first accepted
    one in order is taken, however many are computed at once: that is the loop. (3) Inside an attempt, see
    `draw_attempts`. (4) Giving up looks at rejected attempts only, which are independent of the accepted one.
    """
    attempts, done, fewest = 1, 0, clients
    cells = clients * len(class_sizes)
    while True:
        counts = draw_attempts(rng, class_sizes, attempts=attempts, clients=clients, alpha=alpha)
        starving = (counts.sum(axis=1) < min_size).sum(axis=1)
        if not starving.all():
            accepted: np.ndarray = counts[np.argmin(starving)].T.astype(np.int64)
            return accepted
        done += attempts
        fewest = min(fewest, int(starving.min()))
        # The more clients starve in the best attempt so far, the less would more attempts help.
        if done * cells > max(_MOST_CELLS // 4 ** (fewest - 1), _MOST_CELLS // 100):
            raise FedstillError(
                f"partition.alpha = {alpha} left {fewest} or more of {clients} clients below {min_size} samples in "
                f"each of {done} draws: raise partition.alpha, lower partition.min_size or use fewer clients"
            )
        attempts = max(1, min(4 * attempts, _CELLS_AT_ONCE // clients))


def draw_attempts(
    rng: np.random.Generator, class_sizes: np.ndarray, *, attempts: int, clients: int, alpha: float
) -> np.ndarray:
    """Class counts (attempts, classes, clients) of independent attempts, class by class for all of them at once.

    Dir(alpha) with full clients set to 0 and renormalised is G_k / sum_open G, with G_k ~ Gamma(alpha). Since the
    shares are independent of that sum (Lukacs 1955), rows whose sum is too small for floats are drawn
    again without changing the law. Trailing full clients get exactly nothing, since cumsum / total is 1 there.
    """
    limit = class_sizes.sum() / clients
    sizes = np.zeros((attempts, clients))
    counts = np.empty((attempts, len(class_sizes), clients), np.int32)
    for c, class_size in enumerate(class_sizes):
        full = sizes >= limit
        gammas = rng.standard_gamma(alpha, (attempts, clients))
        gammas[full] = 0.0
        tiny = gammas.sum(axis=1) < 1e-280
        if tiny.any():
            gammas[tiny] = _open_shares(rng, full[tiny], alpha)
        cuts = np.cumsum(gammas, axis=1, out=gammas)
        cuts /= cuts[:, -1:].copy()
        cuts *= class_size
        np.floor(cuts, out=cuts)
        counts[:, c] = np.diff(cuts, axis=1, prepend=0.0)
        sizes += counts[:, c]
    return counts


def _open_shares(rng: np.random.Generator, full: np.ndarray, alpha: float) -> np.ndarray:
    logs = np.where(full, -np.inf, log_gamma_draws(rng, alpha, full.shape))
    shares: np.ndarray = np.exp(logs - logs.max(axis=1, keepdims=True))
    return shares
