"""FedAUX's certainty scores: before the first round each client scores how much a sample is like its own data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedstill.core.seeds import seed_for
from fedstill.core.setup import Preparation, Question, Tools
from fedstill.core.types import ClientData, Need, Round, Seed, Tree, Weights
from fedstill.privacy.noise import gaussian_steps, steps_in
from fedstill.server.distill.targets import TeacherShares, capped
from fedstill.server.distill.teachers import teacher_ids

Scorer = Literal["logistic", "uniform", "kde", "isolation_forest", "one_class_svm", "two_class_svm"]
Bound = Literal["negatives", "both"]
ScoreMode = Literal["probability", "odds"]
FLOOR = 1e-8  # xi: no score is 0
ALIKE: dict[ScoreMode, float] = {"probability": 0.5 + FLOOR, "odds": 1.0}  # of every client, with scorer "uniform"
SCORES = "certainty scores"  # what the accountant knows them by
ROWS_AT_ONCE = 16_384  # scored in float64 at a time


@dataclass(frozen=True)
class Scoring:
    """How scores are made; the options of `methods.fedaux` of the same names say what each does.

    noise: standard deviation of the noise on w, in units of 2 / (lam n), n = |D_i| + |D-minus|. This unit is the L2
        sensitivity of the solution of the "mean" form to one sample of the client (norms at most 1, loss 1-Lipschitz).
    """

    scorer: Scorer = "logistic"
    lam: float = 0.01
    form: Form = "sum"
    intercept: bool = False
    gamma: Bound = "negatives"
    score: ScoreMode = "probability"
    noise: float = 0.0


def sensitivity(lam: float, count: int) -> float:
    """Return 2 / (lam n), the farthest that the solution of the "mean" form moves when one of its n samples changes.

    Reference: Chaudhuri, Monteleoni & Sarwate, Differentially private empirical risk minimization, JMLR 2011.

    >>> round(sensitivity(0.1, 22_500), 10)
    0.0008888889
    """
    return 2.0 / (lam * count)


def certainty_shares(scoring: Scoring, largest_share: float | None = None) -> TeacherShares:
    """Weigh each teacher for each sample by its score: s_i(x) / sum_j s_j(x) over the clients j of the round.

        s_i(x) = 1 / (1 + exp(-<w_i, h_0(x) / gamma>)) + xi,    w_i parts D_i from the public D-minus

    largest_share: most that a teacher counts for a sample, in even shares; see `capped`.
    Slot: "scores" (N, rows that are distilled on), made once and the same in every round.
    Reports before the first round: scored_clients; largest_share, the mean over samples of the largest share when all
    clients take part (1 / N: all alike).
    """

    def of(round: Round, state: Tree) -> Tensor:
        table: Tensor = state["scores"]
        return capped(normalised(table[teacher_ids(round).to(table.device)]), largest_share)

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        return candidate, {**state, "scores": score_table(candidate, state["distilled"], preparation, scoring)}

    needs = frozenset() if scoring.scorer == "uniform" else frozenset({Need.FEATURES})
    return TeacherShares(of, needs, lambda weights: {"scores": {}}, prepare)


def normalised(scores: Tensor) -> Tensor:
    """Return s_t / sum_t s_t, (T, M), in float64, because equal float32 scores then give 1 / T to the last bit."""
    wide = scores.double()
    return wide / wide.sum(dim=0, keepdim=True)


class Features(NamedTuple):
    """The public features that clients and server share: the two parts of the unlabeled set."""

    negatives: Tensor  # (|D-minus|, F) float64
    distilled: Tensor  # (M, F) as the engine gives them


def score_table(candidate: Weights, distilled: Tensor, preparation: Preparation, scoring: Scoring) -> Tensor:
    """Return the score (N, M) of every client for the rows that are distilled on.

    A client without an answer has for each sample the mean of the other clients' scores, so that it counts as much as
    they do on average (a constant would not do, because scores are mostly far below 0.5).

    With several architectures the features of a client's prototype score it, once for all prototypes.
    """
    known, key = preparation.shared, f"{SCORES} {scoring}"
    if key not in known:
        groups = preparation.groups  # mostly there is one architecture
        prototypes = [(preparation.candidates[name], look) for name, look in groups.items()]
        known[key] = _scored(prototypes or [(candidate, preparation)], distilled, scoring)
        preparation.metrics["largest_share"] = float(normalised(known[key]).amax(dim=0).mean())
    table: Tensor = known[key]
    return table


def _scored(prototypes: list[tuple[Weights, Preparation]], distilled: Tensor, scoring: Scoring) -> Tensor:
    population = sum(look.population for _, look in prototypes)
    if scoring.scorer == "uniform":
        return torch.full((population, int(distilled.sum())), ALIKE[scoring.score], device=distilled.device)
    pairs = [_ask_scores(model, distilled, look, scoring) for model, look in prototypes]
    ids = torch.cat([asked for asked, _ in pairs])
    each = [scores for _, scores in pairs]
    if scoring.scorer == "logistic":
        scores = torch.cat(each)
    else:
        scores = relative(torch.cat(comparable(each) if scoring.scorer == "kde" else each))
    table = scores.double().mean(dim=0).repeat(population, 1)
    return table.index_copy(0, ids.to(table.device), scores.double()).float()


def _ask_scores(
    candidate: Weights, chosen: Tensor, preparation: Preparation, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Ask every client, and return (ids, scores).

    With scorer "logistic" a client sends its w, and the server computes the scores. With the other scorers a client
    sends the logarithms of its scores.
    """
    unlabeled, logistic = preparation.unlabeled, scoring.scorer == "logistic"
    assert unlabeled is not None  # declared as a need
    every = preparation.trainer.outputs(candidate, unlabeled, features=True).features.flatten(1)
    chosen = chosen.to(every.device)
    public = Features(every[~chosen].double(), every[chosen])
    sent: Tree = {"model": candidate._asdict(), "negatives": every[~chosen]}
    sent |= {} if logistic else {"distilled": public.distilled}
    ids, answers = preparation.ask(question_of(scoring), sent=sent, release=SCORES)
    preparation.metrics["scored_clients"] = float(len(ids))
    return ids, scores_of(answers, public, scoring) if logistic else answers["log_scores"]


def question_of(scoring: Scoring) -> Question:
    """The question to a client: the answer says how much a sample is like its own data, as `Scoring` asks for it."""

    def answer(data: ClientData, sent: Tree, tools: Tools) -> Tree:
        seen = tools.trainer.outputs(Weights(**sent["model"]), data.x, features=True, keep=False).features
        private, negatives = seen.flatten(1).double(), sent["negatives"].double()
        if scoring.scorer == "logistic":
            return client_answer(private, negatives, scoring, seed_for(tools.noise_seed, "scores", data.id))
        scorer: OtherScorer = scoring.scorer  # type: ignore[assignment]
        seed = seed_for(tools.seed, "scores", data.id)
        return {"log_scores": log_scores(scorer, private, negatives, sent["distilled"], seed).float()}

    return Question(SCORES, answer)


def client_answer(private: Tensor, negatives: Tensor, scoring: Scoring, seed: Seed) -> Tree:
    """Return the message of one client: its w with noise, and if they are its own the intercept and the norm bound.

    Features that are not finite count as 0, because one sample must not decide whether the client answers at all.
    """
    private = torch.where(private.isfinite().all(dim=1, keepdim=True), private, 0.0)
    bound = norm_bound(negatives)
    if scoring.gamma == "both":
        bound = torch.maximum(bound, norm_bound(private))
    points = torch.cat([bounded(private, bound), bounded(negatives, bound)])
    sign = torch.cat([points.new_ones(len(private)), -points.new_ones(len(negatives))])
    solved = fit_logistic(points, sign, lam=scoring.lam, form=scoring.form, intercept=scoring.intercept)
    w = solved.w
    if scoring.noise:
        w = hidden(w, sensitivity(scoring.lam, len(points)), scoring.noise, seed)
    answer = {"w": w.float()}
    if scoring.intercept:
        answer["intercept"] = solved.intercept.float()
    if scoring.gamma == "both":
        answer["bound"] = bound.float()
    return answer


def hidden(w: Tensor, bound: float, noise: float, seed: Seed) -> Tensor:
    """Return w with Gaussian noise of a standard deviation of `noise` bounds, added in whole steps of the bound.

    Rounding moves each of F numbers by at most half a step, and so two solutions apart by at most sqrt(F) steps.
    """
    steps = steps_in(bound, noise * bound)
    whole = (w * (steps / bound)).round().to(torch.int64)
    drawn = gaussian_steps(seed, w.shape, noise * (steps + math.sqrt(w.numel())))
    return (whole + drawn.to(w.device)).to(w.dtype) * (bound / steps)


def norm_bound(features: Tensor) -> Tensor:
    """Return gamma, the largest norm of features (n, F)."""
    largest = features.double().norm(dim=1).amax() if len(features) else features.new_zeros((), dtype=torch.float64)
    return largest.clamp_min(torch.finfo(torch.float32).tiny)


def bounded(features: Tensor, bound: Tensor) -> Tensor:
    """Return features divided by the bound, longer ones by their own norm, so that no norm is above 1."""
    return features / torch.maximum(features.norm(dim=1, keepdim=True), bound)


def scores_of(answers: Tree, public: Features, scoring: Scoring) -> Tensor:
    """Return the scores (A, M) that the clients' answers give the public features."""
    w: Tensor = answers["w"].double()
    shift = answers["intercept"].double() if scoring.intercept else w.new_zeros(len(w))
    if scoring.gamma == "both":  # h / gamma_i, as the paper has it, also where that is longer than 1
        w = w / answers["bound"].double().unsqueeze(1)
    pieces = []
    for some in torch.split(public.distilled, ROWS_AT_ONCE):
        points = some.double()
        if scoring.gamma == "negatives":
            points = bounded(points, norm_bound(public.negatives))
        pieces.append(score(w @ points.T + shift.unsqueeze(1), scoring.score))
    return torch.cat(pieces, dim=1)


def score(margin: Tensor, mode: ScoreMode) -> Tensor:
    """Return s = 1 / (1 + exp(-z)) + xi, or in mode "odds" exp(z) between xi and 1 / xi."""
    if mode == "odds":
        return margin.clamp(math.log(FLOOR), -math.log(FLOOR)).exp()
    return torch.sigmoid(margin) + FLOOR


OtherScorer = Literal["kde", "isolation_forest", "one_class_svm", "two_class_svm"]
Points = np.ndarray  # (n, F)
LEAST = 1e-30  # of a score, as a part of the largest one for the same sample


def log_scores(scorer: OtherScorer, private: Tensor, negatives: Tensor, asked: Tensor, seed: Seed) -> Tensor:
    """Return the logarithm (M,) of one client's scores for `asked` (M, F), from its `private` features.

    kde:              the density of a Gaussian kernel estimate from its own points
    isolation_forest: 1 - the anomaly score of a forest grown on its own points
    one_class_svm:    sum_j a_j k(x, x_j) / rho: 1 on the border of the region that holds its own points
    two_class_svm:    1 / (1 + exp(-f(x))), f the margin of an RBF machine that parts them from the negatives
    """
    mine, public, wanted = (part.double().cpu().numpy() for part in (private, negatives, asked))
    scored = _SCORERS[scorer](mine, public, wanted, seed % 2**32)
    return torch.from_numpy(scored).to(private.device)


def _kde(private: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    """Score by a density with Scott's bandwidth for the client's spread, at least a thousandth of the public spread."""
    from sklearn.neighbors import KernelDensity

    spread = max(np.sqrt(private.var(axis=0).mean()), 1e-3 * np.sqrt(negatives.var(axis=0).mean()), 1e-12)
    width = spread * len(private) ** (-1.0 / (private.shape[1] + 4))
    return np.asarray(KernelDensity(bandwidth=float(width)).fit(private).score_samples(asked))


def _isolation_forest(private: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    from sklearn.ensemble import IsolationForest

    return _log(1.0 + IsolationForest(random_state=seed).fit(private).score_samples(asked))


def _one_class_svm(private: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    from sklearn.svm import OneClassSVM

    machine = OneClassSVM(gamma=_kernel_width(negatives))
    machine.random_state = seed  # no argument of its own; without it, `fit` draws from numpy's global stream
    machine.fit(private)
    return _log(machine.score_samples(asked) / max(float(machine.offset_[0]), LEAST))


def _two_class_svm(private: Points, negatives: Points, asked: Points, seed: int) -> np.ndarray:
    from sklearn.svm import SVC

    sign = np.r_[np.ones(len(private)), -np.ones(len(negatives))]
    machine = SVC(gamma=_kernel_width(negatives), random_state=seed)
    margin = machine.fit(np.r_[private, negatives], sign).decision_function(asked)
    return np.asarray(-np.logaddexp(0.0, -margin))


def _kernel_width(negatives: Points) -> float:
    """Return 1 / (F var), scikit-learn's "scale", of public data, so that it is the same for all clients."""
    return float(1.0 / max(negatives.shape[1] * negatives.var(), 1e-12))


def _log(scores: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(np.maximum(scores, LEAST)))


_SCORERS: dict[OtherScorer, Callable[[Points, Points, Points, int], np.ndarray]] = {
    "kde": _kde,
    "isolation_forest": _isolation_forest,
    "one_class_svm": _one_class_svm,
    "two_class_svm": _two_class_svm,
}


def relative(logs: Tensor) -> Tensor:
    """Return scores (A, M) as parts of a sample's largest one, because densities in many dimensions have no scale."""
    return (logs - logs.amax(dim=0, keepdim=True)).exp().clamp_min(LEAST)


def comparable(logs: list[Tensor]) -> list[Tensor]:
    """Scale log-densities (A_g, M) of several prototypes, because their features have different dimensions.

    For every sample the densities of a prototype get the mean 1: its clients share as if they were alone, and together
    they count by their number. One prototype stays as it is, bit for bit.
    """
    if len(logs) == 1:
        return logs
    return [group - (group.logsumexp(dim=0) - math.log(max(len(group), 1))) for group in logs]


Form = Literal["mean", "sum"]
SOLVER_SLACK = 1e-6  # guaranteed bound of the gradient of the sum of losses; the mean's is 1/n of it
AIM = 1e-8  # where we stop if rounding lets us: one more step of a method whose error squares
STEPS = 200  # ten are usual, so this many say that something is wrong
ROUNDING = 1e-14  # of a value in float64: near the optimum the decrease drowns in it


class Solved(NamedTuple):
    """A solution w of the convex problem; ||w - w*|| <= gradient / lam where there is no intercept."""

    w: Tensor  # (F,)
    intercept: Tensor  # ()
    gradient: float  # the norm that was reached
    tolerance: float  # the bound of that norm, which does not depend on the data


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
        """Return Newton's direction: n F^2 multiplications for the curvature, F^3 / 3 for the solution."""
        chance = torch.sigmoid(-(self.rows @ w))
        curvature = self.scale * (self.rows.T * (chance * (1.0 - chance))) @ self.rows + torch.diag(self.ridge)
        safe = 1e-12 * curvature.diagonal().mean()  # an intercept has no ridge; this moves the way, not the end
        curvature.diagonal().add_(safe)
        direction: Tensor = torch.linalg.solve(curvature, gradient)
        return direction


def fit_logistic(points: Tensor, sign: Tensor, *, lam: float, form: Form = "mean", intercept: bool = False) -> Solved:
    """Return the linear classifier of points (n, F) with signs t (n,) of +1 and -1.

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
    """Return w after a Newton step, which is halved until the value falls by a small part of its linear forecast."""
    direction, before = problem.direction(w, gradient), problem.value(w)
    slope, noise, size = gradient @ direction, ROUNDING * (1.0 + before), 1.0
    while size > 1e-10 and not bool(problem.value(w - size * direction) <= before - 1e-4 * size * slope + noise):
        size /= 2
    return w - size * direction
