"""The convex problem of the certainty scores: worked numbers (T6.1 of the cards), and gradients taken by NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import expit

from fedstill.methods.fedaux.certainty import AIM, SOLVER_SLACK, Problem, _descend, fit_logistic

PAIR, SIGN = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([1.0, -1.0])
LN3 = math.log(3)


def sample(seed, count=60, features=7, scale=1.0):
    """Two overlapping clouds in the unit ball."""
    generator = np.random.default_rng(seed)
    sign = np.where(generator.random(count) < 0.3, 1.0, -1.0)
    sign[:2] = (1.0, -1.0)
    x = generator.normal(size=(count, features)) + 0.7 * sign[:, None]
    x *= scale / np.linalg.norm(x, axis=1).max()
    return torch.from_numpy(x), torch.from_numpy(sign)


def gradient_by_numpy(x, sign, w, b, lam, form):
    """Of the objective as the paper prints it (with the right sign), sample by sample."""
    x, sign, w = x.numpy(), sign.numpy(), w.numpy()
    scale = 1 / len(x) if form == "mean" else 1.0
    total, last = lam * w, 0.0
    for row, t in zip(x, sign, strict=True):
        slope = -t * expit(-t * (row @ w + b))
        total, last = total + scale * slope * row, last + scale * slope
    return total, last


@pytest.mark.parametrize(
    ("lam", "w", "score"),
    [
        (1 / (4 * LN3), 1.0986123, 0.75),
        (0.1, 1.6335062, 0.8366494),
        (0.01, 3.3592750, 0.9664072),
        (1.0, 0.4010581, 0.5989419),
    ],
)
def test_two_points_are_parted_as_worked_out_by_hand(lam, w, score):
    """T6.1: w = sigma(-w) / lam, since both points pull alike."""
    found = fit_logistic(PAIR, SIGN, lam=lam).w
    assert found.item() == pytest.approx(w, abs=6e-8)
    assert torch.sigmoid(PAIR @ found).tolist() == pytest.approx([score, 1 - score], abs=6e-8)


def test_local_data_are_on_the_positive_side():
    """The loss as the paper prints it, ln(1 + e^z), would give -ln 3."""
    assert fit_logistic(PAIR, SIGN, lam=1 / (4 * LN3)).w.item() > 0
    assert fit_logistic(PAIR, -SIGN, lam=1 / (4 * LN3)).w.item() == pytest.approx(-LN3, abs=6e-8)


def test_the_sum_with_n_times_the_penalty_is_the_mean():
    found = fit_logistic(PAIR, SIGN, lam=0.4551196, form="sum").w.item()  # 2 / (4 ln 3)
    assert found == pytest.approx(LN3, abs=1e-6)
    x, sign = sample(1)
    mean, total = fit_logistic(x, sign, lam=0.02), fit_logistic(x, sign, lam=0.02 * len(x), form="sum")
    torch.testing.assert_close(total.w, mean.w, rtol=1e-8, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lam=st.sampled_from([1e-6, 1e-3, 0.1, 10.0]),
    form=st.sampled_from(["mean", "sum"]),
    intercept=st.booleans(),
)
@example(seed=586, lam=1e-6, form="sum", intercept=False)  # parted without an error: exp(z) would overflow
def test_the_gradient_is_as_small_as_promised(seed, lam, form, intercept):
    x, sign = sample(seed)
    solved = fit_logistic(x, sign, lam=lam, form=form, intercept=intercept)
    by_w, by_b = gradient_by_numpy(x, sign, solved.w, float(solved.intercept), lam, form)
    norm = math.hypot(np.linalg.norm(by_w), by_b if intercept else 0.0)
    promised = SOLVER_SLACK / len(x) if form == "mean" else SOLVER_SLACK
    assert solved.tolerance == pytest.approx(promised)
    assert norm <= promised
    assert norm == pytest.approx(float(solved.gradient), abs=1e-12)
    assert intercept or solved.intercept == 0


def test_it_is_the_solution_that_scikit_learn_finds():
    from sklearn.linear_model import LogisticRegression

    x, sign = sample(3, count=200)
    for intercept in (False, True):
        other = LogisticRegression(C=1 / 0.05, fit_intercept=intercept, tol=1e-12, max_iter=10_000).fit(x, sign)
        found = fit_logistic(x, sign, lam=0.05, form="sum", intercept=intercept)
        assert found.w.tolist() == pytest.approx(other.coef_[0].tolist(), abs=1e-5)
        assert float(found.intercept) == pytest.approx(float(np.ravel(other.intercept_)[0]), abs=1e-5)


def test_points_that_can_be_parted_have_a_solution_too():
    x, sign = sample(5, count=20, features=40)  # fewer points than features: always separable
    solved = fit_logistic(x, sign, lam=1e-7, form="sum", intercept=True)
    assert bool(((x @ solved.w + solved.intercept) * sign > 0).all())
    assert solved.gradient <= SOLVER_SLACK


@pytest.mark.parametrize("intercept", [False, True])
def test_without_own_points_the_solution_is_finite_and_against_the_others(intercept):
    """T6.12; with points of one sign a free intercept would run away."""
    x, sign = sample(7)
    others = x[sign < 0] + 0.1
    solved = fit_logistic(others, -torch.ones(len(others)), lam=0.01, form="sum", intercept=intercept)
    assert bool(solved.w.isfinite().all())
    assert solved.intercept == 0
    assert torch.sigmoid(others @ solved.w).mean() < 0.5


def test_an_endless_penalty_leaves_nothing():
    x, sign = sample(2)
    assert fit_logistic(x, sign, lam=1e12).w.norm() < 1e-11


def test_where_rounding_keeps_it_from_its_aim_it_ends_within_its_promise():
    """A sum of 60 terms of about 1 is not known to 1e-16, and no further step helps."""
    x, sign = sample(4)
    problem = Problem(sign[:, None] * x, 1.0, torch.full((7,), 0.1, dtype=torch.float64))
    _, norm = _descend(problem, tolerance=1e-14)
    assert 1e-14 * AIM / SOLVER_SLACK < norm <= 1e-14


def test_a_problem_without_a_solution_is_told():
    x = torch.full((2, 1), float("nan"), dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="gradient"):
        _descend(Problem(x, 1.0, torch.ones(1, dtype=torch.float64)), tolerance=1e-6)
