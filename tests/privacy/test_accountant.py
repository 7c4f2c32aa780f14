"""The statement of a run against dp-accounting, called here directly and independently, on 30 configurations."""

import itertools
import math
import sys

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant

from fedstill.core.errors import FedstillError
from fedstill.core.types import Release
from fedstill.privacy import Event, Stretch, epsilon_after, statement
from fedstill.privacy import accountant as accountant_module

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


def test_there_are_thirty_configurations():
    assert len(CENTRAL) + len(MIXED) == 30


@pytest.mark.parametrize(("noise", "rounds", "probability"), CENTRAL)
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


@pytest.mark.parametrize(("noise", "rounds", "once"), MIXED)
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
    with pytest.raises(FedstillError, match=r"pip install fedstill\[dp\]"):
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
