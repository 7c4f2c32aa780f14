"""A generator of features that the uploaded heads recognise, sent to the clients (FedGen)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.seeds import numpy_generator, seed_for, to_signed, uniform
from fedstill.core.tree import leaves
from fedstill.core.types import (
    Fitted,
    Model,
    Need,
    Params,
    Player,
    Preparation,
    Round,
    Scene,
    Seed,
    ServerStep,
    Stage,
    Training,
    Tree,
    Weights,
)
from fedstill.server.invented import (
    GeneratorFor,
    asked_for,
    check_fit,
    diversity,
    first_generator,
    gaussian_noise,
    label_counts,
    same_form,
    with_samples,
)
from fedstill.server.pools import full_precision

NoiseKind = Literal["uniform", "normal"]
ClassWeights = Literal["sample", "batch", "uniform"]
SLOT = "feature_generator"  # not "generator": another method's, beside it or in the phase before, is its own
RECEIVED = ("labels", "label_weight", "match_weight")


@dataclass(frozen=True)
class GeneratorTraining:
    """How the server trains its generator each round, and how much clients are to make of it.

    training: its `steps` are those of a round, its `lr` that of round 1, then times `lr_decay` a round.
    noise, noise_kind: how many numbers a sample is made from: U[0, 1) or N(0, 1).
    diversity: weight of the diversity term (eta).
    class_weights: each sample's cross-entropy counts by the share of its class ("sample"), or the mean of all by the
        mean share ("batch"), as a broadcast in the released code makes it; "uniform" asks for no label counts: all
        clients count alike and every class is asked for.
    label_weight, match_weight: a and b of round 1; in round t max(floor, a decay^(t - 1)). 0 stays 0.
    """

    training: Training
    noise: int
    noise_kind: NoiseKind = "uniform"
    diversity: float = 1.0
    class_weights: ClassWeights = "sample"
    label_weight: float = 10.0
    match_weight: float = 10.0
    decay: float = 0.98
    floor: float = 1e-4

    def strength(self, weight: float, rounds: int) -> float:
        """A weight after so many rounds."""
        return max(self.floor, weight * self.decay**rounds) if weight else 0.0


def label_shares(counts: Tensor) -> Tensor:
    """omega_k(y) = c_k^y / sum_j c_j^y with c = counts + 1: what client k's answer counts for class y; (C, K)."""
    started = counts.double() + 1.0
    return started / started.sum(0)


def seen_labels(counts: Tensor) -> Tensor:
    """(K,) bool: classes of which some client of the cohort holds a sample (max_k c_k^y > 1)."""
    return counts.sum(0) > 0


def draw_requests(how: GeneratorTraining, asked: Tensor, seed: Seed, like: Tensor) -> Tree:
    """What the steps of a round ask for: noise "z" (S, B, d) and classes "y" (S, B), drawn alike among the `asked`."""
    shape = (how.training.steps or 0, how.training.batch_size)
    y = numpy_generator(seed_for(seed, "labels")).choice(asked.nonzero().flatten().cpu().numpy(), shape)
    return {"z": _noise(how, seed, (*shape, how.noise), like), "y": torch.from_numpy(y).to(like.device)}


def _noise(how: GeneratorTraining, seed: Seed, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if how.noise_kind == "normal":
        return gaussian_noise(seed, shape, like)
    return uniform(torch.tensor(to_signed(seed_for(seed, "noise")), device=like.device), shape).to(like.dtype)


def generator_player(model: Model, generator: Model, how: GeneratorTraining) -> Player:
    """sum_k mean_i omega_k(y_i) CE(h_k(G(z_i, y_i)), y_i) + eta L_div, h_k the head of upload k; one step a turn.

    Given: "heads" (C, ...) and "shares" omega (C, K).
    """
    head = model.head
    assert head is not None  # declared as a need
    each_head: Callable[[Params, Tensor], Tensor] = torch.func.vmap(head, in_dims=(0, None))

    def loss(own: Weights, scene: Scene) -> tuple[Tensor, Params]:
        z, y = scene.drawn["z"], scene.drawn["y"]
        said, buffers = generator.apply(own, asked_for(z, y, model.classes), training=True)
        logits = full_precision(each_head(scene.given["heads"], said.logits))  # (C, B, K)
        wanted = y.expand(len(logits), -1).unsqueeze(-1)
        losses = -torch.log_softmax(logits, -1).gather(-1, wanted).squeeze(-1)
        share = scene.given["shares"].index_select(1, y)  # (C, B)
        if how.class_weights == "batch":
            share = share.mean(1, keepdim=True)
        varied = diversity(full_precision(said.logits), full_precision(z))
        return (share * losses).mean(1).sum() + how.diversity * varied, buffers

    return Player(loss, replace(how.training, steps=1))


def train_generator(generator: GeneratorFor, how: GeneratorTraining) -> ServerStep:
    """Train the generator of features on the heads that came in, and send it; the model passes through (FedGen).

    State: "feature_generator" with its weights, what its optimiser remembers (training.keep_optimizer), the classes
    that any client held so far and the weights of the clients' terms, which are 0 until it has been trained once.
    Broadcasts "generator", "labels", "label_weight", "match_weight". Reports: feature_generator_loss.
    A round whose cohort holds no sample by its label counts leaves the generator as it is; the weights fall on.
    """
    counted = how.class_weights != "uniform"

    @cache
    def player_for(model: Model) -> Player:
        return generator_player(model, generator(model), how)

    def prepare(candidate: Weights, state: Tree, preparation: Preparation) -> tuple[Weights, Tree]:
        return candidate, {SLOT: _prepared(generator, how, state.get(SLOT), candidate, preparation)}

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        own, like, round = state[SLOT], next(leaves(candidate.params)), with_samples(round)
        counts = label_counts(round) if counted else like.new_ones(len(round.uploads.ids), round.model.classes)
        seen = seen_labels(counts)
        if not bool(seen.any()):
            trained = bool(own["labels"].any())
            return candidate, {SLOT: {**own, **(_strengths(how, round.number, like) if trained else {})}}
        fitted = _trained(player_for(round.model), how, own, counts, round)
        round.metrics[f"{SLOT}_loss"] = float(fitted.loss)
        after = {
            "weights": fitted.weights._asdict(),
            "optimizer": fitted.optimizer if how.training.keep_optimizer else {},
            "labels": torch.maximum(own["labels"], seen.to(own["labels"])),
        }
        return candidate, {SLOT: {**after, **_strengths(how, round.number, like)}}

    needs = {Need.HEAD, Need.FEATURES, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    if counted:
        needs.add(Need.LABEL_COUNTS_UPLOADED)
    return ServerStep(
        apply, lambda _: {SLOT: {}}, broadcast, needs=frozenset(needs), stage=Stage.KEEP, prepare=prepare,
        check=partial(check_fit, generator),
    )  # fmt: skip


def _prepared(
    generator: GeneratorFor, how: GeneratorTraining, kept: Tree | None, candidate: Weights, look: Preparation
) -> Tree:
    """A first generator, which counts nothing yet; or one that an earlier phase has trained, if it is alike."""
    like, first = next(leaves(candidate.params)), first_generator(generator, SLOT, candidate, look)
    if kept and bool(kept["labels"].any()) and same_form(kept["weights"], first):
        return {**kept, **_strengths(how, look.round - 1, like)}
    labels = like.new_zeros(look.model.classes)
    return {"weights": first, "optimizer": {}, "labels": labels, **_weights(0.0, 0.0, like)}


def _trained(player: Player, how: GeneratorTraining, own: Tree, counts: Tensor, round: Round) -> Fitted:
    """The generator after the steps of this round."""
    rate = how.training.lr * how.training.lr_decay ** (round.number - 1)
    seed, like = seed_for(round.seed, "generator"), next(leaves(own["weights"]["params"]))
    return round.trainer.take_turns(
        {"generator": replace(player, training=replace(player.training, lr=rate))},
        {"generator": _weights_of(own)},
        draw_requests(how, seen_labels(counts), seed, like),
        {"heads": _heads(round), "shares": label_shares(counts).to(like)},
        seed,
        optimizers={"generator": own.get("optimizer", {}) if how.training.keep_optimizer else {}},
    )["generator"]


def broadcast(state: Tree) -> Tree:
    """What clients receive: the generator's weights and what to make of them; nothing before it was prepared."""
    own = state.get(SLOT)
    if not own:
        return {}
    return {"generator": _weights_of(own)._asdict(), **{slot: own[slot] for slot in RECEIVED}}


def _weights_of(own: Tree) -> Weights:
    return Weights(own["weights"]["params"], own["weights"].get("buffers", {}))


def _heads(round: Round) -> Params:
    """(C, ...) the uploaded heads; everything where the model does not say which parameters are the head's."""
    params = round.uploads.weights.params
    return {name: params[name] for name in round.model.head_names or params}


def _strengths(how: GeneratorTraining, rounds: int, like: Tensor) -> Tree:
    return _weights(how.strength(how.label_weight, rounds), how.strength(how.match_weight, rounds), like)


def _weights(label: float, match: float, like: Tensor) -> Tree:
    return {"label_weight": like.new_tensor(label), "match_weight": like.new_tensor(match)}
