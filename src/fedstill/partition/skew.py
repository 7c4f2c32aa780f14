"""How unlike the clients are, from their class counts (N clients, K classes)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstill.core.seeds import numpy_generator, seed_for

_MOST_PAIRS = 20_000


def class_counts(parts: Sequence[np.ndarray], labels: np.ndarray, classes: int) -> np.ndarray:
    """Samples of each class on each client: (N, K) int64."""
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rows = np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.empty(0, np.int64)
    cells = owners * classes + np.asarray(labels)[rows]
    return np.bincount(cells, minlength=len(parts) * classes).reshape(len(parts), classes)


def label_entropy(counts: np.ndarray) -> float:
    """Mean over clients of H(labels) / log K: 1 when every client sees all classes alike, 0 with one class each."""
    shares = _shares(counts)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return float(-(shares * logs).sum(axis=1).mean() / np.log(max(counts.shape[1], 2)))


def top_class_share(counts: np.ndarray) -> float:
    """Mean over clients of the share of their most frequent class: 1 / K to 1."""
    return float(_shares(counts).max(axis=1).mean())


def size_gini(counts: np.ndarray) -> float:
    """Gini coefficient of the client sizes, sum_ij |n_i - n_j| / (2 N sum n): 0 equal, towards 1 all on one client."""
    sizes = np.sort(counts.sum(axis=1)).astype(float)
    ranks = np.arange(1, len(sizes) + 1)
    return float(((2 * ranks - len(sizes) - 1) * sizes).sum() / (len(sizes) * sizes.sum()))


def pairwise_distance(counts: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """Mean total variation and mean Hellinger distance between the label shares of two clients, both 0 to 1.

    All pairs, or 20,000 random ones (from `seed`) where there are more.
    """
    shares = _shares(counts)
    first, second = _pairs(len(shares), seed)
    if not len(first):
        return 0.0, 0.0
    p, q = shares[first], shares[second]
    variation = np.abs(p - q).sum(axis=1) / 2
    hellinger = np.sqrt(((np.sqrt(p) - np.sqrt(q)) ** 2).sum(axis=1) / 2)
    return float(variation.mean()), float(hellinger.mean())


def describe(counts: np.ndarray, *, seed: int = 0) -> dict[str, float]:
    """All measures of a partition by name; clients without samples count in the sizes only."""
    sizes = counts.sum(axis=1)
    variation, hellinger = pairwise_distance(counts, seed=seed)
    return {
        "clients": float(len(counts)),
        "samples": float(sizes.sum()),
        "smallest": float(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": float(sizes.max()),
        "classes_present": float((_shares(counts) > 0).sum(axis=1).mean()),
        "label_entropy": label_entropy(counts),
        "top_class_share": top_class_share(counts),
        "size_gini": size_gini(counts),
        "total_variation": variation,
        "hellinger": hellinger,
    }


def _shares(counts: np.ndarray) -> np.ndarray:
    filled = counts[counts.sum(axis=1) > 0]
    shares: np.ndarray = filled / filled.sum(axis=1, keepdims=True)
    return shares


def _pairs(clients: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if clients * (clients - 1) // 2 <= _MOST_PAIRS:
        first, second = np.triu_indices(clients, k=1)
        return first, second
    rng = numpy_generator(seed_for(seed, "partition", "pairs"))
    first = rng.integers(clients, size=_MOST_PAIRS)
    return first, (first + rng.integers(1, clients, size=_MOST_PAIRS)) % clients
