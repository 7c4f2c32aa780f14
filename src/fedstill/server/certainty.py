"""How sure each client is of each unlabeled sample: a convex problem on every client, before the first round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedstill.core.seeds import private_normal, seed_for
from fedstill.core.types import Answers, ClientData, Need, Preparation, Round, Seed, Tree, Weights
from fedstill.server.distill import TeacherShares
from fedstill.server.logistic import Form, fit_logistic
from fedstill.server.scorers import OtherScorer, comparable, log_scores, relative
from fedstill.server.teachers import teacher_ids

Scorer = Literal["logistic", "uniform", "kde", "isolation_forest", "one_class_svm", "two_class_svm"]
Bound = Literal["negatives", "both"]
ScoreMode = Literal["probability", "odds"]
Question = Callable[[ClientData], Tree]
FLOOR = 1e-8  # xi: no score is 0
ALIKE: dict[ScoreMode, float] = {"probability": 0.5 + FLOOR, "odds": 1.0}  # of every client, with scorer "uniform"
SCORES = "certainty scores"  # what the accountant knows them by
ROWS_AT_ONCE = 16_384  # scored in float64 at a time


@dataclass(frozen=True)
class Scoring:
    """How scores are made; see algorithms/fedaux.py for the words.

    noise: standard deviation of the noise on w, in units of 2 / (lam n), n = |D_i| + |D-minus|. That is the L2
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
    """2 / (lam n): how far the solution of the "mean" form moves at most when one of its n samples is another one.

    Reference: Chaudhuri, Monteleoni & Sarwate, Differentially private empirical risk minimization, JMLR 2011.

    >>> round(sensitivity(0.1, 22_500), 10)
    0.0008888889
    """
    return 2.0 / (lam * count)


def certainty_shares(scoring: Scoring) -> TeacherShares:
    """How much each teacher counts for each sample: s_i(x) / sum_j s_j(x) over the clients j of the round.

        s_i(x) = 1 / (1 + exp(-<w_i, h_0(x) / gamma>)) + xi,    w_i parts D_i from the public D-minus

    Slot: "scores" (N, rows that are distilled on), made once and the same in every round.
    Reports before the first round: scored_clients; largest_share, the mean over samples of the largest share when all
    clients take part (1 / N: all alike).
    """

    def of(round: Round, state: Tree) -> Tensor:
        table: Tensor = state["scores"]
        return normalised(table[teacher_ids(round).to(table.device)])

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        return candidate, {**state, "scores": score_table(candidate, state["distilled"], preparation, scoring)}

    needs = frozenset() if scoring.scorer == "uniform" else frozenset({Need.FEATURES})
    return TeacherShares(of, needs, lambda weights: {"scores": {}}, prepare)


def normalised(scores: Tensor) -> Tensor:
    """(T, M) s_t / sum_t s_t in float64, where equal scores (of float32) give 1 / T to the last bit."""
    wide = scores.double()
    return wide / wide.sum(dim=0, keepdim=True)


class Features(NamedTuple):
    """The public features that clients and server share: the two parts of the unlabeled set."""

    negatives: Tensor  # (|D-minus|, F) float64
    distilled: Tensor  # (M, F) as the engine gives them


def score_table(candidate: Weights, distilled: Tensor, preparation: Preparation, scoring: Scoring) -> Tensor:
    """(N, M) scores of every client for the rows that are distilled on.

    A client that gave no answer has for each sample the mean of those that did: it counts as much as they do on average
    (scores are mostly far below 0.5, so that no constant would do).

    Clients with several architectures are scored by the features of their own prototype, once for all prototypes.
    """
    known, key = preparation.shared, f"{SCORES} {scoring}"
    if key not in known:
        known[key] = _scored(_prototypes(candidate, preparation), distilled, scoring)
        preparation.metrics["largest_share"] = float(normalised(known[key]).amax(dim=0).mean())
    table: Tensor = known[key]
    return table


def _prototypes(candidate: Weights, preparation: Preparation) -> list[tuple[Weights, Preparation]]:
    """Every architecture's model, and how its clients are asked; mostly there is one."""
    groups = preparation.groups
    return [(preparation.candidates[name], look) for name, look in groups.items()] or [(candidate, preparation)]


def _scored(prototypes: list[tuple[Weights, Preparation]], distilled: Tensor, scoring: Scoring) -> Tensor:
    population = sum(look.population for _, look in prototypes)
    if scoring.scorer == "uniform":
        return torch.full((population, int(distilled.sum())), ALIKE[scoring.score], device=distilled.device)
    ask = _parting if scoring.scorer == "logistic" else _others
    pairs = [ask(model, _public_features(model, distilled, look), look, scoring) for model, look in prototypes]
    ids = torch.cat([asked for asked, _ in pairs])
    each = [scores for _, scores in pairs]
    if scoring.scorer == "logistic":
        scores = torch.cat(each)
    else:
        scores = relative(torch.cat(comparable(each) if scoring.scorer == "kde" else each))
    table = scores.double().mean(dim=0).repeat(population, 1)
    return table.index_copy(0, ids.to(table.device), scores.double()).float()


def _public_features(candidate: Weights, distilled: Tensor, preparation: Preparation) -> Features:
    unlabeled = preparation.unlabeled
    assert unlabeled is not None  # declared as a need
    every = preparation.trainer.outputs(candidate, unlabeled, features=True).features.flatten(1)
    chosen = distilled.to(every.device)
    return Features(every[~chosen].double(), every[chosen])


def _own_features(candidate: Weights, data: ClientData, preparation: Preparation) -> Tensor:
    return preparation.trainer.outputs(candidate, data.x, features=True, keep=False).features.flatten(1).double()


def _asked(question: Question, sent: Tree, preparation: Preparation) -> Answers:
    """Ask every client, and say how far that is."""
    begun = itertools.count()

    def told(data: ClientData) -> Tree:
        preparation.tell(SCORES, min(1.0, next(begun) / preparation.population))
        return question(data)

    answers = preparation.ask(told, sent=sent, release=SCORES)
    preparation.tell(SCORES, 1.0)
    preparation.metrics["scored_clients"] = float(len(answers.ids))
    return answers


def _parting(candidate: Weights, public: Features, preparation: Preparation, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Ask every client for its w, and score with it on the server: (ids, scores)."""

    def question(data: ClientData) -> Tree:
        own = _own_features(candidate, data, preparation)
        return client_answer(own, public.negatives, scoring, seed_for(preparation.noise_seed, "scores", data.id))

    sent = {"model": candidate, "negatives": public.negatives.to(public.distilled.dtype)}
    ids, answers = _asked(question, sent, preparation)
    return ids, scores_of(answers, public, scoring)


def _others(candidate: Weights, public: Features, preparation: Preparation, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Ask every client for the logarithms of its scores themselves."""
    scorer: OtherScorer = scoring.scorer  # type: ignore[assignment]

    def question(data: ClientData) -> Tree:
        own, seed = _own_features(candidate, data, preparation), seed_for(preparation.seed, "scores", data.id)
        return {"log_scores": log_scores(scorer, own, public.negatives, public.distilled, seed).float()}

    sent = {"model": candidate, **public._asdict(), "negatives": public.negatives.to(public.distilled.dtype)}
    ids, answers = _asked(question, sent, preparation)
    return ids, answers["log_scores"]


def client_answer(own: Tensor, negatives: Tensor, scoring: Scoring, seed: Seed) -> Tree:
    """What one client sends: its w with noise, the intercept if there is one, and its norm bound if that is its own.

    Features that are not finite count as 0: one sample must not decide whether the client answers at all.
    """
    own = torch.where(own.isfinite().all(dim=1, keepdim=True), own, 0.0)
    bound = norm_bound(negatives)
    if scoring.gamma == "both":
        bound = torch.maximum(bound, norm_bound(own))
    points = torch.cat([bounded(own, bound), bounded(negatives, bound)])
    sign = torch.cat([points.new_ones(len(own)), -points.new_ones(len(negatives))])
    solved = fit_logistic(points, sign, lam=scoring.lam, form=scoring.form, intercept=scoring.intercept)
    w = solved.w
    if scoring.noise:
        drawn = private_normal(seed, w.shape).to(w)
        w = w + scoring.noise * sensitivity(scoring.lam, len(points)) * drawn
    answer = {"w": w.float()}
    if scoring.intercept:
        answer["intercept"] = solved.intercept.float()
    if scoring.gamma == "both":
        answer["bound"] = bound.float()
    return answer


def norm_bound(features: Tensor) -> Tensor:
    """gamma, the largest norm of features (n, F)."""
    largest = features.double().norm(dim=1).amax() if len(features) else features.new_zeros((), dtype=torch.float64)
    return largest.clamp_min(torch.finfo(torch.float32).tiny)


def bounded(features: Tensor, bound: Tensor) -> Tensor:
    """Features divided by the bound, those beyond it by their own norm: no norm is above 1."""
    return features / torch.maximum(features.norm(dim=1, keepdim=True), bound)


def scores_of(answers: Tree, public: Features, scoring: Scoring) -> Tensor:
    """(A, M) the scores that the clients' answers give the public features."""
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
    """s = 1 / (1 + exp(-z)) + xi, or the odds exp(z) of it between xi and 1 / xi."""
    if mode == "odds":
        return margin.clamp(math.log(FLOOR), -math.log(FLOOR)).exp()
    return torch.sigmoid(margin) + FLOOR
