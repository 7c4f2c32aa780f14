"""Gaussian noise in whole steps, drawn exactly, because floating point gives a value away by its last bits.

A float64 drawn as usual reaches some numbers and leaves out others, and which ones depends on the value that it hides
(Mironov, CCS 2012). So a value is rounded to whole steps before it gets noise, the noise is a Gaussian that is rounded
to whole steps, and their sum is one of whole numbers, without any rounding. For a whole x, x + round(s e) is
round(x + s e): it is made of the Gaussian mechanism's output alone, and the accountant's epsilon holds as it is.

A draw is exact, too. 64 bits say where it stands among all draws, and so in which step. Where a step's border is closer
than float64 is sure of, 192 more bits and numbers of 120 digits decide: about four draws in a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, localcontext

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import private_bits, seed_for
from fedstill.core.types import Params, Seed

# (seeds of a method's rounds until now, the parameters, noise in units of the bound) -> this round's noise in whole
# steps, and how many steps the bound has
Noise = Callable[[Sequence[Seed], Params, float], tuple[Params, int]]

FINEST = 2**24  # steps in the bound of a value: a step is as fine as float32 beside it, and squares fit into 64 bits
MOST_STEPS = 2**30  # in a standard deviation of the noise: of a finer grid too many draws would need the digits
SURE = 2.0**-46  # relative error of scipy's ndtri and what follows it; its authors measured 2^-50
MORE_BITS = 192
AT_ONCE = 2**20  # draws, because a draw takes 60 bytes on its way
DIGITS = 120
DENSITY = Decimal(  # 1 / sqrt(2 pi)
    "0.3989422804014326779399460599343818684758586311649346576659258296706579258993018385012523339073069364303"
    "02558862635182685510991954556"
)


def steps_in(bound: float, sigma: float) -> int:
    """Return how many steps a bound has, a power of two: as many as FINEST, fewer under very loud noise."""
    louder = max(0, math.ceil(math.log2(max(sigma / bound, 1e-300) * FINEST / MOST_STEPS)))
    return FINEST >> min(louder, 20)


def gaussian_steps(seed: Seed, shape: Sequence[int], sigma: float) -> Tensor:
    """Draw round(sigma e), e ~ N(0, 1), in int64: a pure function of the seed, the same on every machine."""
    count = math.prod(shape)
    drawn = np.empty(count, np.int64)
    for first in range(0, count, AT_ONCE):
        drawn[first : first + AT_ONCE] = _rounded(seed_for(seed, "from", first), min(AT_ONCE, count - first), sigma)
    return torch.from_numpy(drawn).reshape(tuple(shape))


def in_whole_steps(move: Params, bound: float, steps: int) -> Params:
    """Return a move of a norm of at most `bound` in whole steps (int64), towards 0, so that its norm is no larger.

    The norm is checked in whole numbers, because the one in floating point is rounded.
    """
    scale = steps / bound
    while True:
        whole = {name: (leaf.double() * scale).trunc().to(torch.int64) for name, leaf in move.items()}
        if sum(int(leaf.square().sum()) for leaf in whole.values()) <= steps * steps:
            return whole
        scale *= 1 - 2.0**-40


def _rounded(seed: Seed, count: int, sigma: float) -> np.ndarray:
    """u = P(e <= -|e|) is between t / 2^64 and (t + 1) / 2^64, t of 63 bits; the last bit is the sign."""
    from scipy.special import ndtri  # here, because most runs have no noise

    bits = private_bits(seed, count)
    place = bits >> np.uint64(1)
    tail = (place.astype(np.float64) + 0.5) * 2.0**-64
    size = -ndtri(np.minimum(tail, 0.5))
    position = size * sigma + 0.5
    steps = np.floor(position)
    # the density at e is at least 0.79 u, so that an interval of 2^-64 in u is at most so wide in e
    slack = sigma * (SURE * (1 + size) + 2.0**-64 / (0.79 * tail))
    above = position - steps
    unsure = (above < slack) | (above > 1 - slack) | (place < np.uint64(2**20))
    for index in np.flatnonzero(unsure).tolist():
        more = private_bits(seed_for(seed, "more bits", index), MORE_BITS // 64)
        whole = int.from_bytes(int(place[index]).to_bytes(8, "big") + more.tobytes(), "big")
        steps[index] = _exact(whole, sigma, int(steps[index]))
    signed: np.ndarray = np.where(bits & np.uint64(1), -steps, steps).astype(np.int64)
    return signed


def _exact(place: int, sigma: float, guess: int) -> int:
    """Return the step of the draw at u = place / 2^256: the smallest k with P(e <= -(k + 1/2) / sigma) < u."""
    with localcontext(Context(prec=DIGITS)):
        u, unit = Decimal(place) / Decimal(2 ** (64 + MORE_BITS)), Decimal(sigma)

        def reached(step: int) -> bool:
            return lower_tail((step + Decimal("0.5")) / unit) < u

        low, high = guess - 2, guess + 1  # not reached, reached
        if low >= 0 and reached(low):
            low = -1
        while not reached(high):
            low, high = high, 2 * high + 1
        low = max(low, -1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high


def lower_tail(size: Decimal) -> Decimal:
    """Return P(e <= -size) for a size of at least 0, to about 100 digits: 1/2 - phi(x) (x + x^3/3 + x^5/15 + ...)."""
    with localcontext(Context(prec=DIGITS)):
        term = total = size
        odd, square = 1, size * size
        while term > total.scaleb(-DIGITS):
            odd += 2
            term = term * square / odd
            total += term
        return Decimal("0.5") - DENSITY * (-square / 2).exp() * total
