"""Label counts for a federation run by hand: there a client's batch is all its data."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedstill.core.types import Batch, Method


def counts_of(batch: Batch, classes: int) -> torch.Tensor:
    """(K,) real samples of each class."""
    return torch.bincount(batch.y, weights=batch.weight, minlength=classes)


def counting(method: Method) -> Method:
    """The method on clients that count their own labels at every step (`federate_by_hand` passes no counts)."""

    def loss(output, batch, local):
        counts = counts_of(batch, output.logits.shape[-1])
        return method.objective.loss(output, batch, local._replace(label_counts=counts))

    return replace(method, objective=replace(method.objective, loss=loss))
