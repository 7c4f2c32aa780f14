"""Clipped moves with Gaussian noise, for `dp_fedavg` and `update_noise`.

A move is clipped in float64 and counted in whole steps before anything is added to it: see privacy/noise.py. Without
noise it stays in float64, because there is nothing to protect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import seed_for, torch_generator
from fedstill.core.tree import rows
from fedstill.core.types import OnCohort, Params, PerClient, Seed, Uploads, Weights
from fedstill.privacy.noise import Noise, gaussian_steps, in_whole_steps, steps_in


def noisy_moves(clip: float, noise_multiplier: float) -> PerClient:
    """Each client sends w + d_k min(1, C / ||d_k||) + z C e_k,  e_k ~ N(0, I), and nothing else about its data.

    It sends the BatchNorm statistics that it received, a size of 1, 1 step, a travel of 1 and a loss of 0. A move that
    is not finite is sent as no move, with its noise, because broken training says something about the data, too.
    Extra slots are not touched.
    """
    sigma, how = noise_multiplier * clip, f"clip {clip!r}, noise {noise_multiplier!r}"

    def transmit(uploads: Uploads, start: Weights, seed: Seed) -> Uploads:
        """the move is clipped and hidden in Gaussian noise by the client; sizes, losses and BatchNorm stay with it"""
        params: dict[str, list[Tensor]] = {name: [] for name in start.params}
        for client, move in zip(uploads.ids.tolist(), clipped_moves(uploads, start, clip), strict=True):
            hidden = _hidden(move, clip, sigma, seed_for(seed, "private move", how, client))
            for name, leaf in hidden.items():
                params[name].append((start.params[name].double() + leaf).to(start.params[name].dtype))
        buffers = {name: leaf.expand(len(uploads.ids), *leaf.shape) for name, leaf in start.buffers.items()}
        weights = Weights({name: torch.stack(sent) for name, sent in params.items()}, buffers)
        ones = torch.ones_like(uploads.size)
        steps, travel, loss = ones.to(uploads.steps), ones.to(uploads.travel), torch.zeros_like(uploads.loss)
        return uploads._replace(weights=weights, size=ones, steps=steps, travel=travel, loss=loss)

    return transmit


BELOW = "below"  # the slot of a cohort's noisy share of moves that were no longer than the bound


def bit_noise(noise_multiplier: float, expected: int) -> float:
    """Return the noise on the number of moves below the bound: of the size that the paper has, at least the moves' z.

    A bit counts as 1/2 or -1/2, so that this noise has a multiplier of twice its size, and costs at most a quarter of
    what the round releases.
    """
    return max(expected / 20, noise_multiplier)


def independent_noise(seeds: Sequence[Seed], like: Params, multiplier: float) -> tuple[Params, int]:
    """Draw a round's noise from its own seed alone, the last one."""
    steps = steps_in(1.0, multiplier)
    return {
        name: gaussian_steps(seed_for(seeds[-1], name), leaf.shape, multiplier * steps).to(leaf.device)
        for name, leaf in like.items()
    }, steps


def noisy_mean(
    clip: float,
    noise_multiplier: float,
    *,
    counts_below: bool = False,
    noise: Noise = independent_noise,
    past: Sequence[Seed] = (),
) -> OnCohort:
    """A trusted party shows the server w + (sum_k d_k min(1, C / ||d_k||) + z C e) / m,  e ~ N(0, I), and nothing else.

    m is the expected size of a cohort, because the true size would say who took part. The server's steps get m uploads
    that are all the noisy mean, with sizes of 1, losses of 0 and the buffers of the sent model. An empty cohort is
    noise alone.

    counts_below: the noisy share of moves that are no longer than C is shown, too, in the slot "below". The two are one
    Gaussian release of multiplier z: the moves get a noise of z_d C with 1 / z_d^2 = 1 / z^2 - 1 / (2 s_b)^2.
    noise: draws e. past: the seeds of the method's rounds before this one, for noise that depends on theirs.
    """
    how = f"clip {clip!r}, noise {noise_multiplier!r}" + (", counts below" if counts_below else "")

    def seal(uploads: Uploads, start: Weights, seed: Seed, expected: int) -> Uploads:
        """a trusted party clips the moves and shows their mean with Gaussian noise, and nothing else"""
        moves, sigma, extra = clipped_moves(uploads, start, clip), noise_multiplier * clip, {}
        if counts_below:
            beside = bit_noise(noise_multiplier, expected) if noise_multiplier else 0.0
            below = _hidden_count(norms_of(uploads, start) <= clip, beside, seed_for(seed, "bits", how))
            extra = {BELOW: torch.full((expected,), below / expected + 0.5, dtype=torch.float64)}
            sigma = clip / math.sqrt(noise_multiplier**-2 - (2 * beside) ** -2) if noise_multiplier else 0.0
        seeds = [seed_for(round_seed, "private mean", how) for round_seed in (*past, seed)]
        hidden = _hidden_sum(moves, start, clip, sigma, partial(noise, seeds))
        params: Params = {}
        for name, leaf in start.params.items():
            mean = leaf.double() + hidden[name] / expected
            params[name] = mean.to(leaf.dtype).expand(expected, *leaf.shape)
        numbers = uploads.size.new_ones(expected)
        buffers = {name: leaf.expand(expected, *leaf.shape) for name, leaf in start.buffers.items()}
        return Uploads(
            Weights(params, buffers),
            numbers,
            numbers.to(uploads.steps),
            numbers.to(uploads.travel),
            torch.zeros_like(numbers).to(uploads.loss),
            extra,
            None,
            torch.arange(expected),
        )

    return seal


def norms_of(uploads: Uploads, start: Weights) -> Tensor:
    """Return the norm (C,) of each client's move over all parameters, in float64; NaN where it is not finite."""
    params = uploads.weights.params
    squares = [  # not reshape(C, -1): where a cohort is empty it knows no width
        (leaf.double() - start.params[name].double()).reshape(len(leaf), start.params[name].numel()).square().sum(1)
        for name, leaf in params.items()
    ]
    return torch.stack(squares).sum(0).sqrt()


def _hidden_count(bits: Tensor, sigma: float, seed: Seed) -> float:
    """Return the sum of 1/2 for each true bit and -1/2 for each other one, with Gaussian noise, in whole steps."""
    total = int(bits.sum()) - 0.5 * len(bits)
    if not sigma:
        return total
    steps = steps_in(0.5, sigma)
    return (int(2 * total) * steps + int(gaussian_steps(seed, (), 2 * sigma * steps))) / (2 * steps)


def clipped_moves(uploads: Uploads, start: Weights, clip: float) -> Iterator[Params]:
    """Yield each client's move in float64, with a norm of at most `clip` over all parameters; 0 if it is not finite."""
    for position in range(len(uploads.ids)):
        sent = rows(uploads.weights.params, position)
        move = {name: leaf.double() - start.params[name].double() for name, leaf in sent.items()}
        norm = math.sqrt(float(torch.stack([leaf.square().sum() for leaf in move.values()]).sum()))
        if not math.isfinite(norm):
            move = {name: torch.zeros_like(leaf) for name, leaf in move.items()}
        elif norm > clip:
            move = {name: leaf * (clip / norm) for name, leaf in move.items()}
        yield move


def _hidden_sum(
    moves: Iterable[Params],
    start: Weights,
    clip: float,
    sigma: float,
    noise: Callable[[Params, float], tuple[Params, int]],
) -> Params:
    """Return the sum of clipped moves with Gaussian noise, added in whole steps of the bound."""
    if not sigma:
        total = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in start.params.items()}
        for move in moves:
            total = {name: leaf + move[name] for name, leaf in total.items()}
        return total
    whole, steps = noise(start.params, sigma / clip)
    for move in moves:
        counted = in_whole_steps(move, clip, steps)
        whole = {name: leaf + counted[name] for name, leaf in whole.items()}
    return {name: leaf.double() * (clip / steps) for name, leaf in whole.items()}


def _hidden(move: Params, clip: float, sigma: float, seed: Seed) -> Params:
    """Return one client's clipped move with its noise."""
    return _hidden_sum([move], Weights(move, {}), clip, sigma, partial(independent_noise, [seed]))


def clip_and_noise(sigma: float, clip: float | None = None) -> PerClient | None:
    """Each client sends w + d_k min(1, clip / ||d_k||) + sigma e_k,  d_k = w_k - w,  e_k ~ N(0, I), of its parameters.

    The norm is over all parameters of the client; without `clip` the move stays as it is. Buffers (BatchNorm
    statistics), sizes, losses and further uploads (SCAFFOLD's control) are not touched. e_k is a pure function of seed,
    client and tensor name, so the cohort's order does not change it. It is drawn on the device of the uploads, and a
    GPU draws other numbers than a CPU.
    """
    if sigma == 0 and clip is None:
        return None

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
    """Return the models with moves of a norm of at most `bound`; a shorter move keeps every bit of its model."""
    moves = {name: leaf - start[name] for name, leaf in params.items()}
    squares = [move.reshape(len(move), -1).double().square().sum(1) for move in moves.values()]
    norm = torch.stack(squares).sum(0).sqrt()  # (C,)
    factor = (bound / norm).clamp_max(1.0)  # NaN stays NaN: the guard shall see a broken upload

    def shortened(name: str, leaf: Tensor) -> Tensor:
        share = factor.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))
        return torch.where(share == 1.0, leaf, start[name] + share * moves[name])

    return {name: shortened(name, leaf) for name, leaf in params.items()}


def _noise_like(stacked: Tensor, name: str, seed: Seed, ids: np.ndarray) -> Tensor:
    """Draw N(0, 1) of the shape (C, ...), from one stream for each client and tensor.

    Torch's threads share the clients, because a number takes 3.5 ns on one CPU thread (10 uploads of VGG8: 0.16 s).
    """
    seeds = [seed_for(seed, "noise", name, client) for client in ids.tolist()]
    drawn = torch.empty(stacked.shape, dtype=torch.float32, device=stacked.device)
    threads = 1 if stacked.is_cuda else torch.get_num_threads()

    def draw(first: int) -> None:
        for place in range(first, len(seeds), threads):
            generator = torch_generator(seeds[place], stacked.device)
            torch.randn(stacked.shape[1:], generator=generator, device=stacked.device, out=drawn[place])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw, range(threads)))
    return drawn.to(stacked)
