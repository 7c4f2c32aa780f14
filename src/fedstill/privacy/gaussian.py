"""The Gaussian mechanism, exactly: which epsilon and delta a noise multiplier buys (Balle & Wang 2018).

The multiplier s is the standard deviation of the noise over the L2 sensitivity of what is released.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import erfcx, ndtr

from fedstill.core.errors import FedstillError


def delta_of(epsilon: float, multiplier: float) -> float:
    """The smallest delta for which the mechanism is (epsilon, delta)-private.

        delta = Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s)

    Written with a = epsilon s - 1/(2s), b = epsilon s + 1/(2s): since epsilon = (b^2 - a^2) / 2, the second term is
    e^(-a^2/2) erfcx(b / sqrt 2) / 2, so that nothing overflows and small deltas keep their digits.
    """
    _check(epsilon=epsilon, multiplier=multiplier)
    shift, half = epsilon * multiplier, 0.5 / multiplier
    a, b = shift - half, shift + half
    tail = 0.5 * math.exp(-0.5 * a * a)
    if a >= 0:
        return float(tail * (erfcx(a / math.sqrt(2)) - erfcx(b / math.sqrt(2))))
    if epsilon == 0:
        return math.erf(half / math.sqrt(2))
    return float(ndtr(-a) - tail * erfcx(b / math.sqrt(2)))


def epsilon_of(delta: float, multiplier: float) -> float:
    """The smallest epsilon for which the mechanism is (epsilon, delta)-private: the inverse of `delta_of`."""
    _check(delta=delta, multiplier=multiplier)
    if delta_of(0.0, multiplier) <= delta:
        return 0.0
    return _smallest(lambda epsilon: delta_of(epsilon, multiplier) <= delta)


def analytic_gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least noise that is (epsilon, delta)-private, as a multiple of the L2 sensitivity. Exact for every epsilon.

    Reference: Balle & Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, Theorem 8.
    """
    _check(epsilon=epsilon, delta=delta)
    return _smallest(lambda multiplier: delta_of(epsilon, multiplier) <= delta)


def classic_multiplier(epsilon: float, delta: float) -> float:
    """sqrt(2 ln(1.25 / delta)) / epsilon: the textbook's bound, proven for epsilon up to 1 only, and never below ours.

    Reference: Dwork & Roth, "The algorithmic foundations of differential privacy", 2014, Theorem A.1.
    """
    _check(epsilon=epsilon, delta=delta)
    if not 0 < epsilon <= 1:
        raise FedstillError(
            f"the classic Gaussian bound holds for 0 < epsilon <= 1, and epsilon is {epsilon:g}: "
            "use analytic_gaussian_multiplier"
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def _smallest(enough: Callable[[float], bool]) -> float:
    """The least x > 0 for which `enough` holds, where it holds from some x on; rounded up, so that it does hold.

    Infinite where no number is large enough.
    """
    high = 1.0
    while not enough(high):
        high *= 2
        if math.isinf(high):
            return high
    low = high / 2
    while low > 1e-300 and enough(low):
        high, low = low, low / 2
    for _ in range(60):
        middle = 0.5 * (low + high)
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _check(epsilon: float = 1.0, delta: float = 0.5, multiplier: float = 1.0) -> None:
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise FedstillError(f"epsilon is {epsilon:g}: it must be a number of at least 0")
    if not 0 < delta < 1:
        raise FedstillError(f"delta is {delta:g}: it must lie between 0 and 1, e.g. 1e-5")
    if not (math.isfinite(multiplier) and multiplier > 0):
        raise FedstillError(f"the noise multiplier is {multiplier:g}: it must be above 0")
