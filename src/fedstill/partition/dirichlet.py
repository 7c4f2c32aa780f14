"""Dirichlet draws over clients or classes, each as its paper does it (FedNTD, MOON, FedDF, MrTF, FedAUX)."""

from __future__ import annotations

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import published_streams as legacy
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_labels,
    check_positive,
    cut,
    deal_counts,
    keep_large,
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
    labels = check_labels(labels, clients)
    check_positive("alpha", alpha)
    if min_size is None:
        min_size = 10 if len(labels) >= 100 * clients else 0
    check_at_least("min_size", min_size, 0)
    if clients * min_size > len(labels):
        raise FedstillError(
            f"partition.min_size = {min_size} for {clients} clients needs {clients * min_size} samples and there are "
            f"{len(labels)}: lower partition.min_size or partition.clients"
        )
    class_rows = rows_by_class(labels)
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
    labels = check_labels(labels, clients)
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
        class_rows = [group[rows] for rows in rows_by_class(labels[group])]
        sizes, half = np.array([len(rows) for rows in class_rows]), len(group) // (2 * size)
        counts = balanced_counts(rng, sizes, clients=size, alpha=alpha, min_size=half)
        parts += deal_counts(class_rows, counts)
    if recut:
        return cut(np.concatenate(parts), np.full(clients, len(labels) // clients))
    return parts


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
            logs = np.where(full[tiny], -np.inf, log_gamma_draws(rng, alpha, full[tiny].shape))
            gammas[tiny] = np.exp(logs - logs.max(axis=1, keepdims=True))
        cuts = np.cumsum(gammas, axis=1, out=gammas)
        cuts /= cuts[:, -1:].copy()
        cuts *= class_size
        np.floor(cuts, out=cuts)
        counts[:, c] = np.diff(cuts, axis=1, prepend=0.0)
        sizes += counts[:, c]
    return counts


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
    labels = check_labels(labels, clients)
    check_positive("alpha", alpha)
    check_at_least("min_size", min_size, 0)
    rng = stream(seed, "mrtf")
    class_rows = rows_by_class(labels)
    class_sizes = np.array([len(rows) for rows in class_rows])
    log_draws = _log_dirichlet(rng, alpha, (clients, len(class_rows)))
    # Columns are normalised anyway; scaled by their maximum, none can underflow (the released code divides 0 by 0).
    draws = np.exp(log_draws - log_draws.max(axis=0))
    parts = deal_counts(class_rows, column_counts(draws, class_sizes))
    return keep_large([rng.permutation(part) for part in parts], min_size, held_out=held_out)


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
    labels = check_labels(labels, clients)
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
