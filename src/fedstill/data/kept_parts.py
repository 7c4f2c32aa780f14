"""Partitions that took long to draw, on disk: one .npy of row numbers and a JSON that vouches for it.

LDA at alpha = 0.05 accepts one attempt in tens of thousands: replaying the published stream takes 15 s or more.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.data.cache import checksum_of, default_cache_dir, read_array, replace_file, write_array

FORMAT = 1  # raise it when a scheme draws other parts from the same seed
SLOW = 2.0  # seconds; what is faster is drawn again


def kept_parts(
    build: Callable[[], Sequence[np.ndarray]],
    labels: np.ndarray,
    identity: Mapping[str, Any],
    *,
    cache_dir: Path | None = None,
) -> list[np.ndarray]:
    """The parts that were stored for these labels and this identity, else `build()`, stored if it took long."""
    names = json.dumps([FORMAT, identity], sort_keys=True, default=str)
    digest = hashlib.sha256(names.encode() + np.ascontiguousarray(labels, np.int64).tobytes()).hexdigest()
    folder = (cache_dir or default_cache_dir()) / f"partition-{digest[:16]}"
    found = _read(folder, digest)
    if found is not None:
        return found
    began = time.perf_counter()
    parts = list(build())
    if time.perf_counter() - began > SLOW:
        try:
            _write(folder, parts, digest)
        except OSError:  # a full or read-only disk: the parts are drawn again next time
            return parts
    return parts


def _write(folder: Path, parts: list[np.ndarray], digest: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.concatenate(parts).astype(np.int64)
    facts = write_array(folder / "rows.npy", rows)
    entry = {"digest": digest, "sizes": [len(part) for part in parts], "rows": facts}
    text = json.dumps({"entry": entry, "sha256": checksum_of(entry)})
    replace_file(folder / "entry.json", lambda file: file.write(text.encode()))


def _read(folder: Path, digest: str) -> list[np.ndarray] | None:
    try:
        stored = json.loads((folder / "entry.json").read_bytes())
        entry = stored["entry"]
        if stored["sha256"] != checksum_of(entry) or entry["digest"] != digest:
            return None
        rows = read_array(folder / "rows.npy", **entry["rows"])
        return np.split(rows, np.cumsum(entry["sizes"])[:-1])
    except (OSError, ValueError, KeyError, TypeError):
        return None
