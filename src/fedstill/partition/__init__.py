"""How the samples of one dataset are spread over clients: each paper's own procedure by its own name.

Every scheme is `scheme(labels, clients, *, seed, **own_keys) -> list of row indices`, one int64 array a client.

>>> import numpy as np
>>> parts = PARTITIONS["iid"](np.array([0, 1, 0, 1, 2]), 2, seed=0)
>>> sorted(np.concatenate(parts).tolist())
[0, 1, 2, 3, 4]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedstill.partition.by_class import bias, iid, label_split, n_class, natural, shards
from fedstill.partition.dirichlet import fedaux, feddf, lda, mrtf
from fedstill.partition.quota import feddyn, hsu
from fedstill.partition.skew import class_counts, describe

PARTITIONS: dict[str, Callable[..., list[np.ndarray]]] = {
    "iid": iid,
    "shards": shards,
    "lda": lda,
    "hsu": hsu,
    "feddf": feddf,
    "fedaux": fedaux,
    "mrtf": mrtf,
    "feddyn": feddyn,
    "label_split": label_split,
    "bias": bias,
    "n_class": n_class,
    "natural": natural,
}

SHARES_ROWS = frozenset({"bias", "n_class"})  # D2C-FL draws 60,000 samples from 20,000: clients share images

__all__ = ["PARTITIONS", "SHARES_ROWS", "class_counts", "describe"]
