"""What a client does after its last step: one look at all its data (`measure`), then `finish`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstill.core.tree import concatenate, tree_map
from fedstill.core.types import Batch, Local, Tree, no_finish
from fedstill.engine.group import map_clients, one_client, some_clients
from fedstill.engine.plan import sweep_plan
from fedstill.engine.program import Program


def finish_clients(
    program: Program, local: Local, rows: np.ndarray, sizes: np.ndarray, *, chunk: int | None
) -> tuple[Tree, Tree]:
    """(new states, extra uploads), stacked over the cohort; `chunk` clients at once under vmap, None: one by one."""
    finish = program.objective.finish
    if finish is no_finish:
        return {}, {}
    first = np.cumsum(sizes) - sizes
    pairs = []
    for at in range(0, len(sizes), chunk or 1):
        piece = slice(at, at + (chunk or 1))
        theirs = rows[first[at] : first[at] + sizes[piece].sum()]
        part = some_clients(local, piece)
        if chunk is None:
            alone = one_client(part)
            measured = _measure_alone(program, alone, theirs)
            with torch.no_grad():
                pairs.append(tree_map(lambda leaf: leaf.unsqueeze(0), finish(alone, measured)))
        else:
            measured = _measure_stacked(program, part, theirs, sizes[piece])
            with torch.no_grad():
                pairs.append(map_clients(finish, part, measured))
    return pairs[0] if len(pairs) == 1 else concatenate(pairs)


def _measure_stacked(program: Program, local: Local, rows: np.ndarray, sizes: np.ndarray) -> Tree:
    """Mean over each client's batches, weighted by real samples; an epoch in order, nothing augmented."""
    measure = program.objective.measure
    if measure is None:
        return {}
    index, weight = (
        torch.from_numpy(part).to(program.feed.device) for part in sweep_plan(rows, sizes, program.training.batch_size)
    )
    weight = weight.to(local.size.dtype)
    total: Tree | None = None
    for step in range(len(index)):
        x, y = program.feed.batch(index[step], index[step], ())
        looked: Tree = map_clients(
            lambda part, batch: measure(program.model, batch, part), local, Batch(x, y, weight[step])
        )
        share = weight[step].sum(1) / local.size.clamp_min(1)
        looked = tree_map(lambda leaf, s=share: leaf * _as(s, leaf), looked)
        total = looked if total is None else tree_map(torch.add, total, looked)
    return total if total is not None else {}


def _as(share: Tensor, leaf: Tensor) -> Tensor:
    return share.reshape(-1, *[1] * (leaf.ndim - 1))


def _measure_alone(program: Program, local: Local, rows: np.ndarray) -> Tree:
    measure = program.objective.measure
    if measure is None:
        return {}
    total: Tree = {}
    has_data = len(rows) > 0
    # Nobody's row stands in for no data: it counts nothing, but `finish` finds what it looks for.
    index = torch.from_numpy(rows if has_data else np.zeros(1, np.int64)).to(program.feed.device)
    for piece in torch.split(index, program.training.batch_size):
        x, y = program.feed.batch(piece, piece, ())
        weight = torch.full((len(piece),), float(has_data), device=x.device, dtype=local.size.dtype)
        share = len(piece) / len(rows) if has_data else 0.0
        looked = tree_map(lambda leaf, s=share: leaf * s, measure(program.model, Batch(x, y, weight), local))
        total = tree_map(torch.add, total, looked) if total else looked
    return total
