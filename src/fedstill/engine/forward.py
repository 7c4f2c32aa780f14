"""Forward passes over whole sets: evaluation, teachers, cached outputs, statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import seed_for, to_signed
from fedstill.core.tree import clone, leaves, stack
from fedstill.core.tree import rows as row_of
from fedstill.core.types import Model, Output, Params, Seed, Weights
from fedstill.engine.device_data import Feed
from fedstill.engine.plan import Plan
from fedstill.engine.step import Features, Program
from fedstill.engine.workers import Workers

ROWS_AT_ONCE = {"cpu": 512, "cuda": 4096}
IMAGES_AT_ONCE = 128  # on a CPU, where maps shall stay in the caches: 512 images of the CNN 184 ms instead of 266
STACKED_ROWS_AT_ONCE = 4096  # rows times models under vmap
AFAR = 2.0**20  # running statistics so far from any batch's that a step towards it shows the momentum in all its digits
TEACHERS_AT_ONCE = 16  # more of them go in turn, so that their number does not shrink the pieces to single rows


@torch.no_grad()
def forward(
    model: Model,
    weights: Weights,
    feed: Feed,
    rows: Tensor | None = None,
    *,
    features: bool = True,
    workers: Workers | None = None,
) -> Output:
    """Outputs in eval mode for some rows of a feed (all by default), in pieces that fit and that workers share."""
    count = len(feed.x) if rows is None else len(rows)
    size = ROWS_AT_ONCE.get(feed.device.type, 512)
    if model.traits.convolutional:
        size = min(size, IMAGES_AT_ONCE) if feed.device.type == "cpu" else size
        weights = Weights({name: _channels_last(p) for name, p in weights.params.items()}, weights.buffers)

    def piece_of(at: int) -> Output:
        piece = slice(at, min(at + size, count))
        x = feed.inputs(piece if rows is None else rows[piece])
        output = model.apply(weights, _channels_last(x) if model.traits.convolutional else x, training=False)[0]
        return output if features else _without_features(output)

    parts = _each(piece_of, range(0, count, size), workers)
    if not parts:
        empty = model.apply(weights, feed.inputs(slice(0, 1)), training=False)[0]
        return Output(empty.logits[:0], empty.features[:0])
    return Output(torch.cat([p.logits for p in parts]), torch.cat([p.features for p in parts]))


def _each(function: Callable[[int], Output], pieces: Sequence[int], workers: Workers | None) -> list[Output]:
    """The function's answer to each piece, in order."""
    if workers is None or torch.is_autocast_enabled("cpu"):  # autocast counts for the caller's thread alone
        return [function(piece) for piece in pieces]
    answers: dict[int, Output] = {}

    def work(_: int, waiting: Iterator[int]) -> None:
        with torch.no_grad():  # counts for one thread
            for piece in waiting:
                answers[piece] = function(piece)

    workers.do(pieces, work)
    return [answers[piece] for piece in pieces]


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _without_features(output: Output) -> Output:
    return output._replace(features=output.features[..., :0])


@torch.no_grad()
def forward_many(
    model: Model,
    weights: Weights,
    feed: Feed,
    rows: Tensor | None = None,
    *,
    loop: bool,
    features: bool = True,
    workers: Workers | None = None,
) -> Output:
    """Outputs of several models (stacked weights) for some rows of a feed (all by default): (T, M, ...).

    Memory beyond the outputs: one piece of at most TEACHERS_AT_ONCE models, however many there are.
    """
    count = len(feed.x) if rows is None else len(rows)
    extractors = [leaf for name, leaf in weights.params.items() if name not in model.head_names]
    shared = all(leaf.stride(0) == 0 for leaf in (*extractors, *weights.buffers.values()))
    if model.head is not None and model.head_names and extractors and shared:
        # All models are views of one but for the head, as an engine that trains heads hands them out: its extractor
        # runs once instead of T times.
        seen = forward(model, row_of(weights, 0), feed, rows, workers=workers).features
        heads = {name: weights.params[name] for name in model.head_names}
        logits = torch.stack([model.head(row_of(heads, i), seen) for i in range(_count(weights))])
        output = Output(logits, seen.expand(len(logits), *seen.shape))
        return output if features else _without_features(output)
    if not loop:
        return _gathered(_together(model, weights, feed, rows, features), weights, count)
    each = (
        (i, forward(model, row_of(weights, i), feed, rows, features=features, workers=workers))
        for i in range(_count(weights))
    )
    return _gathered(((i, slice(None), output) for i, output in each), weights, count)


def _count(weights: Weights) -> int:
    return len(next(iter(weights.params.values())))


Piece = tuple[int | slice, slice, Output]  # which models, which rows, what they say


def _gathered(pieces: Iterator[Piece], weights: Weights, count: int) -> Output:
    """(T, M, ...): every piece is put in its place as it comes, so that nothing is held twice."""
    whole: Output | None = None
    for models, rows, piece in pieces:
        if whole is None:
            shape = _count(weights), count
            whole = Output(*(part.new_empty(*shape, part.shape[-1]) for part in piece))
        whole.logits[models, rows] = piece.logits
        whole.features[models, rows] = piece.features
    assert whole is not None, "no samples"
    return whole


def _together(model: Model, weights: Weights, feed: Feed, chosen: Tensor | None, features: bool) -> Iterator[Piece]:
    """Pieces of at most TEACHERS_AT_ONCE models under vmap, and so many rows that models times rows fit."""
    count = len(feed.x) if chosen is None else len(chosen)
    for at in range(0, _count(weights), TEACHERS_AT_ONCE):
        some = row_of(weights, slice(at, at + TEACHERS_AT_ONCE))
        size = max(1, STACKED_ROWS_AT_ONCE // _count(some))
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            x = feed.inputs(rows if chosen is None else chosen[rows])
            output = torch.func.vmap(lambda w: model.apply(w, x, training=False)[0])(some)  # noqa: B023
            yield slice(at, at + TEACHERS_AT_ONCE), rows, output if features else _without_features(output)


@torch.no_grad()
def forward_training(
    model: Model,
    weights: Weights,
    feed: Feed,
    batch: int,
    seed: Seed,
    chosen: Tensor | None = None,
    *,
    stacked: bool,
    features: bool,
) -> Output:
    """Outputs in train mode, `batch` rows at a time: BatchNorm by the batch and live dropout, as some code teaches."""
    models = weights if stacked else stack([weights])
    count = len(feed.x) if chosen is None else len(chosen)

    def pieces() -> Iterator[Piece]:
        for teacher in range(_count(models)):
            teacher_weights = row_of(models, teacher)
            for at in range(0, count, batch):
                rows = slice(at, at + batch)
                x = feed.inputs(rows if chosen is None else chosen[rows])
                key = torch.tensor(to_signed(seed_for(seed, teacher, at)), device=feed.device)
                output = model.apply(teacher_weights, x, training=True, seed=key)[0]
                yield teacher, rows, output if features else _without_features(output)

    outputs = _gathered(pieces(), models, count)
    return outputs if stacked else row_of(outputs, 0)


@torch.no_grad()
def batch_statistics(model: Model, weights: Weights, feed: Feed, batch: int) -> Params:
    """BatchNorm's statistics taken anew: r <- r + b / (n + b) (batch - r) over batches of b rows, n rows seen before.

    What a batch says is read off the change of the running statistics r' = r + m (batch - r): from r = 0 it is
    m batch. A batch that has no variance (one value a channel) says nothing.
    """
    running = [name for name in weights.buffers if name.endswith(("running_mean", "running_var"))]
    if not running or not model.traits.batch_statistics:
        return weights.buffers

    def moved(value: float, x: Tensor, key: Tensor) -> Params:
        held = {n: torch.full_like(b, value) if n in running else b for n, b in weights.buffers.items()}
        fresh = {n: torch.zeros_like(b) for n, b in held.items() if n.endswith("num_batches_tracked")}
        return model.apply(Weights(weights.params, {**held, **fresh}), x, training=True, seed=key)[1]

    seen, buffers = 0, dict(weights.buffers)
    share: dict[str, float] = {}
    for at in range(0, len(feed.x), batch):
        x = feed.inputs(slice(at, at + batch))
        key = torch.tensor(to_signed(seed_for(0, "batch statistics", at)), device=feed.device)
        after = moved(0.0, x, key)
        if not share or len(x) < batch:
            from_afar = moved(AFAR, x, key)
            share = {n: 1.0 - float((from_afar[n] - after[n]).double().mean()) / AFAR for n in running}
        for name in (name for name in running if share[name] > 0):
            estimate = after[name] / share[name]
            buffers[name] = (
                estimate if not seen else buffers[name] + (estimate - buffers[name]) * (len(x) / (seen + len(x)))
            )
        seen += len(x)
    return buffers


def fill_features(program: Program, plan: Plan, held: np.ndarray | None = None) -> None:
    """Let the steps of a plan begin at features, where a row has the same ones at every step.

    So it is unless something augments. A frozen model whose outputs are not kept reads the samples themselves, and the
    features must fit in memory; otherwise every step computes them.

    held: all rows of the plan's only client, which are computed at once; without it, the missing rows of the plan are.
    """
    if not program.head_only:
        return
    wanted = np.unique(plan.index[plan.weight > 0])
    if program.training.augment or program.cache.keys() != program.objective.frozen.keys():
        program.features = None
        return
    if not len(wanted):
        return
    kept, head = program.features, program.model.head_names
    params = {name: p for name, p in program.start.params.items() if name not in head}
    extractor = Weights(params, program.start.buffers)
    if kept is None:
        first = _features(program, wanted[:1])
        if not program.feed.fits(len(program.feed.y) * first.numel()):
            return
        kept = Features(first.new_zeros(len(program.feed.y), *first.shape[1:]), np.zeros(len(program.feed.y), bool))
        program.features = kept
    if kept.extractor is None or not all(map(torch.equal, leaves(kept.extractor), leaves(extractor))):
        kept.known[:] = False
        kept.extractor = clone(extractor)
    missing = wanted[~kept.known[wanted]]
    if len(missing):
        computed = missing if held is None else held
        kept.values[torch.from_numpy(computed).to(kept.values.device)] = _features(program, computed)
        kept.known[computed] = True


def _features(program: Program, rows: np.ndarray) -> Tensor:
    places = torch.from_numpy(rows).to(program.feed.device)
    return forward(program.model, program.start, program.feed, places).features
