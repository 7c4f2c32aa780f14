"""Replays of published partitions: the papers' procedures on NumPy's and Python's legacy random streams.

Private instances, never the global streams. Written from the procedures; slow where the papers' codes are.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition.common import Parts, deal_counts, rows_by_class

_MOST_ATTEMPTS = 200_000
_MOST_REDRAWS = 10**9
_REDRAW_BLOCK = 4096


def legacy_stream(seed: int) -> np.random.RandomState:
    """NumPy's legacy stream as a private instance."""
    if not 0 <= seed < 2**32:
        raise FedstillError(f"partition.legacy_seed = {seed} is not allowed: use 0 to {2**32 - 1}")
    return np.random.RandomState(seed)


def deal_shards(stacks: list[Parts], clients: int, *, seed: int) -> Parts:
    """FedNTD's deal: labels shuffled by Python's `random`, shards chosen by NumPy, both from one seed."""
    numpy_stream = legacy_stream(seed)
    labels = list(range(len(stacks))) * len(stacks[0])
    random.Random(seed).shuffle(labels)
    piles = [list(stack) for stack in stacks]
    parts = []
    for hand in np.array(labels).reshape(clients, -1).tolist():
        mine = [piles[c].pop(numpy_stream.choice(len(piles[c]), replace=False)) for c in hand]
        parts.append(np.concatenate(mine))
    return parts


def lda(class_rows: Parts, clients: int, *, alpha: float, min_size: int, seed: int) -> Parts:
    """FedNTD's `lda`, attempt by attempt; shuffles are drawn in rejected attempts too, to keep the stream."""
    numpy_stream = legacy_stream(seed)
    concentration = np.repeat(alpha, clients)
    for _ in range(_MOST_ATTEMPTS):
        shuffled, counts = _attempt(numpy_stream, class_rows, concentration)
        if counts is not None and counts.sum(axis=1).min() >= min_size:
            parts = [part.copy() for part in deal_counts(shuffled, counts)]
            for part in parts:
                numpy_stream.shuffle(part)
            return parts
    raise FedstillError(
        f"partition.legacy_seed = {seed} accepts none of its first {_MOST_ATTEMPTS} draws at partition.alpha = "
        f"{alpha}: leave legacy_seed out, or raise partition.alpha"
    )


def _attempt(
    numpy_stream: np.random.RandomState, class_rows: Parts, concentration: np.ndarray
) -> tuple[Parts, np.ndarray | None]:
    """One attempt: shuffled rows and counts (clients, classes); None where all open shares underflowed."""
    clients, limit = len(concentration), sum(map(len, class_rows)) / len(concentration)
    sizes = np.zeros(clients, np.int64)
    counts = np.zeros((clients, len(class_rows)), np.int64)
    shuffled, broken = [], False
    for c, rows in enumerate(class_rows):
        shuffled.append(rows.copy())
        numpy_stream.shuffle(shuffled[-1])
        with np.errstate(invalid="ignore"):  # 0 / 0 inside when every Gamma draw underflows
            shares = numpy_stream.dirichlet(concentration) * (sizes < limit)
        total = shares.sum()
        if not total > 0:
            broken = True
            continue
        cuts = (np.cumsum(shares / total) * len(rows)).astype(np.int64)
        cuts[-1] = len(rows)
        counts[:, c] = np.diff(cuts, prepend=0)
        sizes += counts[:, c]
    return shuffled, None if broken else counts


def feddyn(
    labels: np.ndarray, sizes_from: Callable[[np.random.RandomState], np.ndarray], *, beta: float, seed: int
) -> Parts:
    """FedDyn's and FedFTG's `feddyn`: one stream for the permutation, the sizes, the priors and the filling.

    Clients are filled one sample at a time, from the back of their lists and of the classes' lists.
    """
    numpy_stream = legacy_stream(seed)
    permutation = numpy_stream.permutation(len(labels))
    sizes = sizes_from(numpy_stream)
    piles = [permutation[rows].tolist() for rows in rows_by_class(labels[permutation])]
    priors = numpy_stream.dirichlet([beta] * len(piles), size=len(sizes)).cumsum(axis=1)
    cumulated, left = priors.tolist(), sizes.tolist()
    parts = [np.empty(size, np.int64) for size in left]
    missing = int(sizes.sum())
    while missing:
        client = numpy_stream.randint(len(left))
        if left[client] <= 0:
            continue
        left[client] -= 1
        missing -= 1
        c = bisect_left(cumulated[client], numpy_stream.uniform()) % len(piles)
        if not piles[c]:
            c = _redraw(numpy_stream, priors[client], np.array([len(pile) > 0 for pile in piles]))
        parts[client][left[client]] = piles[c].pop()
    return parts


def _redraw(numpy_stream: np.random.RandomState, cumulated: np.ndarray, in_stock: np.ndarray) -> int:
    """The first class in stock in the stream, looked for in blocks; the stream stops right behind it."""
    for _ in range(_MOST_REDRAWS // _REDRAW_BLOCK):
        before = numpy_stream.get_state()
        drawn = np.searchsorted(cumulated, numpy_stream.uniform(size=_REDRAW_BLOCK)) % len(cumulated)
        places = np.flatnonzero(in_stock[drawn])
        if len(places):
            numpy_stream.set_state(before)
            numpy_stream.uniform(size=places[0] + 1)
            return int(drawn[places[0]])
    raise FedstillError(
        f"partition.legacy_seed needs more than {_MOST_REDRAWS} redraws of one class: leave legacy_seed out"
    )
