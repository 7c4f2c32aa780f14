"""Where finished clients go: stacked weights, one row a client."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.tree import tree_map
from fedstill.core.types import Weights
from fedstill.engine.stack import Layout, Stack, allocate_weights


class Results:
    """Rows in the order of the plan's columns; `weights` are handed out in the order of the cohort."""

    def __init__(self, start: Weights, cohort: int, like: Tensor, layout: Layout | None = None) -> None:
        self.stacked = allocate_weights(start, cohort, layout or {})
        self.loss = like.new_zeros(cohort)

    def fill(self, start: Weights) -> None:
        """Everybody has the received model (a client without a step keeps it)."""
        tree_map(lambda leaf, value: leaf.copy_(value.expand_as(leaf)), self.stacked, start)

    def piece(self, rows: slice) -> Weights:
        """Some rows as storage: a stack trained there needs no copy."""
        return tree_map(lambda leaf: leaf[rows], self.stacked)

    def take(self, stack: Stack, source: slice, rows: slice) -> None:
        """Copy some clients of a stack to their rows."""
        finished = Weights(stack.params, stack.buffers)
        tree_map(lambda leaf, value: leaf[rows].copy_(value[source]), self.stacked, finished)
        self.loss[rows] = stack.loss[source].to(self.loss.dtype)

    def ordered(self, order: list[int]) -> tuple[Weights, Tensor]:
        """Row i goes to place order[i]."""
        if order == list(range(len(order))):
            return self.stacked, self.loss
        places = torch.empty(len(order), dtype=torch.int64)
        places[torch.tensor(order)] = torch.arange(len(order))
        places = places.to(self.loss.device)
        return tree_map(lambda leaf: leaf[places], self.stacked), self.loss[places]
