"""An engine whose clients do not all send what they trained: faults are made outside of the library."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from fedstill.core.trainer import CohortEngine, LocalWork, Trained
from fedstill.core.tree import tree_map
from fedstill.core.types import Tree


class SignFlippers:
    """Lets some clients send their move backwards and `scale` times as far."""

    def __init__(self, engine: CohortEngine, hostile: Collection[int], scale: float) -> None:
        self.engine, self.hostile, self.scale = engine, np.array(sorted(hostile)), scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, work: LocalWork, ids: np.ndarray, states: Tree) -> Trained:
        trained = self.engine.train(work, ids, states)
        flipped = torch.as_tensor(np.isin(ids, self.hostile), device=self.engine.device)

        def sent(leaf: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            back = start - self.scale * (leaf - start)
            return torch.where(flipped.reshape(-1, *[1] * start.ndim), back, leaf)

        weights = trained.uploads.weights
        params = tree_map(sent, weights.params, work.start.params)
        return trained._replace(uploads=trained.uploads._replace(weights=weights._replace(params=params)))
