"""The statement of a run against dp-accounting, called here directly and independently, on 30 configurations."""

import itertools
import json
import math
import sys
from decimal import Decimal, getcontext

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant
from quick import quick_if

from fedstill.core.errors import FedstillError
from fedstill.core.types import Release
from fedstill.methods import dp_fedavg
from fedstill.privacy import accountant as accountant_module
from fedstill.privacy.accountant import (
    SMALLEST_DELTA,
    Event,
    analytic_gaussian_multiplier,
    classic_multiplier,
    delta_of,
    epsilon_after,
    epsilon_of,
)
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import Stretch, statement

DELTA = 1e-5
ALL = ("model", "buffers", "numbers")
LEAVES = {"model": "models", "numbers": "numbers"}
REPLACE = dp.NeighboringRelation.REPLACE_ONE

# noise multiplier (sigma / clip), rounds, probability of a client
CENTRAL = list(itertools.product((0.8, 2.0, 6.0), (1, 40), (1.0, 0.2, 0.02)))
# noise multiplier, rounds, multiplier of a release of single samples before the first round (0: none)
MIXED = list(itertools.product((2.0, 6.0), (1, 25), (0.0, 1.0, 5.0)))


def updates(noise: float, against: str = "public", **changes) -> Release:
    fields = {"what": "model updates", "unit": "client", "multiplier": noise / 2, "when": "round", "covers": ALL}
    return Release(**{**fields, "against": against, **changes})


def directly(*events: tuple[dp.DpEvent, int], grid: float = 5e-4) -> float:
    """Wider bins than by default: five times as fast, and within 0.1 % here."""
    accountant = PLDAccountant(REPLACE, value_discretization_interval=grid)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(DELTA)


def every_fourth(configurations):
    """Each fourth configuration runs in the quick run."""
    return quick_if(lambda case: configurations.index(case) % 4 == 0, configurations)


def test_there_are_thirty_configurations():
    assert len(CENTRAL) + len(MIXED) == 30


@pytest.mark.parametrize(("noise", "rounds", "probability"), every_fourth(CENTRAL))
def test_a_trusted_server_with_poisson_sampling_costs_what_dp_accounting_says(noise, rounds, probability):
    """Their noise is in units of one contribution's bound, and REPLACE_ONE knows that it may turn around."""
    made = statement([Stretch((updates(noise),), rounds, LEAVES, sealed=True, probability=probability)], DELTA)
    event = dp.GaussianDpEvent(noise)
    event = event if probability == 1 else dp.PoissonSampledDpEvent(probability, event)
    wanted = directly((event, rounds), grid=2e-3 if noise < 1 else 5e-4)
    for unit in ("client", "sample"):
        assert made.claim(unit, "public").epsilon == pytest.approx(wanted, rel=0.01)
        assert made.claim(unit, "public").complete
        assert made.claim(unit, "server") is None


@pytest.mark.parametrize(("noise", "rounds", "once"), every_fourth(MIXED))
def test_noise_by_clients_and_scores_before_the_first_round_compose_for_samples_and_not_for_clients(
    noise, rounds, once
):
    scores = Release("scores", "sample", once, when="once", against="server")
    releases = (updates(noise, "server"), *([scores] if once else []))
    made = statement([Stretch(releases, rounds, LEAVES, probability=0.1)], DELTA)
    moves = (dp.GaussianDpEvent(noise), rounds)
    both = directly(moves, *([(dp.GaussianDpEvent(2 * once), 1)] if once else []))
    for against in ("server", "public"):
        for_clients = made.claim("client", against)
        assert (for_clients is None) == bool(once)  # scores that hide samples alone steer the rounds
        assert for_clients is None or for_clients.epsilon == pytest.approx(directly(moves), rel=0.01)
        assert made.claim("sample", against).epsilon == pytest.approx(both, rel=0.01)
        assert made.claim("sample", against).complete


def test_poisson_sampling_of_a_plain_gaussian_is_bounded_by_no_sampling_and_composes_with_other_releases():
    sampled, plain = Event(1.0, 20, 0.1), Event(1.0, 20)
    assert epsilon_after([sampled], DELTA) < epsilon_after([plain], DELTA) / 5
    wanted = directly((dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0)), 20), (dp.GaussianDpEvent(3.0), 2))
    assert epsilon_after([sampled, Event(1.5, 2)], DELTA) == pytest.approx(wanted, rel=0.01)


def test_gaussians_compose_exactly():
    """Multipliers 3 and 4 act as one of (1/9 + 1/16)^(-1/2) = 2.4; nine of 3 act as one of 1."""
    assert epsilon_after([Event(3.0), Event(4.0)], DELTA) == pytest.approx(epsilon_after([Event(2.4)], DELTA), rel=1e-9)
    assert epsilon_after([Event(3.0, 9)], DELTA) == pytest.approx(epsilon_after([Event(1.0)], DELTA), rel=1e-9)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert epsilon_after([], DELTA) == epsilon_after([Event(1.0, 0)], DELTA) == 0.0
    assert epsilon_after([Event(0.0)], DELTA) == math.inf


def test_without_dp_accounting_plain_releases_are_counted_and_sampled_ones_name_the_extra(monkeypatch):
    accountant_module._epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert epsilon_after([Event(2.0, 10)], DELTA) > 0
    with pytest.raises(FedstillError, match=r"pip install -U fedstill\[dp\]"):
        epsilon_after([Event(2.0, 10, 0.1)], DELTA)


@pytest.mark.parametrize(
    "change", [{"against": "server"}, {"unit": "sample"}], ids=["noise by clients", "a unit that is not drawn"]
)
def test_only_a_client_level_release_by_a_trusted_server_is_amplified(change):
    release = updates(2.0, **change)
    made = statement([Stretch((release,), 10, LEAVES, sealed=True, probability=0.1)], DELTA)
    assert made.claim("sample", "public").epsilon == pytest.approx(epsilon_after([Event(1.0, 10)], DELTA))


def test_a_client_pays_for_the_rounds_that_it_was_drawn_for():
    made = statement([Stretch((updates(2.0),), 10, LEAVES, sealed=True, visits=4)], DELTA)
    assert made.claim("client", "public").epsilon == pytest.approx(epsilon_after([Event(1.0, 4)], DELTA))
    assert any("at most 4 of 10 rounds" in line for line in made.assumptions)


# The Gaussian mechanism against its defining equation, worked out in 90 digits, and against known values.

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


# Noise and deltas at the ends of what float64 and dp-accounting can hold.

ONLY_MODELS = {"model": "trained models"}


def models_and_numbers(multiplier: float) -> Release:
    return Release("model updates", "client", multiplier, "round", "public", covers=("model", "numbers"))


def sampled(multiplier: float, delta: float, **facts):
    stretch = Stretch((models_and_numbers(multiplier),), 6, ONLY_MODELS, sealed=True, probability=0.5, **facts)
    return statement([stretch], delta)


@pytest.mark.parametrize("probability", [1.0, 0.5])
@pytest.mark.parametrize("multiplier", [1e-308, 1e-200, 1e-160])
def test_noise_that_is_as_good_as_none_has_no_epsilon(multiplier, probability):
    """Squares of it are 0: it divided by zero."""
    assert epsilon_after([Event(multiplier, 6, probability)], DELTA) == math.inf


@pytest.mark.parametrize("probability", [1.0, 0.5])
@pytest.mark.parametrize("multiplier", [1e7, 1e160, 1e200, 1e308, math.inf])
def test_noise_beyond_all_measure_costs_nothing(multiplier, probability):
    """Squares of it overflow. The total variation is below delta, so 0 is the truth."""
    assert epsilon_after([Event(multiplier, 6, probability)], DELTA) == 0.0
    both = [Event(multiplier, 6, probability), Event(2.0)]
    assert epsilon_after(both, DELTA) == pytest.approx(epsilon_of(DELTA, 2.0), rel=1e-3)


@pytest.mark.parametrize("multiplier", [1e-100, 1e-20, 5e-7])
def test_a_sampled_release_that_is_too_loud_for_dp_accounting_costs_what_it_costs_without_sampling(multiplier):
    """Of six, epsilon is 6 / (2 s^2) and a little more. Its losses overflowed."""
    found = epsilon_after([Event(multiplier, 6, 0.5)], DELTA)
    assert found <= epsilon_after([Event(multiplier, 6)], DELTA)
    assert 0.1 < found / (3 / multiplier**2) < 1.01


def test_no_noise_at_all_is_no_number_either():
    assert epsilon_after([Event(math.nan)], DELTA) == math.inf


def test_epsilon_of_hardly_any_noise_is_infinite_and_not_a_crash():
    """1 / (2 s^2) = 5e319 is no float64; of s = 1e-150 it is 5e299."""
    assert epsilon_of(DELTA, 1e-160) == math.inf
    assert epsilon_of(DELTA, 1e-150) == pytest.approx(5e299)
    assert delta_of(0.0, 1e-308) == 1.0


def test_sampling_never_costs_more_than_none():
    for events in ([Event(0.3, 4, 0.999)], [Event(5.0, 50, 0.9), Event(3.0)]):
        plain = [Event(one.multiplier, one.count) for one in events]
        assert epsilon_after(events, DELTA) <= epsilon_after(plain, DELTA)


@pytest.mark.parametrize("delta", [1e-11, 1e-15, 1e-30, 1e-300])
def test_a_delta_that_dp_accounting_does_not_resolve_is_counted_without_sampling_and_says_so(delta):
    """It said inf; at 1e-14, of 10,000 rounds, 0.3 % less than the truth."""
    made = sampled(2.0, delta, visits=4)
    assert made.claim("client", "public").epsilon == pytest.approx(epsilon_of(delta, 1.0))  # of four rounds, not six
    note = f"dp-accounting does not resolve delta = {delta:g} (only from 1e-10 on): the effect of Poisson sampling is"
    assert note in made.text()
    assert not any("its own coin" in line for line in made.assumptions)
    assert any("at most 4 of 6 rounds" in line for line in made.assumptions)
    assert epsilon_after([Event(2.0, 4, 0.5)], delta) == pytest.approx(epsilon_of(delta, 1.0))


def test_a_delta_that_it_resolves_needs_no_note_nor_does_one_without_sampling():
    assert sampled(2.0, SMALLEST_DELTA).notes == ()
    assert sampled(2.0, SMALLEST_DELTA).claim("client", "public").epsilon < epsilon_of(SMALLEST_DELTA, 1.0)
    assert statement([Stretch((models_and_numbers(2.0),), 6, ONLY_MODELS, sealed=True)], 1e-30).notes == ()


def test_a_delta_that_proves_nothing_is_refused():
    with pytest.raises(FedstillError, match=r"privacy.delta = 0.2: to publish one client of 5 outright .* at most 0.1"):
        Privacy(delta=0.2)
    assert Privacy(delta=0.1).delta == 0.1


def test_every_claim_says_how_large_a_delta_may_be():
    assert any("far below 1 / (number of clients" in line for line in sampled(2.0, 0.1).assumptions)


def test_an_epsilon_that_is_infinite_is_no_number_in_json():
    made = statement([Stretch((models_and_numbers(1e-200),), 1, ONLY_MODELS, sealed=True)], DELTA)
    data = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert [one["epsilon"] for one in data["claims"]] == [None, None]
    assert "epsilon = inf" in data["text"]


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e6])
def test_the_ends_of_the_range_are_allowed(noise):
    (release,) = dp_fedavg(noise_multiplier=noise).releases
    assert release.multiplier == (noise / 2 or None)
    for probability in (1.0, 0.5):
        assert math.isfinite(epsilon_after([Event(release.multiplier or 1.0, 1000, probability)], DELTA))
