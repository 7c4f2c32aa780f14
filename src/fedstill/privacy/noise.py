"""Clipping and Gaussian noise on a client's move, to try what they cost. They promise nothing: see `moves` for that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import seed_for, torch_generator
from fedstill.core.types import Params, Seed, Transmit, Uploads, Weights, unchanged


def clip_and_noise(sigma: float, clip: float | None = None) -> Transmit:
    """w + d_k min(1, clip / ||d_k||) + sigma e_k,  d_k = w_k - w,  e_k ~ N(0, I): parameters only, client by client.

    The norm is over all parameters of the client; without `clip` the move stays as it is. Buffers (BatchNorm
    statistics), sizes, losses and what else goes up (SCAFFOLD's control) are not touched. e_k is a pure function of
    seed, client and tensor name, so the cohort's order does not change it; it is drawn where the uploads are, and a
    GPU draws other numbers than a CPU.
    """
    if sigma == 0 and clip is None:
        return unchanged

    def transmit(uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
        """the model's parameters only: the move is clipped where a bound is set, then Gaussian noise is added"""
        params = uploads.weights.params
        if clip is not None:
            params = _clipped(params, start.params, clip)
        if sigma != 0:
            ids = uploads.ids.cpu().numpy()
            params = {name: leaf.add(_noise_like(leaf, name, seed, ids), alpha=sigma) for name, leaf in params.items()}
        return uploads._replace(weights=uploads.weights._replace(params=params))

    return transmit


def _clipped(params: Params, start: Params, bound: float) -> Params:
    """Each client's move with a norm of at most `bound`; who is within it keeps every bit of its model."""
    moves = {name: leaf - start[name] for name, leaf in params.items()}
    squares = [move.reshape(len(move), -1).double().square().sum(1) for move in moves.values()]
    norm = torch.stack(squares).sum(0).sqrt()  # (C,)
    factor = (bound / norm).clamp_max(1.0)  # NaN stays NaN: the guard shall see a broken upload

    def shortened(name: str, leaf: Tensor) -> Tensor:
        share = factor.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))
        return torch.where(share == 1.0, leaf, start[name] + share * moves[name])

    return {name: shortened(name, leaf) for name, leaf in params.items()}


def _noise_like(stacked: Tensor, name: str, seed: Seed, ids: np.ndarray) -> Tensor:
    """N(0, 1) of the shape (C, ...), one stream for each client and tensor.

    3.5 ns a number on one CPU thread (10 uploads of VGG8: 0.16 s), so clients are shared out among torch's threads.
    """
    seeds = seed_for(seed, "noise", name, ids).tolist()
    drawn = torch.empty(stacked.shape, dtype=torch.float32, device=stacked.device)
    threads = 1 if stacked.is_cuda else torch.get_num_threads()

    def draw(first: int) -> None:
        for place in range(first, len(seeds), threads):
            generator = torch_generator(seeds[place], stacked.device)
            torch.randn(stacked.shape[1:], generator=generator, device=stacked.device, out=drawn[place])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw, range(threads)))
    return drawn.to(stacked)
