"""Partitions that took long to draw, in the cache.

LDA at alpha = 0.05 accepts one attempt in tens of thousands: replaying the published stream takes 15 s or more.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.storage.cache import Cache

FORMAT = 2  # raise it when a scheme draws other parts from the same seed
SLOW = 2.0  # seconds; a faster partition is drawn again


def cached_parts(
    draw: Callable[[], Sequence[np.ndarray]],
    labels: np.ndarray,
    options: Mapping[str, Any],
    *,
    cache_dir: Path | None = None,
) -> list[np.ndarray]:
    """Return the parts that were stored for these labels and options, else `draw()`, stored if it took long."""
    digest = hashlib.sha256(np.ascontiguousarray(labels, np.int64).data).hexdigest()
    cache, identity = Cache("partitions", cache_dir), {"format": FORMAT, "labels": digest, "options": dict(options)}
    tree = cache.load(identity)
    if tree is not None:
        return np.split(tree["rows"], np.cumsum(tree["sizes"])[:-1])
    began = time.perf_counter()
    parts = list(draw())
    if time.perf_counter() - began > SLOW:
        cache.save(identity, {"rows": np.concatenate(parts), "sizes": [len(part) for part in parts]})
    return parts
