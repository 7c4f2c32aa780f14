"""Noise that later rounds take back in part: a banded matrix factorisation, for a trusted server.

Independent noises n_1, n_2, ... add up in the model: after t rounds it holds t of them. Here they obey

    a_0 n_t + a_1 n_{t-1} + ... + a_{b-1} n_{t-b+1} = e_t,  fresh Gaussian noise,

so that a noise is followed by others that cancel most of it. In matrices A n = e, A lower triangular with b bands.

Privacy. What is shown, y_t = x_t + n_t, tells what A y = A x + e tells, because each can be computed from the other.
That is a Gaussian mechanism, also where x_t depends on what was shown before. A client that takes part in round t moves
rows t, ..., t + b - 1 of A x by a_0, ..., a_{b-1} times its move, together by |a| times its bound. e is |a| times as
large as independent noise, so that taking part once costs what it costs there. A client that comes again after b rounds
or more moves other rows, and its costs add up as ever. One that comes sooner moves some rows twice, and pays more:
`highest_price` counts it.

Whole numbers. a and x_t are whole, and e_t is a Gaussian rounded to whole numbers, so (A x)_t + e_t is an output of the
Gaussian mechanism, rounded. n_t is (e_t - a_1 n_{t-1} - ...) / a_0, rounded. For a whole x_t, x_t + round(v) is
round(x_t + v). So y_t follows from that output and from what was shown before, and from nothing else, exactly.

References: Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023 (bands, and participations at
    least b rounds apart); Denisov et al., Improved Differential Privacy for SGD via Optimal Private Linear Operators on
    Adaptive Streams, NeurIPS 2022, Theorem 2.1 (x may depend on what was shown); Kalinin and Lampert, Banded Square
    Root Matrix Factorization, NeurIPS 2024 (the numbers a).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from fedstill.core.seeds import seed_for
from fedstill.core.types import Params, Seed
from fedstill.privacy.noise import Noise, gaussian_steps, steps_in

SIXTEENTHS = 16  # a_0: finer numbers cost bits of the grid, and make the errors of 400 rounds less by 0.4 % at most


def banded_root(bands: int) -> tuple[int, ...]:
    """Return a: the first numbers of the root of the matrix that adds up rounds, 1, 1/2, 3/8, 5/16, in sixteenths.

    They are without a common divisor. They never rise, and fall at once, so that the noises do not grow with the rounds
    (the theorem of Enestroem and Kakeya).
    """
    numbers = [round(SIXTEENTHS * math.comb(2 * lag, lag) / 4**lag) for lag in range(bands)]
    return tuple(number // math.gcd(*numbers) for number in numbers)


def highest_price(cohorts: Sequence[np.ndarray], population: int, factor: Sequence[int]) -> float:
    """Return what the client pays that pays most, in releases with independent noise: |A u|^2 / |a|^2.

    cohorts: the ids of each round. u_t = 1 in the rounds in which the client takes part. Its moves may turn in any
    direction, and nothing moves A x further than equal ones do, because a has no negative numbers.
    """
    paid = np.zeros(population, np.int64)
    for number, ids in enumerate(cohorts):
        rows = factor[: len(cohorts) - number]  # those that are shown of what this round moves
        for lag, earlier in enumerate(reversed(cohorts[max(0, number + 1 - len(factor)) : number + 1])):
            both = np.intersect1d(ids, earlier, assume_unique=True)
            overlap = sum(a * b for a, b in zip(rows, factor[lag:], strict=False))
            paid[both] += overlap if lag == 0 else 2 * overlap
    return int(paid.max()) / sum(number * number for number in factor)


def correlated_noise(factor: Sequence[int]) -> Noise:
    """Return the noise whose rounds obey A n = e. It is a pure function of the rounds' seeds.

    The noise of a round follows from all rounds before it. The last ones stay in memory, 8 bytes a parameter for each
    band but the first, and nowhere else, because a checkpoint would give them away. A resumed run draws them again.
    """
    size = math.sqrt(sum(number * number for number in factor))
    kept: tuple[object, tuple[Params, ...]] = (None, ())

    def noise(seeds: Sequence[Seed], like: Params, multiplier: float) -> tuple[Params, int]:
        nonlocal kept
        steps = steps_in(1.0, size * multiplier)
        form = multiplier, [(name, leaf.shape) for name, leaf in like.items()]
        known, recent = kept
        begun = next((number for number in range(len(seeds), 0, -1) if known == (seeds[number - 1], form)), 0)
        recent = recent if begun else ()
        for seed in seeds[begun:]:
            drawn: Params = {}
            for name, leaf in like.items():
                rest = gaussian_steps(seed_for(seed, "band", *factor, name), leaf.shape, size * multiplier * steps)
                for number, before in zip(factor[1:], recent, strict=False):
                    rest -= number * before[name]
                drawn[name] = torch.div(rest + factor[0] // 2, factor[0], rounding_mode="floor")
            recent = (drawn, *recent)[: len(factor) - 1]
        kept = (seeds[-1], form), recent
        return {name: leaf.to(like[name].device) for name, leaf in recent[0].items()}, steps

    return noise
