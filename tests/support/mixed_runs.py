"""Mixed federations that are small enough to run in milliseconds, and what their groups would be alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from running import federate

from fedstill.about.toy import CLASSES, SHAPE, trial_federation
from fedstill.core.types import Federation, Model, Training
from fedstill.methods.lookup import build_method
from fedstill.models import build_model, mixed_model

MEMBER = ("a", "a", "a", "b", "b", "b")
LOCAL = Training(batch_size=8, lr=0.05, momentum=0.5)


def network(name: str) -> Model:
    """a: dense, b: convolutions with BatchNorm."""
    if name == "a":
        return build_model("mlp", input_shape=SHAPE, classes=CLASSES, hidden=(8,), init="torch")
    if name == "b":
        return build_model("resnet8", input_shape=SHAPE, classes=CLASSES)
    return build_model("mlp", input_shape=SHAPE, classes=CLASSES, hidden=(6, 5), init="torch")


NETS = {name: network(name) for name in "abc"}


def mixed(member: tuple[str, ...] = MEMBER, report: str = "ensemble") -> Model:
    return mixed_model({name: NETS[name] for name in dict.fromkeys(member)}, member, report)


def federation(clients: int = 6) -> Federation:
    return trial_federation(clients)


def first(count: int) -> Federation:
    """The first clients alone."""
    whole = federation()
    return dataclasses.replace(whole, offsets=whole.offsets[: count + 1], indices=whole.indices[: whole.offsets[count]])


def without(federation: Federation, gone: range) -> Federation:
    """The same clients under the same ids; some of them hold nothing."""
    sizes = federation.offsets.diff()
    kept = torch.ones_like(sizes, dtype=torch.bool)
    kept[list(gone)] = False
    rows = kept.repeat_interleave(sizes)
    offsets = torch.cat([sizes.new_zeros(1), torch.where(kept, sizes, 0).cumsum(0)])
    return dataclasses.replace(federation, indices=federation.indices[rows], offsets=offsets)


def run(method: str, model: Model | None = None, **how: Any):
    settings = {
        "method": build_method(method), "model": model or mixed(), "federation": federation(), "training": LOCAL,
        "rounds": 2, "cohort": 6, "seed": 3, "device": "cpu",
    }  # fmt: skip
    return federate(**{**settings, **how})
