"""Forward passes over whole sets: evaluation, teachers, cached outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.types import Model, Output, Weights
from fedstill.engine.feed import Feed

ROWS_AT_ONCE = {"cpu": 512, "cuda": 4096}


@torch.no_grad()
def forward(model: Model, weights: Weights, feed: Feed, rows: Tensor | None = None) -> Output:
    """Outputs in eval mode for some rows of a feed (all by default), in pieces that fit."""
    count = len(feed.x) if rows is None else len(rows)
    size = ROWS_AT_ONCE.get(feed.device.type, 512)
    if model.convolutional and feed.device.type == "cpu":
        weights = Weights({name: _channels_last(p) for name, p in weights.params.items()}, weights.buffers)
    parts = []
    for at in range(0, count, size):
        piece = slice(at, min(at + size, count))
        x = feed.inputs(piece if rows is None else rows[piece])
        parts.append(model.apply(weights, _channels_last(x) if model.convolutional else x, training=False)[0])
    if not parts:
        empty = model.apply(weights, feed.inputs(slice(0, 1)), training=False)[0]
        return Output(empty.logits[:0], empty.features[:0])
    return Output(torch.cat([p.logits for p in parts]), torch.cat([p.features for p in parts]))


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@torch.no_grad()
def forward_many(model: Model, weights: Weights, feed: Feed, *, loop: bool) -> Output:
    """Outputs of several models (stacked weights) over all of a feed: (T, M, ...)."""
    teachers = len(next(iter(weights.params.values())))
    if loop:
        each = [forward(model, _row(weights, i), feed) for i in range(teachers)]
        return Output(torch.stack([o.logits for o in each]), torch.stack([o.features for o in each]))
    size = max(1, ROWS_AT_ONCE.get(feed.device.type, 512) // teachers)
    parts = []
    for at in range(0, len(feed.x), size):
        x = feed.inputs(slice(at, at + size))
        parts.append(torch.func.vmap(lambda w: model.apply(w, x, training=False)[0])(weights))  # noqa: B023
    return Output(torch.cat([p.logits for p in parts], 1), torch.cat([p.features for p in parts], 1))


def _row(weights: Weights, index: int) -> Weights:
    return Weights({k: v[index] for k, v in weights.params.items()}, {k: v[index] for k, v in weights.buffers.items()})
