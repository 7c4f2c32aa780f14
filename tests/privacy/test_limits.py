"""Noise and deltas at the ends of what float64 and dp-accounting can hold."""

import json
import math

import pytest

from fedstill.core.errors import FedstillError
from fedstill.core.types import Release
from fedstill.methods import dp_fedavg
from fedstill.privacy import Event, Privacy, Stretch, delta_of, epsilon_after, epsilon_of, statement
from fedstill.privacy.accountant import SMALLEST_DELTA

DELTA = 1e-5
LEAVES = {"model": "trained models"}


def updates(multiplier: float) -> Release:
    return Release("model updates", "client", multiplier, "round", "public", covers=("model", "numbers"))


def sampled(multiplier: float, delta: float, **facts):
    stretch = Stretch((updates(multiplier),), 6, LEAVES, sealed=True, probability=0.5, **facts)
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
    note = f"dp-accounting does not resolve delta = {delta:g} (only from 1e-10 on): what Poisson sampling is worth is"
    assert note in made.text()
    assert not any("its own coin" in line for line in made.assumptions)
    assert any("at most 4 of 6 rounds" in line for line in made.assumptions)
    assert epsilon_after([Event(2.0, 4, 0.5)], delta) == pytest.approx(epsilon_of(delta, 1.0))


def test_a_delta_that_it_resolves_needs_no_note_nor_does_one_without_sampling():
    assert sampled(2.0, SMALLEST_DELTA).notes == ()
    assert sampled(2.0, SMALLEST_DELTA).claim("client", "public").epsilon < epsilon_of(SMALLEST_DELTA, 1.0)
    assert statement([Stretch((updates(2.0),), 6, LEAVES, sealed=True)], 1e-30).notes == ()


def test_a_delta_that_proves_nothing_is_refused():
    with pytest.raises(FedstillError, match=r"privacy.delta = 0.2: to publish one client of 5 outright .* at most 0.1"):
        Privacy(delta=0.2)
    assert Privacy(delta=0.1).delta == 0.1


def test_every_claim_says_how_large_a_delta_may_be():
    assert any("far below 1 / (number of clients" in line for line in sampled(2.0, 0.1).assumptions)


def test_an_epsilon_that_is_infinite_is_no_number_in_json():
    made = statement([Stretch((updates(1e-200),), 1, LEAVES, sealed=True)], DELTA)
    data = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert [one["epsilon"] for one in data["claims"]] == [None, None]
    assert "epsilon = inf" in data["text"]


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e6])
def test_the_ends_of_the_range_are_allowed(noise):
    (release,) = dp_fedavg(noise_multiplier=noise).releases
    assert release.multiplier == (noise / 2 or None)
    for probability in (1.0, 0.5):
        assert math.isfinite(epsilon_after([Event(release.multiplier or 1.0, 1000, probability)], DELTA))
