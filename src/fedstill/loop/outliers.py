"""What honest uploads look like, learnt from those that were accepted, and which upload is far from it.

Each upload gives a few sizes: how far its model moved, its number of samples, the product of the two, the norm of each
slot that it sends beside the model. Sizes are compared by their logarithms, because honest clients differ by factors.
The middle of a cohort is the median, and its spread is the median distance from it. A minority of hostile uploads moves
neither by much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedstill.core.tree import leaves
from fedstill.core.types import Params, Tree, Uploads, Weights

SPREADS = 10.0  # an upload so many spreads from the middle is far; the widest honest one in our trials was 8 away
WIDEST = 1e4  # however much clients differ, an upload so many times as large as the middle is far
PAST_ROUNDS = 9  # that say with the present one what is honest
LEAST = 3  # uploads of one cohort, or earlier cohorts, that say something about another upload
NORMAL = 1.4826  # the standard deviation of a normal distribution, in median distances
TWO_SIDED = ("steps", "travel")  # servers divide by them, so a tiny one is as bad as a huge one

Scale = Mapping[str, Sequence[float]]  # size -> (middle, spread) of the logarithms


def sizes_of(uploads: Uploads, start: Weights) -> dict[str, Tensor]:
    """Return the sizes of each upload (C,) by name; NaN or Inf where the upload holds one, or an overflow."""
    sizes = {"move": norms(uploads.weights.params, start.params)}
    if any(leaf.is_floating_point() for leaf in start.buffers.values()):
        sizes["buffers"] = norms(uploads.weights.buffers, start.buffers)
    return {
        **sizes,
        **slot_norms(uploads.extra),
        "size": uploads.size,
        "size times move": uploads.size * sizes["move"].double(),  # how far it pulls a mean that is weighted by size
        "steps": uploads.steps,
        "travel": uploads.travel,
    }


def slot_norms(tree: Tree) -> dict[str, Tensor]:
    """Return (C,) the norm of each slot of stacked trees."""
    slots = {slot: [leaf for leaf in leaves(part) if leaf.is_floating_point()] for slot, part in tree.items()}
    return {f"the norm of '{slot}'": _root(floats) for slot, floats in slots.items() if floats}


def norms(tree: Params, start: Params) -> Tensor:
    """Return (C,) ||x_i - start||_2 over all floating-point tensors."""
    return _root([tree[name] - leaf for name, leaf in start.items() if leaf.is_floating_point()])


def _root(floats: Sequence[Tensor]) -> Tensor:
    return torch.stack([per_client(leaf.square(), torch.sum) for leaf in floats]).sum(dim=0).sqrt()


def per_client(leaf: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce all but the first dimension; by dimensions and not by a reshape, which would copy channels-last."""
    return leaf if leaf.ndim == 1 else reduce(leaf, dim=tuple(range(1, leaf.ndim)))


def scale_of(sizes: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """Return the middle and the spread of each size of a cohort; no size that is 0 everywhere is in it."""
    scale = {}
    for name, values in sizes.items():
        logs = _logarithms(values)
        logs = logs[np.isfinite(logs)]
        if len(logs):
            middle = float(np.median(logs))
            scale[name] = [middle, NORMAL * float(np.median(np.abs(logs - middle)))]
    return scale


def outliers(sizes: Mapping[str, np.ndarray], past: Sequence[Scale], factor: float) -> dict[int, str]:
    """Return the place of each upload that is far from the middle of the last rounds and this one, with the reason.

    past: the scales of the rounds before. factor: within this factor of the middle nothing is far.
    """
    far: dict[int, str] = {}
    present = scale_of(sizes)
    for name, values in sizes.items():
        known = [scale[name] for scale in (*past, present) if name in scale]
        if not known or len(known) <= LEAST > len(values):
            continue
        middles, spreads = np.asarray(known).T
        middle = np.median(middles)
        spread = max(np.median(spreads), NORMAL * np.median(np.abs(middles - middle)))
        reach = max(math.log(factor), min(SPREADS * float(spread), math.log(WIDEST)))
        away = _logarithms(values) - middle
        wrong = ~(away <= reach)  # NaN compares false
        if name in TWO_SIDED:
            wrong |= ~(away >= -reach)
        for place in np.flatnonzero(wrong).tolist():
            far.setdefault(
                place,
                f"{name} {values[place]:.3g} is far from the {math.exp(middle):.3g} in the middle of the last cohorts: "
                f"at most a factor of {math.exp(reach):.3g} is accepted",
            )
    return far


def _logarithms(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: np.ndarray = np.log(values.astype(np.float64))
    return logs
