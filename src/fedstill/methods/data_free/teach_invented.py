"""Distillation on samples that a generator invents: first it learns what teachers recognise, then the student does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.seeds import seed_for
from fedstill.core.setup import Preparation, no_preparation
from fedstill.core.tree import full_precision, leaves
from fedstill.core.types import (
    Model,
    Need,
    Outlook,
    Params,
    Player,
    Round,
    Scene,
    ServerStep,
    Training,
    Tree,
    Weights,
    no_objection,
)
from fedstill.methods.data_free.inventing import (
    GeneratorFor,
    asked_for,
    check_fit,
    diversity,
    gaussian_noise,
    generator_of,
    invent,
    prepared_generator,
    quota_labels,
    refuse_text_and_heads,
    shown_samples,
    teacher_shares,
    wanted_classes,
    with_samples,
)
from fedstill.server.distill.student import divergence
from fedstill.server.distill.targets import Pool, pool_targets

Ensemble = Literal["uniform", "class"]
Labels = Literal["quota", "uniform"]
BatchNorm = Literal["train", "frozen", "restore"]
SLOT = "teaching_generator"  # not "generator": another method's, beside it or in the phase before, is its own


@dataclass(frozen=True)
class Teaching:
    """How the generator and then the student learn: their `steps` are those of a round, rates those of round 1.

    lam_cls, lam_dis: weights of the teachers' cross-entropy and of the diversity in the generator's loss.
    ensemble: teachers count alike, or class by class as in `teacher_shares`.
    labels: classes are asked for in the cohort's proportions ("quota") or all as often.
    batch_norm: of the student: "train", statistics of the invented samples; "frozen", eval mode; "restore", train
        mode, and afterwards the statistics that it had before.
    """

    generator: Training
    student: Training
    noise: int = 100
    pool: Pool = "probabilities"
    ensemble: Ensemble = "uniform"
    labels: Labels = "quota"
    lam_cls: float = 1.0
    lam_dis: float = 1.0
    batch_norm: BatchNorm = "train"

    @property
    def idle(self) -> bool:
        return not self.student.steps

    @property
    def needs(self) -> frozenset[Need]:
        """Label counts only where somebody looks at them; nothing where nobody learns."""
        if self.idle:
            return frozenset()
        counts = {Need.LABEL_COUNTS_UPLOADED} if self.labels == "quota" or self.ensemble == "class" else set()
        return frozenset({Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE} | counts)


def teach_invented(teaching: Teaching, generator: GeneratorFor) -> ServerStep:
    """A generator learns to be recognised by the uploads, then the candidate learns from them what it invents.

    Two phases a round, each with a fresh optimiser; every step draws noise z ~ N(0, 1) and classes y of its own.

        G <- Adam on lam_dis L_div(G(z, y)) + lam_cls sum_k share_k CE(w_k(G(z, y)), y)
        w <- SGD on KL(sum_k share_k softmax(w_k(x)) || softmax(w(x))),  x = G(z, y), G in eval mode

    Zero steps of the student leave the candidate as it is, and the generator too. Teachers answer in eval mode.
    State: "teaching_generator", kept from round to round.
    Reports: teaching_generator_loss and distill_loss, the means over the steps of the two phases.
    """

    @cache
    def players(model: Model) -> tuple[Player, Player]:
        made = generator(model)
        inventor = Player(_generator_loss(teaching, made, model), teaching.generator)
        return inventor, Player(_student_loss(teaching, model), teaching.student, _lesson(teaching, made, model))

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        if teaching.idle:
            return candidate, state
        round = with_samples(round)
        if not len(round.uploads.ids):
            return candidate, state
        inventor, student = players(round.model)
        share = teacher_shares(round, by_class=teaching.ensemble == "class")
        given = {"teachers": round.uploads.weights, "shares": share}
        turn = partial(_turn, round, wanted_classes(round, quota=teaching.labels == "quota"), teaching.noise)
        now, round.metrics[f"{SLOT}_loss"] = turn("generator", inventor, generator_of(state, SLOT), given)
        learnt, round.metrics["distill_loss"] = turn("student", student, candidate, {**given, "generator": now})
        if teaching.batch_norm == "restore":
            learnt = learnt._replace(buffers=candidate.buffers)
        round.models.setdefault("aggregated", candidate)
        shown = shown_samples(generator(round.model), now, round.model, teaching.noise)
        return learnt, {**state, SLOT: now._asdict(), "samples": shown}

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        return candidate, {**state, SLOT: prepared_generator(generator, SLOT, candidate, state, preparation)}

    def check(outlook: Outlook) -> None:
        refuse_text_and_heads(outlook)
        check_fit(generator, outlook)

    return ServerStep(
        "teach_invented",
        apply,
        init=lambda _: {SLOT: {}},
        needs=teaching.needs,
        prepare=no_preparation if teaching.idle else prepare,
        check=no_objection if teaching.idle else check,
    )


def _generator_loss(
    teaching: Teaching, generator: Model, model: Model
) -> Callable[[Weights, Scene], tuple[Tensor, Params]]:
    def loss(weights: Weights, scene: Scene) -> tuple[Tensor, Params]:
        z, y = scene.drawn["z"], scene.drawn["y"]
        output, buffers = generator.apply(weights, asked_for(z, y, model.classes), training=True, seed=scene.seed)
        x = output.logits.reshape(-1, *model.input_shape)
        logits = full_precision(scene.each(scene.given["teachers"], x).logits)  # (T, B, K)
        count, rows = logits.shape[:2]
        wrong = F.cross_entropy(logits.flatten(0, 1), y.repeat(count), reduction="none").reshape(count, rows)
        recognised = (scene.given["shares"][:, y] * wrong).sum(0).mean()
        varied = diversity(full_precision(x), full_precision(z))
        return teaching.lam_cls * recognised + teaching.lam_dis * varied, buffers

    return loss


def _lesson(teaching: Teaching, generator: Model, model: Model) -> Callable[[Scene], Tree]:
    """Make the function that shows the student samples in a step, and the teachers' common targets for them."""

    def look(scene: Scene) -> Tree:
        z, y = scene.drawn["z"], scene.drawn["y"]
        x = invent(generator, scene.given["generator"], model.classes, z=z, y=y, shape=model.input_shape)
        logits = scene.each(scene.given["teachers"], x).logits
        return {"x": x, "targets": pool_targets(logits, teaching.pool, share=scene.given["shares"][:, y])}

    return look


def _student_loss(teaching: Teaching, model: Model) -> Callable[[Weights, Scene], tuple[Tensor, Params]]:
    training = teaching.batch_norm != "frozen"

    def loss(weights: Weights, scene: Scene) -> tuple[Tensor, Params]:
        output, buffers = model.apply(weights, scene.seen["x"], training=training, seed=scene.seed)
        return divergence(scene.seen["targets"], output.logits).mean(), buffers if training else weights.buffers

    return loss


def _turn(
    round: Round, counts: Tensor, noise: int, name: str, player: Player, start: Weights, given: Tree
) -> tuple[Weights, float]:
    """Play all steps of one player, each an exchange of its own; return the trained weights and the mean loss.

    Each step has its own noise z (B, d) and classes y (B,), in the proportions of the counts over all steps.
    """
    training, seed, like = player.training, seed_for(round.seed, "invented", name), next(leaves(start))
    steps, batch = training.steps or 0, training.batch_size
    y = quota_labels(counts, steps * batch, seed_for(seed, "labels")).reshape(steps, batch)
    drawn = {"z": gaussian_noise(seed, (steps, batch, noise), like), "y": y.to(like.device)}
    rate = training.lr * training.lr_decay ** (round.number - 1)
    one_step = replace(player, training=replace(training, steps=1, lr=rate, lr_decay=1.0))
    fitted = round.trainer.take_turns({name: one_step}, {name: start}, drawn, given, seed)[name]
    return fitted.weights, float(fitted.loss)
