"""SimCLR: an extractor learns to tell two views of one image from the views of all others in the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.compose.combine import weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for, torch_generator
from fedstill.core.setup import Preparation
from fedstill.core.tree import full_precision
from fedstill.core.types import (
    Apply,
    Batch,
    Local,
    Model,
    Need,
    Objective,
    Outlook,
    Output,
    Params,
    Seed,
    Training,
    Weights,
)
from fedstill.server.pretrain import Pretext, Probe

HIDDEN, SCALE, SHIFT, LAST, LAST_BIAS = (
    f"simclr_projection.{name}" for name in ("hidden.weight", "norm.weight", "norm.bias", "last.weight", "last.bias")
)
PROJECTION = (HIDDEN, SCALE, SHIFT, LAST, LAST_BIAS)
EPSILON = 1e-5  # of its BatchNorm
SECOND_VIEW = 0x5851F42D4C957F2D  # takes a step's seed to that of its second view (dropout)


def simclr_pretext(
    training: Training, *, temperature: float = 0.5, projection: int = 128, hidden: int = 512
) -> Pretext:
    """Tell the other view of an image from the views of all others in the batch, by projected features (NT-Xent)."""
    task = Pretext(
        "simclr",
        lambda model: projected(model, projection=projection, hidden=hidden),
        nt_xent(temperature),
        replace(training, augment=("views",)),
        no_labels,
        {"temperature": temperature, "projection": projection, "hidden": hidden},
        frozenset({Need.FEATURES}),
    )

    def suited(outlook: Outlook) -> Pretext:
        if outlook.unlabeled is not None:
            check_images(outlook.unlabeled)
        return task

    return replace(task, suited=suited)


def no_labels(x: Tensor) -> Tensor:
    """Zeros in the place of labels."""
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


def check_images(x: Tensor) -> None:
    """Refuse samples that are no images, and a single image, because its views have no others to differ from."""
    if x.ndim != 4:
        text = x.ndim == 2 and not x.is_floating_point()
        cure = "on text use masked_lm or next_token" if text else "leave simclr out"
        shape = tuple(x.shape[1:])
        raise FedstillError(f"simclr needs images as unlabeled data, but samples have shape {shape}: {cure}")
    if len(x) < 2:
        raise FedstillError(f"simclr needs at least 2 unlabeled images, and there is {len(x)}: raise data.unlabeled")
    if x.is_floating_point() and (float(x.min()) < 0.0 or float(x.max()) > 1.0):
        raise FedstillError("simclr changes colours on a scale from 0 to 1: give images as bytes or on that scale")


def nt_xent(temperature: float = 0.5) -> Objective:
    """The normalised temperature-scaled cross-entropy over z = Output.logits (B, 2 D), two unit vectors a sample.

        l_i = -ln( exp(<z_i, z_j(i)> / t) / sum_{k != i} exp(<z_i, z_k> / t) ),   mean over all 2 B views i

    j(i) is the other view of the same sample; padding is neither i nor k.

    >>> one = torch.tensor([1.0, 0.0])  # two samples, whose views agree and are orthogonal to the other's: t = 1
    >>> z = torch.stack([torch.cat([one, one]), torch.cat([one.flip(0), one.flip(0)])])
    >>> batch = Batch(z, z, torch.ones(2))
    >>> round(float(nt_xent(1.0).loss(Output(z, z), batch, None)), 4)  # ln((e + 2) / e)
    0.5514
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        real = batch.weight > 0
        first, second = torch.where(real.unsqueeze(1), full_precision(output.logits), 0.0).chunk(2, dim=1)
        both = torch.cat([first, second])  # (2 B, D)
        with torch.autocast(both.device.type, enabled=False):  # bfloat16 would leave two digits of a similarity
            similar = both @ both.T / temperature
        itself = torch.eye(len(both), dtype=torch.bool, device=both.device)
        others = similar.masked_fill(itself | ~torch.cat([real, real]), float("-inf")).logsumexp(1)
        positive = (first * second).sum(1) / temperature
        each = torch.where(real, others.reshape(2, -1).mean(0) - positive, 0.0)
        return weighted_mean(each, batch.weight)

    return Objective(loss)


def projected(model: Model, *, projection: int = 128, hidden: int = 512) -> Model:
    """Return the run's model on two views (B, 2 channels, H, W), with a projection of its features to the unit sphere.

        z = p / ||p||,  p = W_2 relu(BN(W_1 h)) + b_2,   W_1 (hidden, F) without a bias, W_2 (projection, hidden)

    Output: logits (B, 2 projection) and features (B, 2 F), one view after the other. The views pass one after another,
    so that BatchNorm sees each on its own, as in the reference code. The projection's BatchNorm always takes the
    batch's statistics: it is used in training only.
    """
    if not model.traits.features or not model.head_names:
        raise FedstillError(f"simclr cannot pre-train {model.name}: its features and its head cannot be separated")

    def init(seed: Seed) -> Weights:
        weights = model.init(seed_for(seed, "extractor"))
        width = weights.params[model.head_names[0]].shape[-1]
        return weights._replace(params={**weights.params, **_first_projection(width, hidden, projection, seed)})

    return replace(
        model,
        name=f"simclr({model.name})",
        init=init,
        apply=_two_views(model),
        head=None,
        head_names=(),
        traits=model.traits._replace(stacks_on_gpu=False, batch_statistics=True),
        recipe=None,
    )


def _first_projection(width: int, hidden: int, projection: int, seed: Seed) -> Params:
    """PyTorch's own initialisation: linear layers U(-1 / sqrt(fan in), 1 / sqrt(fan in)), BatchNorm 1 and 0."""

    def linear(name: str, fan_in: int, *shape: int) -> Tensor:
        draws = torch.rand(*shape, generator=torch_generator(seed_for(seed, name)))
        return (2.0 * draws - 1.0) / math.sqrt(fan_in)

    return {
        HIDDEN: linear(HIDDEN, width, hidden, width),
        SCALE: torch.ones(hidden),
        SHIFT: torch.zeros(hidden),
        LAST: linear(LAST, hidden, projection, hidden),
        LAST_BIAS: linear(LAST_BIAS, hidden, projection),
    }


def _two_views(model: Model) -> Apply:
    def apply(
        weights: Weights, x: Tensor, *, training: bool = False, weight: Tensor | None = None, seed: Tensor | None = None
    ) -> tuple[Output, Params]:
        head = {name: weights.params[name] for name in PROJECTION}
        extractor = Weights({n: p for n, p in weights.params.items() if n not in head}, weights.buffers)
        outputs: list[Output] = []
        for view in x.chunk(2, dim=1):
            mask = weight if model.traits.batch_statistics else None
            output, buffers = model.apply(extractor, view, training=training, weight=mask, seed=seed)
            outputs.append(Output(_project(head, output.features, weight), output.features))
            extractor, seed = extractor._replace(buffers=buffers), None if seed is None else seed ^ SECOND_VIEW
        return Output(*(torch.cat(pair, dim=1) for pair in zip(*outputs, strict=True))), extractor.buffers

    return apply


def _project(head: Params, features: Tensor, weight: Tensor | None) -> Tensor:
    h = full_precision(features @ head[HIDDEN].T)
    if weight is None and len(h) > 1:
        h = F.batch_norm(h, None, None, head[SCALE], head[SHIFT], True, 0.0, EPSILON)
    else:
        real = h.new_ones(len(h)) if weight is None else weight.to(h.dtype)
        h = _masked_norm(h, real) * head[SCALE] + head[SHIFT]
    return F.normalize(full_precision(F.linear(torch.relu(h), head[LAST], head[LAST_BIAS])), dim=-1)


def _masked_norm(h: Tensor, weight: Tensor) -> Tensor:
    """Return (h - mean) / sqrt(variance + epsilon) over the rows of weight 1; other rows are 0."""
    real, count = weight.unsqueeze(1), weight.sum().clamp_min(1.0)
    h = torch.where(real > 0, h, 0.0)
    centred = (h - h.sum(0) / count) * real
    return centred * torch.rsqrt(centred.square().sum(0) / count + EPSILON)


BANK, QUERIES = 50_000, 10_000  # at most: the reference code's numbers for CIFAR-10
QUERY_SHARE = 0.2
QUERIES_AT_ONCE = 512


def neighbour_accuracy(
    bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor, *, k: int = 200, temperature: float = 0.5
) -> float:
    """Return the share of the queries whose nearest neighbours vote for their class.

        vote for c: sum over the k nearest j with label c of exp(cos(f, f_j) / temperature)

    bank (n, F) with labels (n,), queries (m, F) with truth (m,). With fewer than k samples in the bank, all vote.
    """
    bank, queries = (F.normalize(full_precision(part), dim=1) for part in (bank, queries))
    classes = int(torch.maximum(labels.max(), truth.max())) + 1
    right = torch.zeros((), dtype=torch.int64, device=bank.device)
    for some, answer in zip(*(torch.split(part, QUERIES_AT_ONCE) for part in (queries, truth)), strict=True):
        near = (some @ bank.T).topk(min(k, len(bank)), dim=1)
        votes = torch.zeros(len(some), classes, dtype=some.dtype, device=some.device)
        votes.scatter_add_(1, labels[near.indices], (near.values / temperature).exp())
        right += (votes.argmax(1) == answer).sum()
    return int(right) / max(len(queries), 1)


def neighbour_probe(*, k: int = 200, temperature: float = 0.5) -> Probe:
    """Report knn_accuracy of an extractor's features, in eval mode, where a simulation knows labels.

    A fifth of the samples are queries (at most 10,000), the others the bank (at most 50,000): the same in every run.
    """

    def probe(weights: Weights, preparation: Preparation) -> dict[str, float]:
        if preparation.labeled is None:
            return {}
        x, y = preparation.labeled
        known = (y >= 0).nonzero().flatten().cpu()
        shuffled = known[torch.randperm(len(known), generator=torch_generator(seed_for(0, "neighbours")))]
        count = min(int(QUERY_SHARE * len(known)), QUERIES)
        if count == 0:
            return {}
        features = preparation.trainer.outputs(weights, x).features
        y, rows = y.to(features.device), shuffled.to(features.device)
        queries, bank = rows[:count], rows[count : count + BANK]
        accuracy = neighbour_accuracy(
            features[bank], y[bank], features[queries], y[queries], k=k, temperature=temperature
        )
        return {"knn_accuracy": accuracy}

    return probe
