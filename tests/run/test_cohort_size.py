"""How many clients a round draws: a number, or a share of the population."""

from __future__ import annotations

import math

import pytest

from fedstill.core.cohort import cohort_size
from fedstill.core.errors import FedstillError


@pytest.mark.parametrize(
    ("cohort", "population", "size"),
    [(0.1, 100, 10), (0.001, 100, 1), (0.25, 10, 2), (1, 10, 1), (10, 10, 10), (7.0, 10, 7)],
)
def test_a_fraction_is_a_share_of_the_population(cohort, population, size):
    assert cohort_size(cohort, population) == size


@pytest.mark.parametrize("cohort", [0, -1, 11, 2.5, 0.0, 1.0, math.nan, math.inf])
def test_an_impossible_cohort_is_one_line(cohort):
    with pytest.raises(FedstillError, match=f"cohort = {cohort}"):
        cohort_size(cohort, 10)
