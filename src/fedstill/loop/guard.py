"""The guard between clients and server: each upload is checked on its own, a bad one is quarantined.

`admit` takes a cohort that the engine stacked, or the messages of its clients, which it opens first. Nothing that a
client sends can end the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.limits import SECTION, CountOrNone, Example, NotNegative, Positive, check_limits
from fedstill.core.trainer import Messages
from fedstill.core.tree import as_tree, from_tree, leaves, select, stack, to_device, tree_map
from fedstill.core.types import Tree, Uploads, Weights
from fedstill.loop.message import decode, from_mapping
from fedstill.loop.outliers import (
    BUFFERS,
    COUNTS,
    MOVE,
    PACE,
    PULL,
    SIZE,
    STEPS,
    TRAVEL,
    Scale,
    believed,
    norm_of,
    norms,
    outliers,
    per_client,
    scale_of,
    shortened,
    sizes_of,
    slot_norms,
    too_long,
)

ROUNDED = 0.1  # of its length a slot may be off, because clients count by their memories, and in few bits
VARIANCE = "running_var"  # how the name of a BatchNorm's variances ends
# {"round": int, "client": int | None (the whole round), "reason": str}; with "note": True nothing was refused
AuditRecord = dict[str, Any]


@dataclass(frozen=True)
class Guard:
    """What an upload must satisfy.

    norm_bound: largest ||params - start||_2 (None: any).
    extra_bound: largest norm of what a method uploads beside the model, such as SCAFFOLD's control (None: any; one
    huge finite value there would stop all learning).
    size_cap: largest number of samples believed, in all and of one class (None: any finite one); with noise on the
    label counts leave room for it.
    quorum: uploads that must be left, a count (int) or a share of the cohort (float: 0.5, 1.0).
    outlier: factor from the middle of the last cohorts beyond which an upload is refused, if clients do not differ by
    more by themselves (see loop/outliers.py); 0 refuses none. From the root of this factor on, a move or slot is
    shortened. A size, steps or travel that is far is lowered; it is refused from 10,000 times the middle on.
    """

    __pydantic_config__ = SECTION
    norm_bound: Annotated[Positive | None, Example(10.0)] = None
    size_cap: Positive | None = 1e9
    quorum: CountOrNone | NotNegative = 1
    extra_bound: Annotated[Positive | None, Example(100.0)] = None
    outlier: NotNegative = 20.0

    def __post_init__(self) -> None:
        check_limits("guard", self)
        if isinstance(self.quorum, float) and self.quorum > 1:
            raise FedstillError(f"guard.quorum = {self.quorum}: use a count of clients or a share between 0.0 and 1.0")

    @property
    def largest_size(self) -> float:
        return sys.float_info.max if self.size_cap is None else min(self.size_cap, sys.float_info.max)

    def needed(self, cohort: int) -> int:
        """Uploads that must be left of a cohort; at least one, since nothing cannot be averaged."""
        count = math.ceil(self.quorum * cohort) if isinstance(self.quorum, float) else self.quorum
        return max(1, count)


class Admitted(NamedTuple):
    """What the server may look at: None when the quorum was missed, and then the round keeps the old model."""

    uploads: Uploads | None
    kept: np.ndarray  # positions in the cohort of those that were accepted
    records: list[AuditRecord]
    scale: Scale = {}  # of the accepted uploads, for the outliers of later rounds


def admit(
    uploads: Uploads | Messages,
    start: Weights,
    guard: Guard,
    *,
    round: int,
    exact_counts: bool = False,
    past: Sequence[Scale] | None = None,
    alike: bool = True,
    implied: Callable[[Uploads], Tree] | None = None,
) -> Admitted:
    """Check a stacked cohort, or open its messages and check them.

    exact_counts: neither label counts nor sizes have noise on them, so a client's counts sum to its size.
    past: the scales of earlier rounds; None: uploads have noise on them, and no size is compared with another.
    alike: all clients have one network; networks of several sizes move differently, so no move is shortened there.
    implied: returns what of the extra upload follows from the rest of it; see Objective.
    """
    if isinstance(uploads, Messages):
        how: dict[str, Any] = {"exact_counts": exact_counts, "past": past, "alike": alike, "implied": implied}
        return _admit_messages(uploads, start, guard, round=round, **how)
    cohort = len(uploads.ids)
    faults = find_faults(uploads, start, guard, exact_counts=exact_counts) or [None] * cohort
    if implied is not None and None in faults:
        for place, reason in _contradictions(uploads.extra, implied(uploads)).items():
            faults[place] = faults[place] or reason
    sizes: dict[str, np.ndarray] = {}
    if past is not None and guard.outlier:
        sound = np.asarray([fault is None for fault in faults], bool)
        measured = sizes_of(uploads, start) if sound.any() else {}
        sizes = {name: np.where(sound, values.double().cpu().numpy(), np.nan) for name, values in measured.items()}
        for place, reason in outliers(sizes, past, guard.outlier).items():
            faults[place] = faults[place] or reason
    kept = np.asarray([place for place, fault in enumerate(faults) if fault is None], np.int64)
    ids = uploads.ids.tolist()
    records = [_record(round, ids[i], fault) for i, fault in enumerate(faults) if fault is not None]
    good = uploads if len(kept) == cohort else select(uploads, torch.from_numpy(kept)) if len(kept) else None
    sizes = {name: values[kept] for name, values in sizes.items()}
    if good is not None and sizes:
        left = too_long(sizes, past or (), guard.outlier) if alike else {}
        good, claims = _lower(good, sizes, left, believed(sizes, past or (), guard.outlier), alike=alike, round=round)
        good, cuts = _shorten(good, start, sizes, left, round=round)
        records += claims + cuts
    settled = _settle(good, kept, records, guard, cohort=cohort, round=round)
    return settled._replace(scale=scale_of(sizes))


def _contradictions(sent: Tree, implied: Tree) -> dict[int, str]:
    """Return the place of each upload with a slot that does not follow from what came with it, with the reason."""
    wrong: dict[int, str] = {}
    for slot, expected in implied.items():
        apart = tree_map(lambda claimed, due: claimed.double() - due.double(), sent[slot], expected)
        lengths = [slot_norms({slot: tree})[norm_of(slot)].double() for tree in (apart, sent[slot], expected)]
        off = ~(lengths[0] <= ROUNDED * (lengths[1] + lengths[2]) + torch.finfo(torch.float32).tiny)
        for place in np.flatnonzero(off.cpu().numpy()).tolist():
            wrong.setdefault(place, f"'{slot}' does not follow from the move that came with it")
    return wrong


def _lower(
    uploads: Uploads,
    sizes: Mapping[str, np.ndarray],
    left: Mapping[str, np.ndarray],
    limits: Mapping[str, tuple[float, float]],
    *,
    alike: bool,
    round: int,
) -> tuple[Uploads, list[AuditRecord]]:
    """Return the uploads with numbers that are believed, and a note of each that was changed.

    A size is lowered until size times move is believed, too. A travel is raised until the move per travel is, because
    FedNova divides by it. Label counts are lowered as their sum is.

    left: what share of each move is to be left.
    """
    anything = (0.0, math.inf)
    move = sizes[MOVE] * left.get(MOVE, 1.0)
    believed_size = sizes[SIZE].clip(None, limits.get(SIZE, anything)[1])
    believed_travel = np.maximum(sizes[TRAVEL].clip(*limits.get(TRAVEL, anything)), 0.0)
    if alike:
        with np.errstate(divide="ignore", over="ignore"):
            believed_size = np.minimum(believed_size, limits.get(PULL, anything)[1] / move)
        believed_travel = np.maximum(believed_travel, move / limits.get(PACE, anything)[1])
    counted = {SIZE: believed_size, STEPS: sizes[STEPS].clip(*limits.get(STEPS, anything)), TRAVEL: believed_travel}
    if COUNTS in sizes:
        counted[COUNTS] = (sizes[COUNTS] * (believed_size / sizes[SIZE])).clip(None, limits.get(COUNTS, anything)[1])
    notes, changed = [], {}
    for name, numbers in counted.items():
        other = np.abs(numbers - sizes[name]) > 1e-6 * np.abs(sizes[name])
        for at in np.flatnonzero(other).tolist():
            claim = f"{name} {sizes[name][at]:.3g} does not go with the other uploads"
            notes.append(noted(round, int(uploads.ids[at]), f"{claim}: it counts as {numbers[at]:.3g}"))
        if other.any():
            changed[name] = (torch.from_numpy(other), torch.from_numpy(numbers))

    def with_changes(name: str, leaf: Tensor) -> Tensor:
        if name not in changed:
            return leaf
        other, numbers = (values.to(leaf.device) for values in changed[name])
        return torch.where(other, numbers.to(leaf.dtype), leaf)

    counts = uploads.label_counts
    if counts is not None and COUNTS in changed:
        other, numbers = (values.to(counts.device) for values in changed[COUNTS])
        share = (numbers / counts.double().sum(dim=1)).unsqueeze(1)
        counts = torch.where(other.unsqueeze(1), (share * counts.double()).to(counts.dtype), counts)
    size, steps, travel = (with_changes(name, getattr(uploads, name)) for name in (SIZE, STEPS, TRAVEL))
    return uploads._replace(label_counts=counts, size=size, steps=steps, travel=travel), notes


def _shorten(
    uploads: Uploads, start: Weights, sizes: Mapping[str, np.ndarray], left: Mapping[str, np.ndarray], *, round: int
) -> tuple[Uploads, list[AuditRecord]]:
    """Return the uploads with a share of each move and slot left, and a note of each that was shortened."""
    left = {name: left[name] for name in (MOVE, BUFFERS, *map(norm_of, uploads.extra)) if name in left}
    if not left:
        return uploads, []
    notes = []
    for name, share in left.items():
        for at in np.flatnonzero(share < 1.0).tolist():
            length, client = float(sizes[name][at]), int(uploads.ids[at])
            long = f"{name} {length:.3g} is several times as long as most of the cohort"
            notes.append(noted(round, client, f"{long}: it was shortened to {share[at] * length:.3g}"))
    return shortened(uploads, start, left), notes


def _admit_messages(messages: Messages, start: Weights, guard: Guard, *, round: int, **how: Any) -> Admitted:
    arrived: list[Uploads] = []
    positions: list[int] = []
    records = [noted(round, client, event) for client, event in messages.notes]
    cohort = len(messages.by_client) if messages.wanted is None else messages.wanted
    for position, (client, message) in enumerate(messages.by_client.items()):
        try:
            arrived.append(_receive(message, messages.template, client=client, round=round))
            positions.append(position)
        except FedstillError as error:
            records.append(_record(round, client, str(error)))
    if not arrived:
        return _settle(None, np.empty(0, np.int64), records, guard, cohort=cohort, round=round)
    device = next(leaves(start)).device
    together = from_tree(stack([as_tree(upload) for upload in arrived]))
    stacked = from_tree(to_device(as_tree(together), device))._replace(ids=together.ids)
    inner = admit(stacked, start, replace(guard, quorum=0), round=round, **how)
    quarantined = [record for record in inner.records if record["client"] is not None]
    kept = np.asarray(positions, np.int64)[inner.kept]
    settled = _settle(inner.uploads, kept, records + quarantined, guard, cohort=cohort, round=round)
    return settled._replace(scale=inner.scale)


def find_faults(
    uploads: Uploads, start: Weights, guard: Guard, *, exact_counts: bool = False
) -> list[str | None] | None:
    """The first fault of each client, in the order of the rules; None when nobody has one."""
    structure = _structure_fault(uploads, start)
    if structure is not None:
        return [structure] * len(uploads.ids)
    if not bool(_suspicious(uploads, start, guard, exact_counts).any()):  # the one host sync
        return None
    rules = _rules(uploads, start, guard, exact_counts)
    broken = torch.stack([mask for mask, _ in rules]).cpu().numpy()  # (rules, C)
    if not broken.any():
        return None
    size, norm = uploads.size.tolist(), norms(uploads.weights.params, start.params).tolist()
    counted = size if uploads.label_counts is None else uploads.label_counts.double().sum(dim=1).tolist()
    return [
        rules[int(column.argmax())][1].format(size=size[i], norm=norm[i], counted=counted[i]) if column.any() else None
        for i, column in enumerate(broken.T)
    ]


def noted(round: int, client: int, event: str) -> AuditRecord:
    """Return a record about a client of which nothing was refused."""
    return {**_record(round, client, event), "note": True}


def is_finite(tree: Any) -> bool:
    """No float of a model or a state is NaN or Inf."""
    return all(bool(leaf.isfinite().all()) for leaf in leaves(tree) if leaf.is_floating_point())


def _receive(message: bytes | Mapping[str, Any] | Exception, template: Uploads, *, client: int, round: int) -> Uploads:
    if isinstance(message, FedstillError):  # it was opened before, and found wrong
        raise message
    if isinstance(message, Exception):
        raise FedstillError(f"client raised {type(message).__name__}: {' '.join(str(message).split())[:200]}")
    if isinstance(message, Mapping):
        return from_mapping(message, template, client=client)
    return decode(message, template, client=client, round=round)


def _settle(
    uploads: Uploads | None, kept: np.ndarray, records: list[AuditRecord], guard: Guard, *, cohort: int, round: int
) -> Admitted:
    """Apply the quorum."""
    needed = guard.needed(cohort)
    if uploads is not None and len(kept) >= needed:
        return Admitted(uploads, kept, records)
    reason = f"quorum missed: {len(kept)} of {cohort} uploads left, {needed} needed; the round keeps the old model"
    return Admitted(None, kept[:0], [*records, _record(round, None, reason)])


def _record(round: int, client: int | None, reason: str) -> AuditRecord:
    return {"round": round, "client": client, "reason": reason}


def _structure_fault(uploads: Uploads, start: Weights) -> str | None:
    """Stacked uploads share names, shapes and dtypes, so one look settles them for all."""
    for kind, sent, expected in zip(("params", "buffers"), uploads.weights, start, strict=True):
        if sent.keys() != expected.keys():
            return f"wrong names in {kind}: {sorted(sent.keys() ^ expected.keys())[:3]}"
        for name, leaf in expected.items():
            if sent[name].shape[1:] != leaf.shape:
                return f"wrong shape of {kind}/{name}: {tuple(sent[name].shape[1:])}, expected {tuple(leaf.shape)}"
            if sent[name].dtype != leaf.dtype:
                return f"wrong dtype of {kind}/{name}: {sent[name].dtype}, expected {leaf.dtype}"
    return None


def _suspicious(uploads: Uploads, start: Weights, guard: Guard, exact_counts: bool) -> Tensor:
    """(C,) a cheap superset of the faults.

    A sum is NaN or Inf when a term is, and costs a fortieth of isfinite().all() on a CPU; a sum that only
    overflowed is cleared by the exact rules.
    """
    total = torch.zeros_like(uploads.loss, dtype=torch.float32)
    for leaf in leaves(as_tree(uploads)):
        if leaf.is_floating_point():
            total = total + per_client(leaf, torch.sum)
    flags = ~total.isfinite() | ~_size_is_fine(uploads.size, guard)
    for wrong, _ in _count_rules(uploads, guard, exact_counts):
        flags = flags | wrong
    flags = flags | _holds_negative_variance(uploads)
    if guard.norm_bound is not None:
        flags = flags | ~(norms(uploads.weights.params, start.params) <= guard.norm_bound)
    if guard.extra_bound is not None and uploads.extra:
        flags = flags | _extra_is_large(uploads, guard)
    return flags


def _rules(uploads: Uploads, start: Weights, guard: Guard, exact_counts: bool) -> list[tuple[Tensor, str]]:
    """(who breaks it (C,), how it is told) for each rule, the most telling first."""
    scalars = (uploads.steps, uploads.travel, uploads.loss)
    rules = [
        (_holds_non_finite(uploads.weights.params, uploads), "params hold NaN or Inf"),
        (_holds_non_finite(uploads.weights.buffers, uploads), "buffers hold NaN or Inf"),
        (_holds_negative_variance(uploads), "buffers hold a negative variance"),
        (_holds_non_finite(uploads.extra, uploads), "extra upload holds NaN or Inf"),
        (~_size_is_fine(uploads.size, guard), f"size {{size:g}} is not in (0, {guard.largest_size:g}]"),
        (_holds_non_finite(scalars, uploads), "steps, travel or loss is NaN or Inf"),
    ]
    rules += _count_rules(uploads, guard, exact_counts)
    if guard.norm_bound is not None:
        far = ~(norms(uploads.weights.params, start.params) <= guard.norm_bound)
        rules.append((far, f"update norm {{norm:g}} exceeds the bound {guard.norm_bound:g}"))
    if guard.extra_bound is not None and uploads.extra:
        rules.append(
            (_extra_is_large(uploads, guard), f"norm of the extra upload exceeds the bound {guard.extra_bound:g}")
        )
    return rules


def _count_rules(uploads: Uploads, guard: Guard, exact: bool) -> list[tuple[Tensor, str]]:
    if uploads.label_counts is None:
        return []
    counts, most = uploads.label_counts.double(), guard.largest_size  # their sums do not overflow
    outside = ~((counts >= 0) & (counts <= most)).all(dim=1)  # NaN compares false
    rules = [(outside, f"label counts hold a number that is not in [0, {most:g}]")]
    if exact:
        # counts above 2^24 are rounded in float32
        other = ~((counts.sum(dim=1) - uploads.size).abs() <= 1e-6 * uploads.size)
        rules.append((other, "label counts sum to {counted:g}, and size is {size:g}"))
    return rules


def _size_is_fine(size: Tensor, guard: Guard) -> Tensor:
    return (size > 0) & (size <= guard.largest_size)  # NaN compares false


def _holds_non_finite(tree: Any, uploads: Uploads) -> Tensor:
    bad = torch.zeros(len(uploads.ids), dtype=torch.bool, device=uploads.size.device)
    for leaf in leaves(tree):
        if leaf.is_floating_point():
            bad = bad | ~per_client(leaf.isfinite(), torch.all)
    return bad


def _holds_negative_variance(uploads: Uploads) -> Tensor:
    bad = torch.zeros(len(uploads.ids), dtype=torch.bool, device=uploads.size.device)
    for name, leaf in uploads.weights.buffers.items():
        if name.endswith(VARIANCE):
            bad = bad | per_client(leaf < 0, torch.any)
    return bad


def _extra_is_large(uploads: Uploads, guard: Guard) -> Tensor:
    squares = [per_client(leaf.double().square(), torch.sum) for leaf in leaves(uploads.extra)]
    return ~(torch.stack(squares).sum(dim=0).sqrt() <= (guard.extra_bound or 0.0))
