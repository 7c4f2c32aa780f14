"""FedAUX."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedstill.compose.wrappers import after, report_only
from fedstill.core.errors import FedstillError
from fedstill.core.limits import CountOrNone, LargestShare, OpenShare, Positive
from fedstill.core.types import Mechanism, Method, Release
from fedstill.local.terms import cross_entropy
from fedstill.methods.fedaux.certainty import (
    SCORES,
    SOLVER_SLACK,
    Bound,
    Form,
    ScoreMode,
    Scorer,
    Scoring,
    certainty_shares,
    question_of,
)
from fedstill.privacy import accountant as gaussian
from fedstill.server.aggregate import average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Pool, soft_belief

NoiseRule = Literal["analytic", "classic"]
PROOF = (
    "the solution of the mean of losses moves by at most 2 / (lam n) when one sample of a client is another one; "
    "norms are bounded by public data, the solver's error is counted"
)


def fedaux(
    *,
    student: Student = Student(),
    scorer: Scorer = "logistic",
    form: Form = "sum",
    lam: Positive = 0.01,
    intercept: bool = False,
    gamma: Bound = "negatives",
    score: ScoreMode = "probability",
    largest_share: LargestShare | None = None,
    epsilon: Positive | None = None,
    delta: OpenShare = 1e-5,
    mechanism: NoiseRule = "analytic",
    distill_share: OpenShare = 0.8,
    pool: Pool = "logits",
    warm_up: CountOrNone = 0,
    feedback: bool = True,
) -> Method:
    """FedAUX: FedDF whose teachers count, for each sample, by how sure they are that it is like their own data.

        once:   w_i = argmin_w sum_{x in D_i, D-} ln(1 + exp(-t_x <w, h_0(x) / gamma>)) + (lam / 2) ||w||^2,
                t = 1 on client i's D_i and -1 on the server's D-
        then:   s_i(x) = 1 / (1 + exp(-<w_i, h_0(x) / gamma>)) + xi
        rounds: w <- KL(softmax(sum_i s_i(x) z_i(x) / sum_i s_i(x)) || softmax(z(x; w))) on the other unlabeled rows

    h_0 are the features of the model that the first round starts from: fedaux+simclr is the paper's whole method.

    Helps: where labels are skewed and the features are pre-trained. Use SGD on the clients (local.optimizer): with
        Adam, which the paper has, accuracy fell in long runs on CIFAR-10. Without pre-training, and where clients are
        alike, it costs up to two points.

    Args:
        student: how the average learns; with student.steps = 0 it is FedAvg (of the same weighting) bit for bit.
        scorer: "logistic" as above; "uniform" (every client alike: FedDF); for comparison "kde", "isolation_forest",
            "one_class_svm", "two_class_svm".
        form: the losses' "sum" (as the authors ran it; says much, protects nothing) or their "mean" (as the paper
            prints it: lam counts n times as much, scores are flatter, and noise can protect them).
        lam: strength of the penalty (lambda); with form = "mean" try 1e-4 to 1e-1.
        intercept: the classifier has one, without a penalty.
        gamma: bound of the features' norms (gamma): the largest of the "negatives" D-, to which the clients' features
            are clipped; or the largest of "both" (the paper), which reveals something about private data.
        score: s as above ("probability") or s / (1 - s) ("odds", which a perfect classifier has in proportion to the
            client's share of such samples).
        largest_share: most that a client counts for a sample, in even shares 1 / |S|; what is above goes to the others.
            None: no bound, and clients that claim to be sure of everything decide alone.
        epsilon: privacy of w_i towards the server, for one sample of a client (epsilon); needs form = "mean",
            gamma = "negatives" and no intercept. None: no noise and no claim.
        delta: delta that belongs to this epsilon (delta).
        mechanism: how the noise is sized: "analytic" (exact for every epsilon) or "classic" (the paper's formula; it
            adds noise also where nothing is proven, and then makes no claim).
        distill_share: part of the unlabeled rows that is distilled on; the other rows are D-.
        pool: "logits" weighs the teachers' logits, "probabilities" their softmax outputs; "median", "trimmed" and
            "vote" as in feddf, with these weights.
        warm_up: first rounds without distillation.
        feedback: the student is sent to the clients; false: it is reported, and clients get the average.

    Tries: student.lr = 0.0003, 0.001, 0.003; student.steps = 100, 500, 1000; lam = 0.0001, 0.001, 0.01, 0.1.
    Reveals: once, w_i (as many numbers as there are features), with noise only if epsilon is set; the other scorers
        send a score for every unlabeled row, without any protection. Then each round the trained model and the number
        of samples n_k, which epsilon does not cover; the server runs every client's model on its own.
    Differs from the paper: the printed loss ln(1 + exp(z)) has the wrong sign and would turn the scores round; here it
        is ln(1 + exp(-z)), as in the authors' code. That code minimises the sum of losses and calibrates its noise for
        the mean, so that its epsilon is at least n times what it says (110,000 at n = 22,500); with epsilon we solve
        the mean, bound norms by public data alone, and count the solver's error. D- and the distilled rows are two
        parts of one permutation (the code draws them independently, and they overlap). Optimisers are new every round;
        the code's go on (student.keep_optimizer, local.keep_optimizer), and its teachers answer and its models are
        tested in train mode (benchmarks/fedaux/released.py, evaluate_batch = 100).
    Reference: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, IEEE Transactions on
        Neural Networks and Learning Systems 2021, Algorithm 1.
    """
    scoring = protected(Scoring(scorer, lam, form, intercept, gamma, score), epsilon, delta, mechanism)
    step = distill(
        student,
        pool=soft_belief(pool, temperature=student.temperature),
        shares=certainty_shares(scoring, largest_share),
        distill_share=distill_share,
    )
    step = after(warm_up, step) if warm_up else step
    refine = step if feedback else report_only(step)
    way = () if student.idle else (Mechanism(releases=releases_of(scoring), questions=(question_of(scoring),)),)
    return Method(cross_entropy(), average(), (refine,), way=way)


def _faults(scoring: Scoring) -> dict[str, str]:
    """Return the settings that allow no proof of privacy, each with the setting that does and the reason."""
    faults: dict[str, str] = {}
    if scoring.form == "sum":
        faults["form = 'sum'"] = "form = 'mean': the sum's solution moves n times as far when a sample changes"
    if scoring.gamma == "both":
        faults["gamma = 'both'"] = "gamma = 'negatives': the other bound is taken from private data, and sent"
    if scoring.intercept:
        faults["intercept = true"] = "intercept = false: it has no penalty, and nothing bounds how far it moves"
    return faults


def protected(scoring: Scoring, epsilon: float | None, delta: float, mechanism: NoiseRule) -> Scoring:
    """Return the scoring with the noise that (epsilon, delta) needs, in units of 2 / (lam n); none without epsilon."""
    if scoring.score == "odds" and scoring.scorer != "logistic":
        raise FedstillError("method.score = 'odds' has a meaning with scorer = 'logistic' only: set one of them back")
    if epsilon is None:
        return scoring
    if scoring.scorer != "logistic":
        setting = f"method.epsilon = {epsilon} has no use with scorer = '{scoring.scorer}'"
        raise FedstillError(f"{setting}: only 'logistic' can be protected")
    if mechanism == "classic":
        return replace(scoring, noise=gaussian.classic_multiplier(epsilon, delta))
    if faults := _faults(scoring):
        setting = f"method.epsilon = {epsilon} cannot be promised with {', '.join(faults)}"
        raise FedstillError(f"{setting}: leave epsilon out, or set {'; '.join(faults.values())}")
    return replace(scoring, noise=(1.0 + SOLVER_SLACK) * gaussian.analytic_gaussian_multiplier(epsilon, delta))


def releases_of(scoring: Scoring) -> tuple[Release, ...]:
    """Return the release of the scores, from which the accountant computes their epsilon."""
    if scoring.scorer == "uniform":
        return ()
    claimed = scoring.noise > 0 and not _faults(scoring)
    # the solver ends within SOLVER_SLACK / (lam n) of the exact solution, for either of two neighbours
    multiplier = scoring.noise / (1.0 + SOLVER_SLACK) if claimed else None
    why = PROOF if claimed else _why_no_claim(scoring)
    return (Release(SCORES, "sample", multiplier, when="once", against="server", why=why),)


def _why_no_claim(scoring: Scoring) -> str:
    if scoring.scorer != "logistic":
        return f"the scores of scorer '{scoring.scorer}' are sent as they are"
    if not scoring.noise:
        return "no noise: set epsilon, with form = 'mean'"
    if scoring.form == "sum":
        return (
            "the noise is calibrated for the mean of losses and the sum is solved: it is n times too small, n being a "
            "client's samples and the negatives, and with n in the thousands certifies at least n times the epsilon"
            + (", and none at all with an intercept" if scoring.intercept else "")
        )
    if scoring.gamma == "both":
        return "the norm bound gamma is taken from private data and sent without noise"
    return "the intercept has no penalty, and nothing bounds how far it moves when a sample changes"
