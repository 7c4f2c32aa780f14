"""What methods with a generator on the server share: teachers, labels, noise, diversity, how a generator goes on.

A generator is a Model that reads (B, d + K), noise beside a one-hot class, and whose logits are the samples that it
invents, flat: (B, number of values). Make one with models.generators.build_generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.limits import Count, CountOrNone, NotNegative, Positive
from fedstill.core.seeds import normal, numpy_generator, seed_for, to_signed
from fedstill.core.setup import Preparation
from fedstill.core.tree import flatten, leaves, tree_map
from fedstill.core.types import Model, Outlook, Round, Seed, Training, Tree, Weights
from fedstill.methods.data_free.generators import build_generator, check_generator
from fedstill.server.distill.targets import capped

BatchNorm = Literal["train", "frozen", "restore"]
GeneratorFor = Callable[[Model], Model]  # the generator that invents samples (or features) for a run's model
SHOWN, SHOWN_OF_A_CLASS = 100, 10  # samples that people look at, at most: in all, of a class
AT_ONCE = 50  # samples that a generator makes in one go


@dataclass(frozen=True)
class Generator:
    """The generator on the server and how it learns.

    Args:
        network: "conv", "conv_paper", "deconv", "small" or "table"; for features "dense", "features" or
            "features_large"; "auto" goes by the shape of a sample.
        noise: random numbers that a sample is made of (d).
        steps: steps of its Adam in a turn.
        lr: learning rate in the first round.
        lr_decay: factor of the rate from round to round.
        weight_decay: of the generator.
        lam_cls: weight of the teachers' cross-entropy in its loss (lambda_cls).
        lam_dis: weight of the diversity in its loss (lambda_dis).
    """

    network: str = "auto"
    noise: Count = 100
    steps: CountOrNone = 1
    lr: Positive = 0.01
    lr_decay: Positive = 0.998
    weight_decay: NotNegative = 0.0
    lam_cls: NotNegative = 1.0
    lam_dis: NotNegative = 1.0

    def invents(self, *, features: bool = False) -> GeneratorFor:
        """Return the function that builds this network for a run's model: of its inputs, or of its features."""
        name = check_generator(self.network)

        def made(model: Model) -> Model:
            shape, inputs = ((model.feature_size,), model.input_shape) if features else (model.input_shape, ())
            return build_generator(name, shape=shape, classes=model.classes, noise=self.noise, inputs=inputs)

        return made


@dataclass(frozen=True)
class InventedStudent:
    """How the averaged model learns from invented samples.

    Args:
        steps: steps of its SGD in a turn.
        lr: learning rate in the first round.
        lr_decay: factor of the rate from round to round.
        weight_decay: of the model.
        batch_norm: "frozen", eval mode (dropout too); "restore", train mode, and the averaged statistics afterwards;
            "train", its statistics become those of invented samples, as in FedFTG's code, which costs accuracy.
    """

    steps: CountOrNone = 5
    lr: Positive = 0.1
    lr_decay: Positive = 0.998
    weight_decay: NotNegative = 1e-3
    batch_norm: BatchNorm = "frozen"


def turn_of(learner: Generator | InventedStudent, batch_size: int, **changes: Any) -> Training:
    """Return the training of a generator (Adam) or of a student (SGD)."""
    optimizer = "adam" if isinstance(learner, Generator) else "sgd"
    common = {key: getattr(learner, key) for key in ("steps", "lr", "lr_decay", "weight_decay")}
    return Training(**{**common, "optimizer": optimizer, "batch_size": batch_size, **changes})


def with_samples(round: Round) -> Round:
    """The round as if clients without a sample had not come: whatever they sent, NaN too, goes nowhere."""
    here = (round.uploads.size > 0).nonzero().flatten()
    if len(here) == len(round.uploads.size):
        return round

    def kept(leaf: Tensor | None) -> Tensor | None:
        return None if leaf is None else leaf.index_select(0, here.to(leaf.device))

    return replace(round, uploads=tree_map(kept, round.uploads))


def label_counts(round: Round) -> Tensor:
    """(C, K) of the cohort, float64 so that sums stay finite; at least 0: counts with noise may be negative."""
    counts = round.uploads.label_counts
    assert counts is not None, "the step declares Need.LABEL_COUNTS_UPLOADED"
    return counts.double().clamp_min(0.0)


def class_shares(counts: Tensor) -> Tensor:
    """alpha_k^y = n_k^y / (n^y + 1e-6), n^y = sum_j n_j^y: how much client k counts for class y; (C, K).

    0 for a class that nobody of the cohort has.
    """
    return counts / (counts.sum(0) + 1e-6)


def teacher_shares(round: Round, *, by_class: bool, largest_share: float | None = None) -> Tensor:
    """(C, K) how much client k counts for class y: its share of the class, or all alike; alike where nobody has it.

    largest_share: see `capped`.
    """
    like, cohort = next(leaves(round.start)), len(round.uploads.ids)
    even = like.new_full((cohort, round.model.classes), 1.0 / cohort)
    if not by_class:
        return even
    counts = label_counts(round)
    return capped(torch.where(counts.sum(0) > 0, class_shares(counts).to(like), even), largest_share)


def wanted_classes(round: Round, *, quota: bool) -> Tensor:
    """(K,) in which proportions classes are asked for: as the cohort holds them, or all alike."""
    like = next(leaves(round.start))
    return label_counts(round).sum(0) if quota else like.new_ones(round.model.classes)


def quota_labels(counts: Tensor, total: int, seed: Seed) -> Tensor:
    """`total` labels in the exact proportions of the class counts (K,), shuffled: bounds floor(total cumsum(p)).

    Classes with no sample are never asked for; with no sample at all every class is as likely.
    """
    share = counts.double().cpu().numpy()
    share = share if share.sum() > 0 else np.ones_like(share)
    bounds = np.floor(np.cumsum(share) / share.sum() * total + 1e-9).astype(np.int64)
    bounds[np.flatnonzero(share)[-1] :] = total
    labels = np.repeat(np.arange(len(share)), np.diff(bounds, prepend=0))
    return torch.from_numpy(numpy_generator(seed).permutation(labels)).to(counts.device)


def gaussian_noise(seed: Seed, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """N(0, 1), the same on every device."""
    drawn = normal(torch.tensor(to_signed(seed_for(seed, "noise")), device=like.device), shape)
    return drawn.to(like.dtype)


def asked_for(z: Tensor, y: Tensor, classes: int) -> Tensor:
    """(..., d + K): noise z (..., d) beside one-hot classes y (...)."""
    kinds = torch.arange(classes, device=y.device)
    return torch.cat([z, (y.unsqueeze(-1) == kinds).to(z.dtype)], dim=-1)


def diversity(x: Tensor, z: Tensor) -> Tensor:
    """exp(-mean_{i, j} d_z(i, j) d_x(i, j)), d_z the mean square and d_x the mean absolute difference of two rows.

    1 when all samples are equal. FedFTG prints 2-norms, not means: with 3 x 32 x 32 pixels that is 0 in float32.
    """
    flat = x.flatten(1)
    apart_z = (z.unsqueeze(0) - z.unsqueeze(1)).square().mean(-1)
    apart_x = torch.stack([(flat - row).abs().mean(-1) for row in flat.unbind()])
    return torch.exp(-(apart_z * apart_x).mean())


def invent(generator: Model, weights: Weights, classes: int, *, z: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, ...) what a generator in eval mode makes of noise z (B, d) and classes y (B,)."""
    output, _ = generator.apply(weights, asked_for(z, y, classes), training=False)
    return output.logits.reshape(-1, *shape)


@torch.no_grad()
def invent_many(
    generator: Model, weights: Weights, classes: int, *, z: Tensor, y: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """`invent` for any number of samples, some at a time; outside the engine: float32 is as torch is set (TF32)."""
    pieces = zip(torch.split(z, AT_ONCE), torch.split(y, AT_ONCE), strict=True)
    return torch.cat([invent(generator, weights, classes, z=some, y=kinds, shape=shape) for some, kinds in pieces])


def shown_samples(generator: Model, weights: Weights, model: Model, noise: int) -> Tree:
    """The slot "samples": a few samples of the generator for people to look at, always of the same noise.

    Ten of each class; fewer where that is more than a hundred, of more than a hundred classes one of the first hundred.
    """
    like, each = next(leaves(weights)), max(1, min(SHOWN_OF_A_CLASS, SHOWN // model.classes))
    y = torch.arange(min(model.classes, SHOWN), device=like.device).repeat_interleave(each)
    z = gaussian_noise(seed_for(0, "shown"), (len(y), noise), like)
    return {"x": invent_many(generator, weights, model.classes, z=z, y=y, shape=model.input_shape), "y": y}


def generator_of(state: Tree, slot: str) -> Weights:
    kept = state.get(slot)
    if not kept:
        raise FedstillError("this server step was not prepared: call its `prepare` before its first round")
    return Weights(kept["params"], kept.get("buffers", {}))


def first_generator(generator: GeneratorFor, slot: str, candidate: Weights, preparation: Preparation) -> Tree:
    """The generator that a run starts with, in the candidate's precision and place; another one for every slot."""
    like = next(leaves(candidate))
    made = generator(preparation.model).init(seed_for(preparation.seed, "generator", slot))
    return tree_map(lambda leaf: leaf.to(like) if leaf.is_floating_point() else leaf.to(like.device), made)._asdict()


def same_form(kept: Tree, fresh: Tree) -> bool:
    """Whether a generator that an earlier phase trained can go on as the other would start."""
    forms = [{name: (leaf.shape, leaf.dtype) for name, leaf in flatten(tree).items()} for tree in (kept, fresh)]
    return forms[0] == forms[1]


def prepared_generator(
    generator: GeneratorFor, slot: str, candidate: Weights, state: Tree, preparation: Preparation
) -> Tree:
    """A first generator; the one that an earlier phase of the run left in this slot, if it has the same form."""
    first, kept = first_generator(generator, slot, candidate, preparation), state.get(slot) or {}
    return kept if same_form(kept, first) else first


WORDS = (
    "a generator invents numbers, not words: for text use fedftg with method.input = 'feature', which invents what "
    "the last layer reads, or a method without a generator"
)


def refuse_text_and_heads(outlook: Outlook) -> None:
    """Of a step whose student learns from whole samples that were invented."""
    if outlook.tokenizer is not None:
        raise FedstillError(WORDS)
    if outlook.part == "head":
        raise FedstillError(
            "local.part = 'head' leaves the extractor as it is, and a student that learns from invented samples moves "
            "it: use fedftg(input='feature'), which invents what the head reads"
        )


def check_fit(generator: GeneratorFor, outlook: Outlook) -> None:
    """Refuse, before the run starts, a generator that cannot invent what the run's model reads."""
    if outlook.model is not None:
        generator(outlook.model)
