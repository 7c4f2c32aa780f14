"""Forward passes over whole sets: evaluation, teachers, cached outputs, statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.seeds import seed_for, to_signed
from fedstill.core.tree import rows as row_of
from fedstill.core.types import Model, Output, Params, Seed, Weights
from fedstill.engine.feed import Feed

ROWS_AT_ONCE = {"cpu": 512, "cuda": 4096}
TEACHERS_AT_ONCE = 16  # more of them go in turn, so that their number does not shrink the pieces to single rows


@torch.no_grad()
def forward(model: Model, weights: Weights, feed: Feed, rows: Tensor | None = None, *, features: bool = True) -> Output:
    """Outputs in eval mode for some rows of a feed (all by default), in pieces that fit."""
    count = len(feed.x) if rows is None else len(rows)
    size = ROWS_AT_ONCE.get(feed.device.type, 512)
    if model.convolutional and feed.device.type == "cpu":
        weights = Weights({name: _channels_last(p) for name, p in weights.params.items()}, weights.buffers)
    parts = []
    for at in range(0, count, size):
        piece = slice(at, min(at + size, count))
        x = feed.inputs(piece if rows is None else rows[piece])
        output = model.apply(weights, _channels_last(x) if model.convolutional else x, training=False)[0]
        parts.append(output if features else _without_features(output))
    if not parts:
        empty = model.apply(weights, feed.inputs(slice(0, 1)), training=False)[0]
        return Output(empty.logits[:0], empty.features[:0])
    return Output(torch.cat([p.logits for p in parts]), torch.cat([p.features for p in parts]))


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _without_features(output: Output) -> Output:
    return output._replace(features=output.features[..., :0])


@torch.no_grad()
def forward_many(model: Model, weights: Weights, feed: Feed, *, loop: bool, features: bool = True) -> Output:
    """Outputs of several models (stacked weights) over all of a feed: (T, M, ...).

    Memory beyond the outputs: one piece of at most TEACHERS_AT_ONCE models, however many there are.
    """
    teachers = len(next(iter(weights.params.values())))
    if loop:
        each = [forward(model, row_of(weights, i), feed, features=features) for i in range(teachers)]
        return Output(torch.stack([o.logits for o in each]), torch.stack([o.features for o in each]))
    groups = [
        _forward_together(model, row_of(weights, slice(at, at + TEACHERS_AT_ONCE)), feed, features)
        for at in range(0, teachers, TEACHERS_AT_ONCE)
    ]
    return Output(torch.cat([g.logits for g in groups]), torch.cat([g.features for g in groups]))


def _forward_together(model: Model, weights: Weights, feed: Feed, features: bool) -> Output:
    teachers = len(next(iter(weights.params.values())))
    size = max(1, ROWS_AT_ONCE.get(feed.device.type, 512) // teachers)
    parts = []
    for at in range(0, len(feed.x), size):
        x = feed.inputs(slice(at, at + size))
        output = torch.func.vmap(lambda w: model.apply(w, x, training=False)[0])(weights)  # noqa: B023
        parts.append(output if features else _without_features(output))
    return Output(torch.cat([p.logits for p in parts], 1), torch.cat([p.features for p in parts], 1))


@torch.no_grad()
def forward_training(
    model: Model, weights: Weights, feed: Feed, batch: int, seed: Seed, *, stacked: bool, features: bool
) -> Output:
    """Outputs in train mode, `batch` rows at a time: BatchNorm by the batch and live dropout, as some code teaches."""
    each = [row_of(weights, i) for i in range(len(next(iter(weights.params.values()))))] if stacked else [weights]
    outputs = []
    for teacher, one in enumerate(each):
        parts = []
        for at in range(0, len(feed.x), batch):
            key = torch.tensor(to_signed(seed_for(seed, teacher, at)), device=feed.device)
            output = model.apply(one, feed.inputs(slice(at, at + batch)), training=True, seed=key)[0]
            parts.append(output if features else _without_features(output))
        outputs.append(Output(torch.cat([p.logits for p in parts]), torch.cat([p.features for p in parts])))
    if not stacked:
        return outputs[0]
    return Output(torch.stack([o.logits for o in outputs]), torch.stack([o.features for o in outputs]))


@torch.no_grad()
def batch_statistics(model: Model, weights: Weights, feed: Feed, batch: int) -> Params:
    """BatchNorm's statistics taken anew: r <- r + b / (n + b) (batch - r) over batches of b rows, n rows seen before.

    What a batch says is read off the change of the running statistics r' = r + m (batch - r); their own momentum m
    is found by two passes over the first batch, from r = 0 and from r = 1.
    """
    running = [name for name in weights.buffers if name.endswith(("running_mean", "running_var"))]
    if not running or not model.batch_statistics:
        return weights.buffers

    def moved(value: float, x: Tensor, key: Tensor) -> Params:
        held = {n: torch.full_like(b, value) if n in running else b for n, b in weights.buffers.items()}
        return model.apply(Weights(weights.params, held), x, training=True, seed=key)[1]

    seen, found = 0, dict(weights.buffers)
    share: dict[str, Tensor] = {}
    for at in range(0, len(feed.x), batch):
        x = feed.inputs(slice(at, at + batch))
        key = torch.tensor(to_signed(seed_for(0, "batch statistics", at)), device=feed.device)
        after = moved(0.0, x, key)
        if not share:
            from_one = moved(1.0, x, key)
            share = {name: 1.0 - (from_one[name] - after[name]) for name in running}
        for name in running:
            told = after[name] / share[name]
            found[name] = told if not seen else found[name] + (told - found[name]) * (len(x) / (seen + len(x)))
        seen += len(x)
    return found
