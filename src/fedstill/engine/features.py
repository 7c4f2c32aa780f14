"""Where only a head is trained: the features of each row, computed once for as long as the extractor stays the same."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstill.core.tree import clone, leaves
from fedstill.core.types import Weights
from fedstill.engine.forward import forward
from fedstill.engine.plan import Plan
from fedstill.engine.program import Features, Program


def fill_features(program: Program, plan: Plan) -> None:
    """Let the steps of a plan begin at features, where a row has the same ones at every step.

    So it is unless something augments. A frozen model whose outputs are not kept reads the samples themselves, and the
    features must fit in memory; otherwise every step computes them.
    """
    if not program.head_only:
        return
    wanted = np.unique(plan.index[plan.weight > 0])
    if program.training.augment or program.cache.keys() != program.objective.frozen.keys():
        program.features = None
    elif len(wanted):
        _renew(program, wanted)


def _renew(program: Program, wanted: np.ndarray) -> None:
    extractor = _extractor(program)
    kept = program.features
    if kept is None:
        first = _features(program, wanted[:1])
        if not program.feed.fits(len(program.feed.y) * first.numel()):
            return
        kept = Features(first.new_zeros(len(program.feed.y), *first.shape[1:]), np.zeros(len(program.feed.y), bool))
        program.features = kept
    if kept.extractor is None or not _equal(kept.extractor, extractor):
        kept.known[:] = False
        kept.extractor = clone(extractor)
    missing = wanted[~kept.known[wanted]]
    if len(missing):
        kept.values[torch.from_numpy(missing).to(kept.values.device)] = _features(program, missing)
        kept.known[missing] = True


def _features(program: Program, rows: np.ndarray) -> Tensor:
    places = torch.from_numpy(rows).to(program.feed.device)
    return forward(program.model, program.start, program.feed, places).features


def _extractor(program: Program) -> Weights:
    params = {name: p for name, p in program.start.params.items() if name not in program.model.head_names}
    return Weights(params, program.start.buffers)


def _equal(a: Weights, b: Weights) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
