"""Clients of given sizes that draw sample after sample from their own class prior (Hsu et al., FedDyn)."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import published_streams as legacy
from fedstill.partition.common import (
    Parts,
    check_at_least,
    check_labels,
    check_option,
    check_positive,
    deal,
    log_gamma_draws,
    occurrence,
    rows_by_class,
    stream,
)

_CELLS_AT_ONCE = 2**18  # draws x classes looked at in one go


def hsu(labels: np.ndarray, clients: int, *, seed: int, alpha: float = 0.1, size: int | None = None) -> Parts:
    """Give each client `size` samples by its own class mix q_k ~ Dir(alpha prior).

    `prior` is the share of each class in the data, so the concentrations sum to alpha. Client after client draws
    without replacement, class by q_k; an exhausted class leaves q_k, which is renormalised: late clients drift
    from their q_k. `size` defaults to n / clients.

    Reference: Hsu, Qi & Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.
    """
    labels = check_labels(labels, clients)
    check_positive("alpha", alpha)
    size = len(labels) // clients if size is None else size
    check_at_least("size", size, 1)
    if size * clients > len(labels):
        raise FedstillError(
            f"partition.size = {size} for {clients} clients needs {size * clients} samples and there are "
            f"{len(labels)}: lower it to {len(labels) // clients}"
        )
    rng = stream(seed, "hsu")
    prior = np.array([len(rows) for rows in rows_by_class(labels)]) / len(labels)
    log_priors = log_gamma_draws(rng, alpha * prior, (clients, len(prior)))
    return _fill(rng, labels, np.repeat(np.arange(clients), size), log_priors)


def feddyn(
    labels: np.ndarray,
    clients: int,
    *,
    seed: int,
    beta: float = 0.3,
    sigma: float = 0.0,
    fedftg_sizes: bool = False,
    legacy_seed: int | None = None,
) -> Parts:
    """Fill clients of equal size in random order, each from its own class prior Dir(beta).

    pi_k ~ Dir(beta 1_K); repeat: take a uniformly random client that is not full, draw a class from pi_k
    restricted to classes that are not exhausted, take its next sample. All samples are used. `sigma` > 0 makes
    the sizes lognormal; `fedftg_sizes` uses FedFTG's rule, which truncates even equal sizes and gives what is
    missing to the first client. `legacy_seed` (1024 in FedFTG) replays the published random stream.

    Differs from the released codes: they redraw a class until it is not exhausted (42 million redraws at
    beta = 0.3), which is the same law; and where rounding puts a draw beyond the last cumulated prior they take
    class 0, we the last class in stock.

    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (released code).
    """
    labels = check_labels(labels, clients)
    check_positive("beta", beta)
    check_option("sigma", sigma, bool(np.isfinite(sigma) and sigma >= 0), "a finite number, 0 or above")
    draw_sizes = partial(feddyn_sizes, samples=len(labels), clients=clients, sigma=sigma, fedftg=fedftg_sizes)
    if legacy_seed is not None:
        return legacy.feddyn(labels, draw_sizes, beta=beta, seed=legacy_seed)
    rng = stream(seed, "feddyn")
    sizes = draw_sizes(rng)
    log_priors = log_gamma_draws(rng, beta, (clients, len(np.unique(labels))))
    return _fill(rng, labels, fill_order(rng, sizes), log_priors)


def feddyn_sizes(
    rng: np.random.Generator | np.random.RandomState, samples: int, clients: int, *, sigma: float, fedftg: bool
) -> np.ndarray:
    """Sizes that sum to `samples`: equal, or lognormal and truncated; the first client that can takes the rest."""
    mean = samples // clients
    if sigma > 0 or fedftg:
        raw = rng.lognormal(mean=np.log(mean), sigma=sigma, size=clients)
        sizes = (raw / np.sum(raw) * samples).astype(np.int64)
    else:
        sizes = np.full(clients, mean)
    surplus = sizes.sum() - samples
    sizes[np.argmax(sizes > surplus)] -= surplus
    return sizes


def fill_order(rng: np.random.Generator, sizes: np.ndarray) -> np.ndarray:
    """The clients in the order in which they take a sample: each time a uniformly random one that is not full.

    Drawn in blocks from the clients open at the block's start; draws of clients that are full by then are
    skipped, which is the papers' own redraw.
    """
    left, blocks = sizes.copy(), [np.empty(0, np.int64)]
    while left.any():
        still_open = np.flatnonzero(left)
        block = still_open[rng.integers(len(still_open), size=left.sum())]
        block = block[occurrence(block) < left[block]]
        left -= np.bincount(block, minlength=len(left))
        blocks.append(block)
    return np.concatenate(blocks)


def draw_classes(
    rng: np.random.Generator, order: np.ndarray, *, log_priors: np.ndarray, stock: np.ndarray
) -> np.ndarray:
    """The class that each client in `order` draws from its prior, restricted to classes still in stock.

    Classes are drawn ahead for a chunk of `order` and kept up to the first draw of an exhausted class, which is
    drawn again together with all after it. The same law as drawing one by one: kept draws between the exhaustion
    of a class and its next draw missed it, and given that they follow the restricted prior. Priors are
    logarithms, so the restriction never has mass 0.
    """
    left, start = stock.copy(), 0
    classes = np.empty(len(order), np.int64)
    chunk = max(1, _CELLS_AT_ONCE // len(stock))
    while start < len(order):
        logs = np.where(left > 0, log_priors[order[start : start + chunk]], -np.inf)
        cumulated = np.cumsum(np.exp(logs - logs.max(axis=1, keepdims=True)), axis=1)
        heights = rng.random(len(logs)) * cumulated[:, -1]
        last = np.flatnonzero(left > 0)[-1]  # heights may round up to the total
        drawn = np.minimum((cumulated <= heights[:, None]).sum(axis=1), last)
        short = np.flatnonzero(np.bincount(drawn, minlength=len(left)) > left)
        drawn = drawn[: min((int(np.flatnonzero(drawn == c)[left[c]]) for c in short), default=len(drawn))]
        classes[start : start + len(drawn)] = drawn
        left -= np.bincount(drawn, minlength=len(left))
        start += len(drawn)
    return classes


def _fill(rng: np.random.Generator, labels: np.ndarray, order: np.ndarray, log_priors: np.ndarray) -> Parts:
    class_rows = [rng.permutation(rows) for rows in rows_by_class(labels)]
    stock = np.array([len(rows) for rows in class_rows])
    classes = draw_classes(rng, order, log_priors=log_priors, stock=stock)
    first = np.cumsum(stock) - stock
    rows = np.concatenate(class_rows)[first[classes] + occurrence(classes)]
    return deal(rows, order, len(log_priors))
