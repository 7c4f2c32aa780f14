"""A small part of the attacks on private runs; `python benchmarks/storm/privacy.py` plays all of them."""

import math

import numpy as np
import pytest
from storm.privacy import (
    CANARIES,
    CASES,
    CHANGES,
    DELTA,
    audited,
    cancelling_pairs,
    linear_model,
    one_run,
    replay_attack,
)

from fedstill.privacy.accountant import analytic_gaussian_multiplier


@pytest.mark.slow
def test_a_replay_is_right_about_a_public_seed_and_guesses_about_a_secret():
    """Of 24 fair coins 22 or more fall as they are called once in 50,000 runs; epsilon = 0.19 allows hardly more."""
    assert replay_attack(24, seed=5, reproducible=True)["right"] == 24
    guesses = replay_attack(24, seed=5, reproducible=False)
    assert guesses["right"] < 22
    assert guesses["by"] == {"the direction of the first move": 24}  # no digest and no number of the folder tells


@pytest.mark.slow
def test_no_pair_of_settings_shares_noise():
    """One pair for each setting that may change, and some that differ in several."""
    assert cancelling_pairs(len(CHANGES) + 4, seed=5, reproducible=True)["alike"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_audit_of_whole_runs_shows_some_of_the_claim_and_never_more(case):
    """Each call has other noise, and so another share: with 2,000 trials it was once 0.06."""
    audit = audited(case, 2000, seed=5)
    assert 0.02 < audit["share"] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "bands" in case.options], ids=lambda case: case.name)
def test_the_best_statistic_of_noise_in_bands_sees_what_the_accountant_counts(case):
    """By 1 / the multiplier of the claim, +- 3 %; who counted visits alone would expect 22 % less in the first case."""
    model, draw, by_label = linear_model(), np.random.Generator(np.random.PCG64(5)), {0: [], 1: []}
    for _ in range(150):
        labels = draw.integers(0, 2, CANARIES)
        seen, epsilon = one_run(case, labels, model)
        for label, outcomes in by_label.items():
            outcomes += seen[labels == label].tolist()
    spread = math.sqrt((np.var(by_label[0]) + np.var(by_label[1])) / 2)
    apart = abs(np.mean(by_label[0]) - np.mean(by_label[1])) / spread
    assert apart == pytest.approx(1 / analytic_gaussian_multiplier(epsilon, DELTA), rel=0.15)
