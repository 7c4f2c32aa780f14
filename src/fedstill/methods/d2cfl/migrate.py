"""D2C-FL's server step: past global models label the unlabeled set, and a student learns the labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.seeds import seed_for
from fedstill.core.tree import clone, full_precision, interpolate, leaves, tree_map
from fedstill.core.types import Need, Round, ServerStep, Targets, Tree, Weights
from fedstill.server.distill.student import Student, learner
from fedstill.server.distill.targets import Labels, Rule, keep_targets, mean_rule, surest_label, targets_of
from fedstill.server.distill.teachers import unlabeled_data

Restart = Literal["fresh", "fixed"]
StudentStart = Literal["carried", "average"]
StudentShare = Literal["confirmed", "fixed"]
# the slot of each rule: the answers of the last T teachers about the unlabeled set, oldest first
ANSWERS: dict[Rule, str] = {"max": "past_labels", "mean": "past_probabilities"}


@dataclass(frozen=True)
class Migration:
    """How labels are made and models mixed; the options of `methods.d2cfl` of the same names say what each does."""

    mix_alpha: float = 0.2
    beta: float = 1.0
    past: int = 10
    warm_up: int | None = None
    threshold: float = 0.0
    least: int = 1
    rule: Rule = "mean"
    labels: Labels = "soft"
    rollback: Restart = "fresh"
    student_start: StudentStart = "average"
    student_share: StudentShare = "confirmed"


def migrate(student: Student, form: Migration) -> ServerStep:
    """The last `past` teachers label the unlabeled data, a student learns the labels and is mixed into the candidate.

    The mix is the next teacher. Until so many are collected (or `warm_up` rounds are over and there is one), and in a
    round in which fewer than `least` labels are sure enough, the candidate itself is the teacher. A teacher answers
    once, when it is made: M forwards a round instead of T M, and T answers are kept instead of T models (see
    `answer_of`).

    State: "student" as training left it, "past_labels" or "past_probabilities" (by `rule`), "targets"; with rollback
    "fixed" also "first".
    Reports: kept_share; student_share, the student's weight in the mix; student_loss, the cross-entropy on the kept
    labels after training.
    """
    learn, slot = learner(student, hard=form.labels == "hard"), ANSWERS[form.rule]

    def init(weights: Weights) -> Tree:
        first = {"first": clone(weights)} if form.rollback == "fixed" else {}
        return {"student": clone(weights), slot: {}, "targets": {}, **first}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        answers, before, targets = newest(state[slot], form.past), targets_of(state), None
        learnt = teacher = candidate
        teachers = len(next(leaves(answers))) if answers else 0
        enough = teachers >= form.past if form.warm_up is None else round.number > form.warm_up and teachers > 0
        if before is not None and enough:
            targets = pseudo_labels(
                answers, form.threshold, classes=before.probabilities.shape[1], least=form.least, labels=form.labels
            )
            if bool(targets.kept.any()):
                learnt = learn(restart(candidate, state, round, form), targets, round)
                of_average = share_of_average(candidate, targets, round, form)
                round.metrics["student_share"] = 1.0 - of_average
                teacher = blend(candidate, learnt, of_average, counts=candidate)
                round.metrics["student_loss"] = label_loss(learnt, targets, round)
            round.models.setdefault("aggregated", candidate)
            round.models["student"] = learnt
        belief = full_precision(round.trainer.outputs(teacher, unlabeled_data(round), features=False).logits).softmax(1)
        if targets is None:
            targets = Targets(belief, torch.zeros(len(belief), dtype=torch.bool, device=belief.device))
        round.metrics["kept_share"] = float(targets.kept.double().mean())
        answers = append_answer(answers, answer_of(belief, form.rule), form.past)
        return teacher, keep_targets({**state, "student": learnt, slot: answers}, targets)

    needs = student.needs | {Need.UNLABELED, Need.ONE_ARCHITECTURE}
    return ServerStep("migrate", apply, init, needs=needs)


def answer_of(belief: Tensor, rule: Rule) -> Tree:
    """Return the part of a teacher's beliefs (M, K) that `rule` uses in later rounds.

    max: the most probable class and its probability, M of each. mean: all probabilities, M K (T = 10, M = 32,000 and
    K = 100 take 128 MB).
    """
    if rule == "mean":
        return {"probabilities": belief}
    sure, label = belief.max(dim=1)
    return {"label": label, "sure": sure}


def append_answer(answers: Tree, latest: Tree, past: int) -> Tree:
    """Return at most `past` answers along the first dimension, the newest last and the oldest dropped."""
    last = tree_map(lambda leaf: leaf.unsqueeze(0), latest)
    return newest(tree_map(lambda old, new: torch.cat([old, new]), answers, last), past) if answers else last


def newest(answers: Tree, past: int) -> Tree:
    return tree_map(lambda leaf: leaf[-past:], answers)


def pseudo_labels(answers: Tree, threshold: float, *, classes: int, least: int = 1, labels: Labels = "hard") -> Targets:
    """Return one label a sample from T teachers' answers, kept where it is sure enough; none if fewer than `least`.

    labels: "soft" returns the whole mean of the teachers' probabilities where these were kept (rule "mean").
    """
    if "probabilities" in answers:
        targets = mean_rule(answers["probabilities"], threshold)
        if labels == "soft":
            targets = targets._replace(probabilities=answers["probabilities"].mean(dim=0))
    else:
        targets = surest_label(answers["label"], answers["sure"], threshold, classes)
    return targets._replace(kept=targets.kept & (targets.kept.sum() >= least))


def blend(a: Weights, b: Weights, share: float, *, counts: Weights) -> Weights:
    """Return share a + (1 - share) b, exact at 0 and 1; integer buffers are taken from `counts`."""
    mixed = interpolate(a, b, share)
    buffers = {n: leaf if leaf.is_floating_point() else counts.buffers[n] for n, leaf in mixed.buffers.items()}
    return mixed._replace(buffers=buffers)


def share_of_average(candidate: Weights, targets: Targets, round: Round, form: Migration) -> float:
    """Return the weight of the average in the mix: alpha, or 1 - (1 - alpha) c if the labels must be confirmed.

    c is the part of the unlabeled rows that have a label and whose label the average itself names. The average is no
    teacher: clients have just trained it on true labels. So few labels count little, and wrong ones, too.
    """
    if form.student_share == "fixed":
        return form.mix_alpha
    named = round.trainer.outputs(candidate, unlabeled_data(round), features=False).logits.argmax(dim=1)
    confirmed = targets.kept & (named == targets.probabilities.argmax(dim=1))
    return 1.0 - (1.0 - form.mix_alpha) * float(confirmed.double().mean())


def restart(candidate: Weights, state: Tree, round: Round, form: Migration) -> Weights:
    """Return the student's start: beta (the last student or the candidate) + (1 - beta) (an untrained model)."""
    base = state["student"] if form.student_start == "carried" else candidate
    if form.beta == 1.0:
        return blend(base, base, form.beta, counts=candidate)
    blank = state["first"] if form.rollback == "fixed" else round.model.init(seed_for(round.seed, "rollback"))
    blank = tree_map(lambda leaf, like: leaf.to(like), blank, base)
    return blend(base, blank, form.beta, counts=candidate)


def label_loss(weights: Weights, targets: Targets, round: Round) -> float:
    """Return the mean cross-entropy of a model with the labels that are kept."""
    logits = round.trainer.outputs(weights, unlabeled_data(round), features=False).logits[targets.kept]
    label = targets.probabilities.argmax(dim=1)[targets.kept]
    return float(torch.nn.functional.cross_entropy(full_precision(logits), label))
