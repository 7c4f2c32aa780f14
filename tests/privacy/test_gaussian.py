"""The Gaussian mechanism against its defining equation, worked out in 90 digits, and against known values."""

import math
from decimal import Decimal, getcontext

import pytest

from fedstill.core.errors import FedstillError
from fedstill.privacy import analytic_gaussian_multiplier, classic_multiplier, delta_of, epsilon_of

EPSILONS = (1e-3, 0.01, 0.1, 1.0, 8.0, 30.0, 100.0)
DELTAS = (1e-2, 1e-5, 1e-9, 1e-12)


def normal_cdf(x: Decimal) -> Decimal:
    """Phi by the series of its density, in 80 digits: sum_n x^(2n+1) / (1 3 5 ... (2n+1))."""
    term, total, n = x, x, 0
    while abs(term) > Decimal(10) ** -75:
        n += 1
        term = term * x * x / (2 * n + 1)
        total += term
    root = (2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862")).sqrt()
    return Decimal("0.5") + total * (-x * x / 2).exp() / root


def delta_by_definition(epsilon: float, multiplier: float) -> float:
    """Balle & Wang, Theorem 8: Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s)."""
    getcontext().prec = 90
    e, s = Decimal(epsilon), Decimal(multiplier)
    return float(normal_cdf(1 / (2 * s) - e * s) - e.exp() * normal_cdf(-1 / (2 * s) - e * s))


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_multiplier_solves_the_defining_equation(epsilon, delta):
    multiplier = analytic_gaussian_multiplier(epsilon, delta)
    assert delta_by_definition(epsilon, multiplier) == pytest.approx(delta, rel=1e-6)
    assert delta_of(epsilon, multiplier) <= delta
    assert epsilon_of(delta, multiplier) == pytest.approx(epsilon, rel=1e-8)


@pytest.mark.parametrize("multiplier", [0.05, 0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.5, 3.0])
def test_delta_is_that_of_the_definition_whether_the_noise_is_low_or_high(epsilon, multiplier):
    wanted = delta_by_definition(epsilon, multiplier)
    assert delta_of(epsilon, multiplier) == pytest.approx(wanted, rel=1e-9, abs=1e-50)


def test_at_epsilon_zero_delta_is_the_total_variation_of_two_gaussians():
    """s = 1: Phi(1/2) - Phi(-1/2) = 0.3829249225480."""
    assert delta_of(0.0, 1.0) == pytest.approx(0.3829249225480, abs=1e-12)
    assert epsilon_of(0.4, 1.0) == 0.0


def test_known_values():
    """By hand: s = 1, epsilon = 1: Phi(-1/2) - e Phi(-3/2) = 0.3085375387 - 2.7182818285 * 0.0668072013."""
    assert delta_of(1.0, 1.0) == pytest.approx(0.3085375387 - 2.7182818285 * 0.0668072013, abs=1e-9)
    assert analytic_gaussian_multiplier(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-4)  # Balle & Wang's own code


def test_more_noise_and_a_larger_epsilon_never_make_delta_larger():
    deltas = [delta_of(1.0, 0.1 * 1.1**i) for i in range(60)]
    assert deltas == sorted(deltas, reverse=True)
    deltas = [delta_of(0.1 * 1.1**i, 0.8) for i in range(60)]
    assert deltas == sorted(deltas, reverse=True)


def test_the_classic_bound_is_that_of_the_fedaux_card_and_asks_for_more_noise_than_ours():
    """T6.2: n = 22,500, lambda = 0.1, epsilon = 0.1, delta = 1e-5: sensitivity 8.88889e-4, sigma = 0.0430649."""
    assert classic_multiplier(0.1, 1e-5) * 2 / (0.1 * 22_500) == pytest.approx(0.0430649, abs=5e-8)
    assert classic_multiplier(0.04, 1e-6) * 2 / (0.01 * 21_250) == pytest.approx(1.2467771, abs=5e-8)
    for epsilon in (0.1, 0.5, 1.0):
        assert classic_multiplier(epsilon, 1e-5) > analytic_gaussian_multiplier(epsilon, 1e-5)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: classic_multiplier(2.0, 1e-5), "the classic Gaussian bound holds for 0 < epsilon <= 1"),
        (lambda: analytic_gaussian_multiplier(-1.0, 1e-5), "epsilon is -1"),
        (lambda: analytic_gaussian_multiplier(math.nan, 1e-5), "epsilon is nan"),
        (lambda: epsilon_of(0.0, 1.0), "delta is 0"),
        (lambda: delta_of(1.0, 0.0), "the noise multiplier is 0"),
    ],
)
def test_what_has_no_meaning_is_one_line(call, told):
    with pytest.raises(FedstillError, match="^" + told.replace("(", r"\(")):
        call()
