"""Where finished clients go: stacked weights, one row a client."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core.tree import clone, tree_map
from fedstill.core.tree import rows as select
from fedstill.core.types import Tree, Weights
from fedstill.engine.stack import Layout, Stack, allocate_weights


class Finished(NamedTuple):
    """A trained cohort, stacked in its order."""

    weights: Weights
    loss: Tensor  # (C,) sums over steps
    optimizer: Tree  # what each client's remembers, where it is kept


class Results:
    """Rows in the order of the plan's columns; `weights` are handed out in the order of the cohort.

    optimizer: what each client's remembered before, if it is kept.
    """

    def __init__(
        self, start: Weights, cohort: int, like: Tensor, layout: Layout | None = None, optimizer: Tree | None = None
    ) -> None:
        self.stacked = allocate_weights(start, cohort, layout or {})
        self.loss = like.new_zeros(cohort)
        self.optimizer: Tree = clone(optimizer or {})

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
        if self.optimizer:
            mine = self.optimizer["moments"]
            tree_map(lambda value, leaf: leaf[rows].copy_(value[source]), stack.moments, mine)
            self.optimizer["count"][rows] = stack.count.to(self.optimizer["count"].dtype)

    def ordered(self, order: list[int]) -> Finished:
        """Row i goes to place order[i]."""
        finished = Finished(self.stacked, self.loss, self.optimizer)
        if order == list(range(len(order))):
            return finished
        places = torch.empty(len(order), dtype=torch.int64)
        places[torch.tensor(order)] = torch.arange(len(order))
        return select(finished, places.to(self.loss.device))
