"""FedAUX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fedstill.core.errors import FedstillError
from fedstill.core.types import Method, Release, Training
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
)
from fedstill.methods.mrtf.refinery import TeacherMode
from fedstill.methods.options import open_share, positive, presets, share
from fedstill.methods.server_student import AUGMENTATIONS, Augment, Part, check_student, placed
from fedstill.privacy import accountant as gaussian
from fedstill.server.aggregate import BufferPolicy, Weighting, average
from fedstill.server.distill.step import distill
from fedstill.server.distill.student import Student
from fedstill.server.distill.targets import Pool, soft_belief

Mechanism = Literal["analytic", "classic"]
KD = {"epochs": 1, "server_lr": 5e-5, "lr_schedule": "constant", "clip": None}
NOISE = {"epsilon": 0.1, "delta": 1e-5, "mechanism": "classic"}
PAPER: dict[str, Any] = {**KD, **NOISE, "form": "mean", "lam": 0.1, "gamma": "both"}
RELEASED: dict[str, Any] = {
    **KD, **NOISE, "form": "sum", "lam": 0.01, "intercept": True, "gamma": "both", "teacher_mode": "train",
    "weighting": "uniform", "buffers": "local", "keep_optimizer": True,
}  # fmt: skip


@presets(paper=PAPER, released=RELEASED)
def fedaux(
    *,
    scorer: Scorer = "logistic", form: Form = "sum", lam: float = 0.01, intercept: bool = False,
    gamma: Bound = "negatives", score: ScoreMode = "probability",
    epsilon: float | None = None, delta: float = 1e-5, mechanism: Mechanism = "analytic",
    distill_share: float = 0.8, steps: int = 500, epochs: int | None = None, batch_size: int = 128,
    augment: Augment = "none", optimizer: Literal["adam", "sgd"] = "adam", server_lr: float = 1e-3,
    lr_schedule: Literal["cosine", "constant"] = "cosine", weight_decay: float = 0.0, clip: float | None = 5.0,
    pool: Pool = "logits", temperature: float = 1.0, teacher_mode: TeacherMode = "eval", teacher_batch: int = 128,
    keep_optimizer: bool = False, part: Part = "all", warm_up: int = 0, feedback: bool = True,
    weighting: Weighting = "size", buffers: BufferPolicy = "average",
) -> Method:  # fmt: skip
    """FedAUX: FedDF whose teachers count, for each sample, by how sure they are that it is like their own data.

        once:   w_i = argmin_w sum_{x in D_i, D-} ln(1 + exp(-t_x <w, h_0(x) / gamma>)) + (lam / 2) ||w||^2,
                t = 1 on client i's D_i and -1 on the server's D-
        then:   s_i(x) = 1 / (1 + exp(-<w_i, h_0(x) / gamma>)) + xi
        rounds: w <- KL(softmax(sum_i s_i(x) z_i(x) / sum_i s_i(x)) || softmax(z(x; w))) on the other unlabeled rows

    h_0 are the features of the model that the first round starts from: fedaux+simclr is the paper's whole method.

    Args:
        preset: "correct" (the defaults below: FedDF's student), "paper" and "released" (the authors' text and code: one
            epoch of Adam at 5e-5, and noise, which proves nothing in either: see the page).
        scorer: "logistic" as above; "uniform" (every client alike: FedDF); for comparison "kde", "isolation_forest",
            "one_class_svm", "two_class_svm".
        form: the losses' "sum" (as the authors ran it; says much, protects nothing) or their "mean" (as the paper
            prints it: lam counts n times as much, scores are flatter, and noise can protect them).
        lam: strength of the penalty (lambda); with form = "mean" try 1e-4 to 1e-1.
        intercept: the classifier has one, without a penalty.
        gamma: bound of the features' norms (gamma): the largest of the "negatives" D-, to which the clients' own are
            clipped; or the largest of "both" (the paper), which tells something about private data.
        score: s as above ("probability") or s / (1 - s) ("odds", which a perfect classifier has in proportion to the
            client's share of such samples).
        epsilon: of the privacy of w_i towards the server, one sample of a client being another (epsilon); needs
            form = "mean", gamma = "negatives" and no intercept. None: no noise and no claim.
        delta: of the same (delta).
        mechanism: of the noise: "analytic" (exact for every epsilon) or "classic" (the paper's formula; it is added
            where nothing is proven too, and then makes no claim).
        distill_share: part of the unlabeled rows that is distilled on; the rest is D-.
        steps: distillation steps on the server each round; 0 is FedAvg (of the same weighting) bit for bit.
        epochs: passes over the distilled rows instead; set, steps do not count.
        batch_size: unlabeled samples in a step.
        augment: of the student's batches: "none", "flip" or "crop_flip"; the targets are those of the plain images.
        optimizer: of the student: "adam" or "sgd" (without momentum).
        server_lr: its learning rate.
        lr_schedule: "cosine" (to 0, over the steps of a round) or "constant".
        weight_decay: of the student.
        clip: bound of the gradient norm; None switches it off (in TOML: a large number).
        pool: "logits" weighs the teachers' logits, "probabilities" their softmax outputs.
        temperature: divides the logits of teachers and student.
        teacher_mode: "eval", or "train": teachers answer with BatchNorm by the batch and live dropout.
        teacher_batch: rows at a time in train mode.
        keep_optimizer: what the student's optimiser remembers goes on from round to round (the authors' code); false: a
            fresh one every round. A client's is local.keep_optimizer.
        part: what the student trains: "all", or "head", the last layer (linear evaluation, with local.part = "head").
        warm_up: first rounds without distillation.
        feedback: the student is sent to the clients; false: it is reported, and clients get the average.
        weighting: of the average: p_k = n_k / sum_j n_j ("size") or 1 / |S| ("uniform").
        buffers: BatchNorm statistics before distillation: "average", "pooled", "reset", "local" or "last" (see
            fedavg); distillation then re-estimates them on the unlabeled data.

    Reveals: once, w_i (as many numbers as there are features), with noise only if epsilon is set; the other scorers
        send a score for every unlabeled row, without any protection. Then each round the trained model and the number
        of samples n_k, which epsilon does not cover; the server runs every client's model on its own.
    Differs from the paper: the printed loss ln(1 + exp(z)) has the wrong sign and would turn the scores round; here it
        is ln(1 + exp(-z)), as in the authors' code. That code minimises the sum of losses and calibrates its noise for
        the mean, so that its epsilon is at least n times what it says (110,000 at n = 22,500); with epsilon we solve
        the mean, bound norms by public data alone, and count the solver's error. D- and the distilled rows are two
        parts of one permutation (the code draws them independently, and they overlap). Optimisers are new every round
        (preset "released": the student's goes on; a client's with local.keep_optimizer, evaluation in train mode with
        benchmarks/fedaux/train_mode.py).
    Reference: Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, IEEE Transactions on
        Neural Networks and Learning Systems 2021, Algorithm 1.
    """
    training = Training(
        steps=steps if epochs is None else None, epochs=epochs or 0, batch_size=batch_size, optimizer=optimizer,
        lr=server_lr, lr_schedule=lr_schedule, weight_decay=weight_decay, clip=clip, augment=AUGMENTATIONS[augment],
        part=part, keep_optimizer=keep_optimizer,
    )  # fmt: skip
    student = Student(training, temperature)
    check_student(student)
    _check(scorer, lam, score, teacher_batch, distill_share)
    scoring = Scoring(scorer, lam, form, intercept, gamma, score)
    scoring = replace(scoring, noise=_noise(epsilon, delta, mechanism, scoring))
    step = distill(
        student, pool=soft_belief(pool, temperature=temperature), shares=certainty_shares(scoring),
        teacher_batch=teacher_batch if teacher_mode == "train" else None, distill_share=distill_share,
    )  # fmt: skip
    server = (placed(step, warm_up=warm_up, feedback=feedback),)
    return Method(
        cross_entropy(),
        average(weighting, buffers=buffers),
        server,
        releases=() if student.idle else _releases(scoring),
    )


def _check(scorer: Scorer, lam: float, score: ScoreMode, teacher_batch: int, distill_share: float) -> None:
    positive("lam", lam)
    positive("teacher_batch", teacher_batch)
    share("distill_share", distill_share)
    if distill_share in (0, 1):
        raise FedstillError(
            f"method.distill_share = {distill_share} leaves no rows for one of the two parts: say e.g. 0.8"
        )
    if score == "odds" and scorer != "logistic":
        raise FedstillError("method.score = 'odds' has a meaning with scorer = 'logistic' only: set one of them back")


def _faults(scoring: Scoring) -> dict[str, str]:
    """The settings with which nothing can be proven, each with the one that would do, and why."""
    found: dict[str, str] = {}
    if scoring.form == "sum":
        found["form = 'sum'"] = "form = 'mean': the sum's solution moves n times as far when a sample changes"
    if scoring.gamma == "both":
        found["gamma = 'both'"] = "gamma = 'negatives': the other bound is taken from private data, and sent"
    if scoring.intercept:
        found["intercept = true"] = "intercept = false: it has no penalty, and nothing bounds how far it moves"
    return found


def _noise(epsilon: float | None, delta: float, mechanism: Mechanism, scoring: Scoring) -> float:
    """Standard deviation in units of the sensitivity 2 / (lam n) of the exact solution."""
    if epsilon is None:
        return 0.0
    positive("epsilon", epsilon)
    open_share("delta", delta)
    if scoring.scorer != "logistic":
        told = f"method.epsilon = {epsilon} has no use with scorer = '{scoring.scorer}'"
        raise FedstillError(f"{told}: only 'logistic' can be protected")
    if mechanism == "classic":
        if epsilon > 1:
            raise FedstillError(
                f"method.epsilon = {epsilon}: the classic formula is proven up to 1 only: set "
                "method.mechanism = 'analytic'"
            )
        return gaussian.classic_multiplier(epsilon, delta)
    if faults := _faults(scoring):
        told = f"method.epsilon = {epsilon} cannot be promised with {', '.join(faults)}"
        raise FedstillError(f"{told}: leave epsilon out, or set {'; '.join(faults.values())}")
    return (1.0 + SOLVER_SLACK) * gaussian.analytic_gaussian_multiplier(epsilon, delta)


def _releases(scoring: Scoring) -> tuple[Release, ...]:
    """What the accountant is told about the scores."""
    if scoring.scorer == "uniform":
        return ()
    claimed = scoring.noise > 0 and not _faults(scoring)
    # the solver ends within SOLVER_SLACK / (lam n) of the exact solution, for either of two neighbours
    multiplier = scoring.noise / (1.0 + SOLVER_SLACK) if claimed else None
    why = _why(scoring) if not claimed else (
        "the solution of the mean of losses moves by at most 2 / (lam n) when one sample of a client is another one; "
        "norms are bounded by public data, the solver's error is counted"
    )  # fmt: skip
    return (Release(SCORES, "sample", multiplier, when="once", against="server", why=why),)


def _why(scoring: Scoring) -> str:
    """Why nothing is claimed."""
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
