"""A generator of features that the uploaded heads recognise, sent to the clients (FedGen)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.limits import Count, NotNegative, Positive, Several
from fedstill.core.seeds import numpy_generator, seed_for, to_signed, uniform
from fedstill.core.setup import Preparation
from fedstill.core.trainer import Fitted
from fedstill.core.tree import full_precision, leaves
from fedstill.core.types import (
    Batch,
    Local,
    Model,
    Need,
    Objective,
    Output,
    Params,
    Player,
    Round,
    Scene,
    Seed,
    ServerStep,
    Stage,
    Training,
    Tree,
    Weights,
)
from fedstill.local.distillation import masked_distillation_loss, target_mask
from fedstill.methods.data_free.inventing import (
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
from fedstill.server.distill.targets import capped

NoiseKind = Literal["uniform", "normal"]
ClassWeights = Literal["sample", "uniform"]
SLOT = "feature_generator"  # not "generator": another method's, beside it or in the phase before, is its own
RECEIVED = ("labels", "label_weight", "match_weight")


@dataclass(frozen=True)
class FeatureGenerator:
    """The generator of features on the server and how it learns each round.

    Args:
        network: "dense" (the authors', 256 wide), "features" or "features_large" (FedFTG's).
        noise: numbers that a feature is made of (z).
        noise_kind: "uniform" in [0, 1), as in the code, or "normal".
        steps: steps of its Adam each round.
        batch_size: samples in a step.
        lr: learning rate in the first round.
        lr_decay: factor of the rate from round to round.
        weight_decay: of the generator.
        diversity: weight of L_div (eta).
        keep_optimizer: Adam's memory goes on from round to round; false: it starts afresh.
    """

    network: str = "dense"
    noise: Count = 32
    noise_kind: NoiseKind = "uniform"
    steps: Count = 50
    batch_size: Several = 32
    lr: Positive = 3e-4
    lr_decay: Positive = 0.98
    weight_decay: NotNegative = 1e-2
    diversity: NotNegative = 1.0
    keep_optimizer: bool = True

    @property
    def training(self) -> Training:
        keys = ("steps", "batch_size", "lr", "lr_decay", "weight_decay", "keep_optimizer")
        return Training(optimizer="adam", **{key: getattr(self, key) for key in keys})


def each_by_its_own(share: Tensor) -> Tensor:
    """Return the shares (C, B) as they are: every sample's cross-entropy counts by the share of its class."""
    return share


@dataclass(frozen=True)
class GeneratorTraining:
    """How the server trains its generator each round, and how much clients are to make of it.

    class_weights: each sample's cross-entropy counts by the share of its class ("sample"); "uniform" asks for no label
        counts: all clients count alike and every class is asked for.
    label_weight, match_weight: a and b of round 1; in round t max(floor, a decay^(t - 1)). 0 stays 0.
    spread: the shares (C, B) of a batch -> the shares that its cross-entropies count by.
    largest_share: most that a client counts for a class, in even shares; see `capped`.
    """

    generator: FeatureGenerator = FeatureGenerator()
    class_weights: ClassWeights = "sample"
    label_weight: float = 10.0
    match_weight: float = 10.0
    decay: float = 0.98
    floor: float = 1e-4
    spread: Callable[[Tensor], Tensor] = each_by_its_own
    largest_share: float | None = None

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
    """Draw the requests of a round's steps: noise "z" (S, B, d) and classes "y" (S, B), alike among the `asked`."""
    shape = (how.generator.steps, how.generator.batch_size)
    y = numpy_generator(seed_for(seed, "labels")).choice(asked.nonzero().flatten().cpu().numpy(), shape)
    return {
        "z": _noise(how.generator, seed, (*shape, how.generator.noise), like),
        "y": torch.from_numpy(y).to(like.device),
    }


def _noise(how: FeatureGenerator, seed: Seed, shape: tuple[int, ...], like: Tensor) -> Tensor:
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

    def loss(weights: Weights, scene: Scene) -> tuple[Tensor, Params]:
        z, y = scene.drawn["z"], scene.drawn["y"]
        made, buffers = generator.apply(weights, asked_for(z, y, model.classes), training=True)
        logits = full_precision(each_head(scene.given["heads"], made.logits))  # (C, B, K)
        wanted = y.expand(len(logits), -1).unsqueeze(-1)
        losses = -torch.log_softmax(logits, -1).gather(-1, wanted).squeeze(-1)
        share = how.spread(scene.given["shares"].index_select(1, y))  # (C, B)
        varied = diversity(full_precision(made.logits), full_precision(z))
        return (share * losses).mean(1).sum() + how.generator.diversity * varied, buffers

    return Player(loss, replace(how.generator.training, steps=1))


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
        slots, like, round = state[SLOT], next(leaves(candidate.params)), with_samples(round)
        counts = label_counts(round) if counted else like.new_ones(len(round.uploads.ids), round.model.classes)
        seen = seen_labels(counts)
        if not bool(seen.any()):
            trained = bool(slots["labels"].any())
            return candidate, {SLOT: {**slots, **(_strengths(how, round.number, like) if trained else {})}}
        fitted = _trained(player_for(round.model), how, slots, counts, round)
        round.metrics[f"{SLOT}_loss"] = float(fitted.loss)
        after = {
            "weights": fitted.weights._asdict(),
            "optimizer": fitted.optimizer if how.generator.keep_optimizer else {},
            "labels": torch.maximum(slots["labels"], seen.to(slots["labels"])),
        }
        return candidate, {SLOT: {**after, **_strengths(how, round.number, like)}}

    needs = {Need.HEAD, Need.FEATURES, Need.INDIVIDUAL_UPLOADS, Need.ONE_ARCHITECTURE}
    if counted:
        needs.add(Need.LABEL_COUNTS_UPLOADED)
    return ServerStep(
        SLOT,
        apply,
        lambda _: {SLOT: {}},
        broadcast,
        needs=frozenset(needs),
        stage=Stage.KEEP,
        prepare=prepare,
        check=partial(check_fit, generator),
    )


def _prepared(
    generator: GeneratorFor, how: GeneratorTraining, kept: Tree | None, candidate: Weights, look: Preparation
) -> Tree:
    """A first generator, which counts nothing yet; or one that an earlier phase has trained, if it is alike."""
    like, first = next(leaves(candidate.params)), first_generator(generator, SLOT, candidate, look)
    if kept and bool(kept["labels"].any()) and same_form(kept["weights"], first):
        return {**kept, **_strengths(how, look.round - 1, like)}
    labels = like.new_zeros(look.model.classes)
    return {"weights": first, "optimizer": {}, "labels": labels, **_weights(0.0, 0.0, like)}


def _trained(player: Player, how: GeneratorTraining, slots: Tree, counts: Tensor, round: Round) -> Fitted:
    """The generator after the steps of this round."""
    rate = how.generator.lr * how.generator.lr_decay ** (round.number - 1)
    seed, like = seed_for(round.seed, "generator"), next(leaves(slots["weights"]["params"]))
    return round.trainer.take_turns(
        {"generator": replace(player, training=replace(player.training, lr=rate))},
        {"generator": _weights_of(slots)},
        draw_requests(how, seen_labels(counts), seed, like),
        {"heads": _heads(round), "shares": capped(label_shares(counts), how.largest_share).to(like)},
        seed,
        optimizers={"generator": slots.get("optimizer", {}) if how.generator.keep_optimizer else {}},
    )["generator"]


def broadcast(state: Tree) -> Tree:
    """Return the slots that clients receive: the generator's weights and their use; none before it was prepared."""
    slots = state.get(SLOT)
    if not slots:
        return {}
    return {"generator": _weights_of(slots)._asdict(), **{slot: slots[slot] for slot in RECEIVED}}


def _weights_of(slots: Tree) -> Weights:
    return Weights(slots["weights"]["params"], slots["weights"].get("buffers", {}))


def _heads(round: Round) -> Params:
    """(C, ...) the uploaded heads; everything where the model does not say which parameters are the head's."""
    params = round.uploads.weights.params
    return {name: params[name] for name in round.model.head_names or params}


def _strengths(how: GeneratorTraining, rounds: int, like: Tensor) -> Tree:
    return _weights(how.strength(how.label_weight, rounds), how.strength(how.match_weight, rounds), like)


def _weights(label: float, match: float, like: Tensor) -> Tree:
    return {"label_weight": like.new_tensor(label), "match_weight": like.new_tensor(match)}


_STREAM = to_signed(seed_for(0, "generated features"))  # a step's dropout draws from the same seed


def row_noise(seed: Tensor, rows: int, size: int, kind: NoiseKind) -> Tensor:
    """(rows, size) of U[0, 1) or N(0, 1); a row does not depend on how many follow it, so that padding does not."""
    if kind == "uniform":
        return uniform(seed, (rows, size))
    first, second = uniform(seed, (rows, 2, size)).unbind(1)
    return torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)


def labels_among(seed: Tensor, rows: int, known: Tensor) -> Tensor:
    """(rows,) classes, each as likely as any other that `known` (K,) has a 1 for; shapes do not depend on values."""
    below = known.cumsum(-1)
    place = uniform(seed, (rows, 1)).to(known.dtype) * below[..., -1:]
    return (place >= below).sum(-1).clamp_max(known.shape[-1] - 1)


def generated_logits(model: Model, inventor: Model, z: Tensor, y: Tensor, weight: Tensor, local: Local) -> Tensor:
    """(B, K) of the head for features that the received generator makes of z (B, d) for the classes y.

    Where the weight is 0 they are those of zero features: finite whatever the generator says.
    """
    assert model.head is not None  # declared as a need
    received = local.received["generator"]
    like = next(iter(received["params"].values()))
    asked = torch.cat([z.to(like), target_mask(y, local.received["labels"].shape[-1]).to(like)], dim=-1)
    made, _ = inventor.apply(Weights(received["params"], received.get("buffers", {})), asked, training=False)
    return full_precision(model.head(local.params, torch.where(weight > 0, made.logits, 0.0)))


def generated_features(
    generator: Callable[[Model], Model],
    *,
    noise: int,
    noise_kind: NoiseKind = "uniform",
    count: int = 32,
    ratio: float = 1.0,
    label_term: bool = True,
    match_term: bool = True,
) -> Objective:
    """r a CE(h(G(z, y')), y') + b KL(softmax h(G(z', y)) || softmax h(f(x))): invented features teach (FedGen).

    h is the model's head, f its extractor, G the received generator in eval mode, z noise, y' `count` labels drawn
    alike among the known ones, y those of the batch. The first part moves the head only: G's features pass no
    extractor. The target of the second gets no gradient. With weights a = b = 0, as before the generator has been
    trained, both are 0 to the last bit, whatever G says.

    ratio: r. label_term, match_term: whether the first and the second part are there.
    Slots: receives "generator" (params, buffers), "labels" ((K,) 1 for a known class), "label_weight" (a) and
    "match_weight" (b). It must be bound to a model: see Objective.bind.
    """
    needs = frozenset({Need.HEAD, Need.FEATURES})

    def bind(model: Model) -> Objective:
        inventor = generator(model)

        def label_loss(seed: Tensor, local: Local) -> Tensor:
            weight: Tensor = local.received["label_weight"]
            y, z = labels_among(seed, count, local.received["labels"]), row_noise(seed + 1, count, noise, noise_kind)
            logits = generated_logits(model, inventor, z, y, weight, local)
            return -ratio * weight * F.log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).mean()

        def match_loss(output: Output, batch: Batch, seed: Tensor, local: Local) -> Tensor:
            weight: Tensor = local.received["match_weight"]
            z = row_noise(seed + 2, len(batch.y), noise, noise_kind)
            target = generated_logits(model, inventor, z, batch.y, weight, local)
            return weight * weighted_mean(masked_distillation_loss(output.logits, target), batch.weight)

        def loss(output: Output, batch: Batch, local: Local) -> Tensor:
            seed = local.seed ^ _STREAM
            parts = [label_loss(seed, local)] if label_term else []
            parts += [match_loss(output, batch, seed, local)] if match_term else []
            return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

        return Objective(loss, needs=needs)

    return Objective(_unbound, needs=needs, bind=bind)


def _unbound(output: Output, batch: Batch, local: Local) -> NoReturn:
    raise FedstillError("this term calls the head of a model: bind it to one with compose.combine.bound_to first")
