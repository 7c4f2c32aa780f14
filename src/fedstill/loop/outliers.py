"""What honest uploads look like, learnt from those that were accepted; which is far from it, and which is too long.

Each upload gives a few sizes: how far its model moved, its number of samples, the product of the two, the norm of each
slot that it sends beside the model. Sizes are compared by their logarithms, because honest clients differ by factors.
The middle of a cohort is the median, and its spread is the median distance from it. A minority of hostile uploads moves
neither by much.

An upload that is far is refused (`outliers`). A move or slot that is not far, and longer than any honest one in our
trials, is shortened (`too_long`, `shortened`), because SCAFFOLD's control and a server's moments keep what they took.
Here the middle is this cohort's own: honest lengths may fall from round to round, and then the middle of ten rounds is
several times too large.

Nobody is refused for a number that it claims, unless it is WIDEST times the middle, because an honest client may hold
one row beside clients with thousands, or thousands beside clients with one. A claim that is wider than those of earlier
rounds is lowered (`believed`). It must be wider beside its cohort and larger by itself, because the middle of a small
cohort says little. The second widest of these rounds counts, so that one hostile upload widens nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedstill.core.tree import leaves, tree_map
from fedstill.core.types import Params, Tree, Uploads, Weights

SPREADS = 10.0  # an upload so many spreads from the middle is far; the widest honest one in our trials was 8 away
LONG = 8.0  # so many spreads above the middle of its own cohort an upload is too long; the widest honest one was 7.1
WIDEST = 1e4  # however much clients differ, an upload so many times as large as the middle is far
PAST_ROUNDS = 9  # that say with the present one what is honest
LEAST = 3  # uploads of one cohort, or earlier cohorts, that say something about another upload
NORMAL = 1.4826  # the standard deviation of a normal distribution, in median distances
MOVE, BUFFERS = "move", "buffers"  # how far the parameters moved, and the BatchNorm statistics
SIZE, COUNTS, STEPS, TRAVEL = "size", "label counts", "steps", "travel"
PULL = "size times move"  # how far an upload pulls a mean that is weighted by size
PACE = "move per travel"  # how far it pulls FedNova's mean
CLAIMS = (SIZE, COUNTS, STEPS, TRAVEL, PULL, PACE)  # nobody within WIDEST is refused for one of them alone
TWO_SIDED = (STEPS, TRAVEL)  # servers divide by them, so a tiny one is as bad as a huge one
AGAIN = math.log(2.5)  # beyond the second widest of earlier rounds, and a spread; 1 of 6,160 honest rounds was wider
AT_FIRST = math.log(4.0)  # of a pull or a pace beyond the second widest of the cohort, and a spread, in early rounds

# size -> (middle, spread, widest above the middle) of the logarithms; runs of earlier versions lack the third
Scale = Mapping[str, Sequence[float]]


def sizes_of(uploads: Uploads, start: Weights) -> dict[str, Tensor]:
    """Return the sizes of each upload (C,) by name; NaN or Inf where the upload holds one, or an overflow."""
    sizes = {MOVE: norms(uploads.weights.params, start.params)}
    if any(leaf.is_floating_point() for leaf in start.buffers.values()):
        sizes[BUFFERS] = norms(uploads.weights.buffers, start.buffers)
    return {
        **sizes,
        **slot_norms(uploads.extra),
        **({} if uploads.label_counts is None else {COUNTS: uploads.label_counts.double().sum(dim=1)}),
        SIZE: uploads.size,
        STEPS: uploads.steps,
        TRAVEL: uploads.travel,
        PULL: uploads.size * sizes[MOVE].double(),
        PACE: sizes[MOVE].double() / uploads.travel.double(),
    }


def slot_norms(tree: Tree) -> dict[str, Tensor]:
    """Return (C,) the norm of each slot of stacked trees."""
    slots = {slot: [leaf for leaf in leaves(part) if leaf.is_floating_point()] for slot, part in tree.items()}
    return {norm_of(slot): _root(floats) for slot, floats in slots.items() if floats}


def norm_of(slot: str) -> str:
    """Return the name of the size of a slot."""
    return f"the norm of '{slot}'"


def norms(tree: Params, start: Params) -> Tensor:
    """Return (C,) ||x_i - start||_2 over all floating-point tensors."""
    return _root([tree[name] - leaf for name, leaf in start.items() if leaf.is_floating_point()])


def _root(floats: Sequence[Tensor]) -> Tensor:
    return torch.stack([per_client(leaf.square(), torch.sum) for leaf in floats]).sum(dim=0).sqrt()


def per_client(leaf: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce all but the first dimension; by dimensions and not by a reshape, which would copy channels-last."""
    return leaf if leaf.ndim == 1 else reduce(leaf, dim=tuple(range(1, leaf.ndim)))


def scale_of(sizes: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """Return the middle, the spread and the widest of each size of a cohort; one that is 0 everywhere is not in it."""
    scale = {}
    for name, values in sizes.items():
        logs = _logarithms(values)
        logs = logs[np.isfinite(logs)]
        if len(logs):
            middle = float(np.median(logs))
            scale[name] = [middle, NORMAL * float(np.median(np.abs(logs - middle))), float(logs.max()) - middle]
    return scale


def outliers(sizes: Mapping[str, np.ndarray], past: Sequence[Scale], factor: float) -> dict[int, str]:
    """Return the place of each upload that is far from the middle of the last rounds and this one, with the reason.

    A client may claim to have worked several times longer than most. Its move may then be as many times as long, and it
    is shortened. Samples times move count against an upload only if its move is long for its work.

    past: the scales of the rounds before. factor: within this factor of the middle nothing is far.
    """
    far: dict[int, str] = {}
    present = scale_of(sizes)
    work, long = np.zeros(()), np.zeros((), bool)
    if TRAVEL in present and (usual := _usual(TRAVEL, len(sizes[TRAVEL]), past, present, factor)):
        work = np.nan_to_num(_logarithms(sizes[TRAVEL]) - usual[0]).clip(0.0, math.log(WIDEST))
        work = np.where(work > 0.5 * math.log(factor), work, 0.0)
    for name, values in sizes.items():
        usual = _usual(name, len(values), past, present, factor)
        if name == PACE or usual is None:
            continue
        middle, reach = usual
        if name in CLAIMS and name != PULL:
            reach = math.log(WIDEST)
        away = _logarithms(values) - middle - (work if name == MOVE else 0.0)
        wrong = ~(away <= reach)  # NaN compares false
        if name == PULL:
            wrong &= long
        if name == MOVE:
            long = away > 0.5 * math.log(factor)
        for place in np.flatnonzero(wrong).tolist():
            far.setdefault(
                place,
                f"{name} {values[place]:.3g} is far from the {math.exp(middle):.3g} in the middle of the last cohorts: "
                f"at most a factor of {math.exp(reach):.3g} is accepted",
            )
    for name in TWO_SIDED:
        for place in np.flatnonzero(~(sizes.get(name, np.zeros(0)) >= 0.0)).tolist():
            far.setdefault(place, f"{name} {sizes[name][place]:.3g} is below 0")
    return far


def _usual(name: str, count: int, past: Sequence[Scale], present: Scale, factor: float) -> tuple[float, float] | None:
    """Return the middle of the last rounds and this one, and how far from it one of `count` uploads may be.

    None: too few uploads are known to say it.
    """
    known = [scale[name][:2] for scale in (*past, present) if name in scale]
    if not known or len(known) <= LEAST > count:
        return None
    middles, spreads = np.asarray(known).T
    middle = float(np.median(middles))
    spread = max(np.median(spreads), NORMAL * np.median(np.abs(middles - middle)))
    return middle, max(math.log(factor), min(SPREADS * float(spread), math.log(WIDEST)))


def believed(sizes: Mapping[str, np.ndarray], past: Sequence[Scale], factor: float) -> dict[str, tuple[float, float]]:
    """Return the least and the most that is believed of each claim of this cohort.

    past: the scales of the rounds before. factor: as in `outliers`, which no claim exceeds.
    """
    present, limits = scale_of(sizes), {}
    for name in CLAIMS:
        usual = _usual(name, len(sizes[name]), past, present, factor) if name in present else None
        if usual is None:
            continue
        middle, reach = usual
        least = math.exp(middle - reach) if name in TWO_SIDED else 0.0
        logs = np.sort(_logarithms(sizes[name])[np.isfinite(_logarithms(sizes[name]))])
        known = [scale[name] for scale in past if len(scale.get(name, ())) > 2]
        spread = float(np.median([scale[name][1] for scale in (*past, present) if name in scale]))
        here, most = present[name][0] if len(logs) >= LEAST else middle, middle + reach
        if len(known) >= LEAST:
            beyond = sorted(widest for _, _, widest in known)[-2]
            largest = sorted(before + widest for before, _, widest in known)[-2]
            most = min(most, max(here + beyond, largest) + AGAIN + spread)
        elif name in (PULL, PACE) and len(logs) > LEAST:  # the second widest of three is the middle
            most = min(most, float(logs[-2]) + AT_FIRST + spread)
        limits[name] = least, math.exp(max(most, here + AGAIN))
    return limits


def too_long(sizes: Mapping[str, np.ndarray], past: Sequence[Scale], factor: float) -> dict[str, np.ndarray]:
    """Return, for each size that is too long in some upload of this cohort, what share of it (C,) is to be left.

    A slot that is too long gets the length in the middle, so that nobody gains by sending more. A move gets the longest
    one that is accepted, because Krum and its like must still see that it is far from the others. Fewer than LEAST
    uploads tell nothing.

    past: the scales of the rounds before. factor: from which on an upload is far; up to half the way to it, in
    logarithms, nothing is too long.
    """
    left = {}
    for name, (middle, spread, _) in scale_of(sizes).items():
        if name in CLAIMS:
            continue
        usual = float(np.median([spread, *(scale[name][1] for scale in past if name in scale)]))
        reach = max(0.5 * math.log(factor), min(LONG * usual, math.log(WIDEST)))
        away = _logarithms(sizes[name]) - middle
        long = away > reach
        if np.isfinite(away).sum() >= LEAST and long.any():
            longest = reach if name == MOVE else 0.0
            left[name] = np.where(long, np.exp(longest - np.maximum(away, 0.0)), 1.0)
    return left


def shortened(uploads: Uploads, start: Weights, left: Mapping[str, np.ndarray]) -> Uploads:
    """Return uploads of whose moves and slots a share is left.

    left: (C,) shares by the name of a size; where a share is 1, every bit stays.
    """

    def cut(leaf: Tensor, centre: Tensor | float, share: np.ndarray) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        shares = torch.from_numpy(share).to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
        return torch.where(shares == 1.0, leaf, (centre + shares * (leaf.double() - centre)).to(leaf.dtype))

    def towards(sent: Params, centre: Params, name: str) -> Params:
        if name not in left:
            return sent
        return {key: cut(leaf, centre[key].double(), left[name]) for key, leaf in sent.items()}

    def of_slot(slot: str, tree: Tree) -> Tree:
        name = norm_of(slot)
        return tree_map(lambda leaf: cut(leaf, 0.0, left[name]), tree) if name in left else tree

    params, buffers = uploads.weights
    weights = Weights(towards(params, start.params, MOVE), towards(buffers, start.buffers, BUFFERS))
    return uploads._replace(weights=weights, extra={slot: of_slot(slot, tree) for slot, tree in uploads.extra.items()})


def _logarithms(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: np.ndarray = np.log(values.astype(np.float64))
    return logs
