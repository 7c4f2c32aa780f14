"""Mechanisms that keep their promise pass the audit, others fail it: FedAUX's released calibration among them.

The worst pair of neighbours: a client's one sample that no other sample speaks about. All others lie on the first axis,
so w is long along it; this one stands on the wrong side, at (-c, s) in one dataset and at (-c, -s) in the other. Its
loss has a slope of nearly 1 in both, and the slopes point apart: the solution moves by most of the 2 / (lambda n) that
the theorem allows.
"""

import dataclasses
import math
import runpy

import numpy as np
import pytest
import torch
from doc_pages import ROOT

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Uploads, Weights
from fedstill.methods import fedaux
from fedstill.methods.fedaux import certainty
from fedstill.methods.fedaux.certainty import Scoring, client_answer, sensitivity
from fedstill.privacy.accountant import analytic_gaussian_multiplier, classic_multiplier
from fedstill.privacy.mechanisms import noisy_mean

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "privacy_audit.py"))
audit, allowed_advantage = EXAMPLE["audit"], EXAMPLE["allowed_advantage"]

DELTA = 1e-5


def gaussian(centre, multiplier: float, seed: int):
    """Draws around one of two points at distance 1."""
    noise = numpy_generator(seed_for(seed, "audit")).normal(size=(10_000, len(centre))) * multiplier
    return lambda i: np.asarray(centre) + noise[i]


def gaussians(multiplier: float):
    return gaussian([0.6, 0.8], multiplier, 1), gaussian([0.0, 0.0], multiplier, 2)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 8.0])
def test_the_analytic_gaussian_mechanism_passes(epsilon):
    found = audit(*gaussians(analytic_gaussian_multiplier(epsilon, DELTA)), epsilon, DELTA)
    assert found.holds
    assert 0 <= found.epsilon_at_least < epsilon
    assert found.advantage_at_least <= found.advantage < found.advantage_allowed


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_a_sixth_of_its_noise_fails(epsilon):
    found = audit(*gaussians(analytic_gaussian_multiplier(epsilon, DELTA) / 6), epsilon, DELTA)
    assert not found.holds
    assert found.epsilon_at_least > epsilon


def test_what_is_seen_of_two_gaussians_is_what_their_distance_says():
    """Advantage 2 Phi(1 / (2 s)) - 1; s = 0.5: 0.6826895."""
    found = audit(*gaussians(0.5), 8.0, DELTA)
    assert found.advantage == pytest.approx(0.6826895, abs=0.03)
    assert found.advantage_at_least == pytest.approx(
        found.advantage - 2 * math.sqrt(math.log(2000) / 10_000), abs=1e-12
    )


def test_the_same_distribution_shows_nothing():
    found = audit(gaussian([0.0], 1.0, 1), gaussian([0.0], 1.0, 2), 0.01, DELTA)
    assert found.epsilon_at_least == 0.0
    assert found.holds


def test_a_mechanism_without_noise_is_told_apart_for_certain():
    found = audit(lambda i: np.ones(1), lambda i: np.zeros(1), 3.0, DELTA)
    assert found.advantage == 1.0
    assert found.epsilon_at_least > 6.0  # 5000 of 5000 right: ln(5000 / 8.3)
    assert not found.holds


def test_the_allowed_advantage_is_that_of_randomised_response():
    """epsilon = ln 3: right three times in four, 0.75 - 0.25."""
    assert allowed_advantage(math.log(3.0), 0.0) == pytest.approx(0.5)


def test_a_few_draws_are_refused():
    with pytest.raises(FedstillError, match="use at least 100"):
        audit(lambda i: np.ones(1), lambda i: np.zeros(1), 1.0, DELTA, draws=10)


LAM, POINTS = 0.004, 500
NEGATIVES = torch.tensor([[-1.0, 0.0]], dtype=torch.float64).repeat(POINTS // 2, 1)
SIDE = math.sqrt(0.75)


def own(side: float) -> torch.Tensor:
    """Samples on the first axis, and the one that differs."""
    usual = torch.tensor([[1.0, 0.0]], dtype=torch.float64).repeat(POINTS // 2 - 1, 1)
    return torch.cat([usual, torch.tensor([[-0.5, side]], dtype=torch.float64)])


@pytest.fixture
def solved_once(monkeypatch):
    """The real solver, which depends on no noise, called once for each problem."""
    known, real = {}, certainty.fit_logistic

    def fit(points, sign, **how):
        key = (points.numpy().tobytes(), *how.values())
        if key not in known:
            known[key] = real(points, sign, **how)
        return known[key]

    monkeypatch.setattr(certainty, "fit_logistic", fit)


def released(side: float, scoring: Scoring, dataset: str):
    """What a client of FedAUX sends, solver and noise, as the server gets it."""
    rows, seeds = own(side), seed_for(0, dataset, np.arange(10_000)).tolist()
    return lambda i: client_answer(rows, NEGATIVES, scoring, seeds[i])["w"].double().numpy()


def audited(scoring: Scoring, epsilon: float):
    return audit(released(SIDE, scoring, "one"), released(-SIDE, scoring, "other"), epsilon, DELTA)


def scoring_of(form: str, lam: float, multiplier: float) -> Scoring:
    return Scoring(lam=lam, form=form, gamma="negatives", noise=multiplier)


def test_the_neighbours_are_nearly_as_far_apart_as_the_theorem_allows():
    exact = scoring_of("mean", LAM, 0.0)
    one, other = (client_answer(own(side), NEGATIVES, exact, 0)["w"] for side in (SIDE, -SIDE))
    assert 0.7 < float((one - other).norm()) / sensitivity(LAM, POINTS) <= 1.0


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [pytest.param(0.1, marks=slow), pytest.param(1.0, marks=slow), 8.0])
def test_fedaux_in_its_mean_form_keeps_its_promise(solved_once, epsilon):
    """The noise is the one that the method takes for this epsilon."""
    method = fedaux(form="mean", lam=LAM, epsilon=epsilon, delta=DELTA)
    multiplier = method.releases[0].multiplier
    assert multiplier == pytest.approx(analytic_gaussian_multiplier(epsilon, DELTA), rel=1e-3)
    found = audited(scoring_of("mean", LAM, multiplier), epsilon)
    assert found.holds
    if epsilon == 8.0:  # and the audit does see something
        assert found.epsilon_at_least > 1.0


@slow
def test_fedaux_with_a_tenth_of_its_noise_does_not(solved_once):
    assert not audited(scoring_of("mean", LAM, analytic_gaussian_multiplier(1.0, DELTA) / 10), 1.0).holds


@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.1, pytest.param(0.01, marks=slow)])
def test_the_released_calibration_fails_the_same_audit(solved_once, lam):
    """The sum of losses, solved, and the noise of the mean's 2 / (lambda n): epsilon = 0.1 is claimed."""
    found = audited(scoring_of("sum", lam, classic_multiplier(0.1, DELTA)), 0.1)
    assert not found.holds
    assert found.advantage > 4 * found.advantage_allowed
    assert found.epsilon_at_least > 10 * 0.1


@pytest.mark.parametrize("draws", [2000, pytest.param(10_000, marks=slow)])
def test_the_mean_of_clipped_moves_keeps_its_promise(draws):
    """dp_fedavg with a trusted server: one client's move turns around, at the bound, and the sum moves by 2 clip."""
    epsilon, clip = 4.0, 0.5
    noise = 2 * analytic_gaussian_multiplier(epsilon, DELTA)
    start, seal = Weights({"w": torch.zeros(2, dtype=torch.float64)}, {}), noisy_mean(clip, noise)
    ones = torch.ones(3, dtype=torch.float64)

    def draw(sign: float, dataset: str):
        moves = torch.tensor([[3.0, 4.0], [0.1, -0.2], [-30.0 * sign, 40.0 * sign]], dtype=torch.float64)
        uploads = Uploads(Weights({"w": moves}, {}), ones, ones, ones, ones, {}, None, torch.arange(3))
        return lambda i: seal(uploads, start, seed_for(3, dataset, i), 3).weights.params["w"][0].numpy()

    kept = audit(draw(1.0, "one"), draw(-1.0, "other"), epsilon, DELTA, draws=draws)
    assert kept.holds
    assert kept.advantage > 0.2
    loud = dataclasses.replace(kept, epsilon=0.2, advantage_allowed=allowed_advantage(0.2, DELTA))
    assert not loud.holds
