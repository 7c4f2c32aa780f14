"""Logistic regression with an l2 penalty, solved to a gradient norm that is verified, in float64."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

Form = Literal["mean", "sum"]
SOLVER_SLACK = 1e-6  # guaranteed bound of the gradient of the sum of losses; the mean's is 1/n of it
AIM = 1e-8  # where we stop if rounding lets us: one more step of a method whose error squares
STEPS = 200  # ten are usual, so this many say that something is wrong
ROUNDING = 1e-14  # of a value in float64: near the optimum the decrease drowns in it


class Solved(NamedTuple):
    """The solution as it was found; ||w - w*|| <= gradient / lam where there is no intercept."""

    w: Tensor  # (F,)
    intercept: Tensor  # ()
    gradient: float  # the norm that was reached
    tolerance: float  # ... and the bound that it had to stay below, which no data decide


class Problem(NamedTuple):
    """scale sum_i ln(1 + exp(-<w, rows_i>)) + sum_j ridge_j w_j^2 / 2, rows_i = t_i h_i."""

    rows: Tensor  # (n, F)
    scale: float
    ridge: Tensor  # (F,)

    def value(self, w: Tensor) -> Tensor:
        return self.scale * softplus(-(self.rows @ w)).sum() + 0.5 * (self.ridge * w * w).sum()

    def gradient(self, w: Tensor) -> Tensor:
        return self.ridge * w - self.scale * (self.rows.T @ torch.sigmoid(-(self.rows @ w)))

    def direction(self, w: Tensor, gradient: Tensor) -> Tensor:
        """Newton's: n F^2 multiplications for the curvature, F^3 / 3 for the solution."""
        chance = torch.sigmoid(-(self.rows @ w))
        curvature = self.scale * (self.rows.T * (chance * (1.0 - chance))) @ self.rows + torch.diag(self.ridge)
        safe = 1e-12 * curvature.diagonal().mean()  # an intercept has no ridge; this moves the way, not the end
        curvature.diagonal().add_(safe)
        found: Tensor = torch.linalg.solve(curvature, gradient)
        return found


def fit_logistic(points: Tensor, sign: Tensor, *, lam: float, form: Form = "mean", intercept: bool = False) -> Solved:
    """The linear classifier of points (n, F) with signs t (n,) of +1 and -1.

        mean: argmin_w (1/n) sum_i ln(1 + exp(-t_i <w, h_i>)) + (lam / 2) ||w||^2
        sum:  argmin_w       sum_i ln(1 + exp(-t_i <w, h_i>)) + (lam / 2) ||w||^2

    intercept: <w, h> + b with a b that costs nothing; without points of both signs it would run away and stays 0.
    Damped Newton steps until the gradient's norm is at most SOLVER_SLACK / n (mean) or SOLVER_SLACK (sum), and mostly
    a hundredth of it. 22,500 points of 512 features take about ten steps, a second each on two CPU cores.
    """
    count = len(points)
    free = intercept and bool((sign > 0).any()) and bool((sign < 0).any())
    rows = torch.cat([points, points.new_ones(count, 1)], dim=1) if free else points
    ridge = torch.full((rows.shape[1],), lam, dtype=rows.dtype, device=rows.device)
    if free:
        ridge[-1] = 0.0
    scale = 1.0 / count if form == "mean" else 1.0
    tolerance = SOLVER_SLACK * scale
    w, norm = _descend(Problem(sign.to(rows).unsqueeze(1) * rows, scale, ridge), tolerance)
    return Solved(w[:-1], w[-1], norm, tolerance) if free else Solved(w, w.new_zeros(()), norm, tolerance)


def _descend(problem: Problem, tolerance: float) -> tuple[Tensor, float]:
    w, last = torch.zeros_like(problem.ridge), math.inf
    for _ in range(STEPS):
        gradient = problem.gradient(w)
        norm = float(gradient.norm())
        if norm <= tolerance * (AIM / SOLVER_SLACK) or last <= norm <= tolerance:
            return w, norm
        if not math.isfinite(norm):
            break
        w, last = _damped(problem, w, gradient), norm
    raise ArithmeticError(f"the convex problem was not solved: its gradient still is {norm:.1e}")


def _damped(problem: Problem, w: Tensor, gradient: Tensor) -> Tensor:
    """A Newton step, halved until the value falls by a part of what the slope promises."""
    direction, before = problem.direction(w, gradient), problem.value(w)
    slope, noise, size = gradient @ direction, ROUNDING * (1.0 + before), 1.0
    while size > 1e-10 and not bool(problem.value(w - size * direction) <= before - 1e-4 * size * slope + noise):
        size /= 2
    return w - size * direction
