"""What a client does after its last step: one look at all its data (`measure`), then `finish`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstill.core.tree import stack, tree_map
from fedstill.core.types import Batch, Local, Tree, no_finish
from fedstill.engine.group import map_clients, one_client
from fedstill.engine.plan import sweep_plan
from fedstill.engine.program import Program


def finish_clients(
    program: Program, local: Local, rows: np.ndarray, sizes: np.ndarray, *, stacked: bool
) -> tuple[Tree, Tree]:
    """(new states, extra uploads), stacked over the cohort."""
    if program.objective.finish is no_finish:
        return {}, {}
    finish = program.objective.finish
    if stacked:
        measured = _measure_stacked(program, local, rows, sizes)
        with torch.no_grad():
            states, extra = map_clients(finish, local, measured)
        return states, extra
    pairs = []
    first = np.cumsum(sizes) - sizes
    for client, size in enumerate(sizes):
        alone = one_client(_only(local, client))
        measured = _measure_alone(program, alone, rows[first[client] : first[client] + size])
        with torch.no_grad():
            pairs.append(finish(alone, measured))
    return stack([state for state, _ in pairs]), stack([extra for _, extra in pairs])


def _only(local: Local, client: int) -> Local:
    """A stacked Local of one client (params lose the client dimension)."""
    piece = slice(client, client + 1)
    cut = {name: getattr(local, name)[piece] for name in ("label_counts", "size", "steps", "travel", "lr", "seed")}
    state = tree_map(lambda leaf: leaf[piece], local.state)
    return local._replace(params={k: v[client] for k, v in local.params.items()}, state=state, **cut)


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
