"""The work of a cohort in a form that travels: one process packs it, another one unpacks it and trains the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from fedstill.compose.phases import method_at
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import flatten, tree_map
from fedstill.core.types import Model, Phase, Training, Weights
from fedstill.loop.federate import share_states_of, suited

Build = Callable[[str], tuple[Phase, ...]]  # fedstill.build_method


class Packed(NamedTuple):
    """A LocalWork without its objective, for which `facts` name the method."""

    facts: str  # JSON: method, training, round, seed, and where each tensor belongs
    tensors: bytes  # safetensors: the start and the received slots


def pack(work: LocalWork) -> Packed:
    """The work for another process. A method that has no text is refused, because functions do not travel."""
    if not work.method:
        raise FedstillError(
            "a method that was made in Python cannot go to another process: name it by its text, "
            "build_method('FILE.py:function'), or set engine.name = 'auto'"
        )
    trees = {"start": work.start._asdict(), "received": work.received}
    facts = {"method": work.method, "training": asdict(work.training), "round": work.round, "seed": work.seed}
    tensors = {name: leaf.detach().cpu().contiguous() for name, leaf in flatten(trees).items()}
    return Packed(json.dumps({**facts, "trees": _outline(trees)}), save(tensors))


def _outline(tree: Any, path: str = "") -> Any:
    """The same nested dicts with the flat name of each tensor in its place: empty dicts count, too."""
    if not isinstance(tree, dict):
        return path
    return {key: _outline(value, f"{path}/{key}" if path else key) for key, value in tree.items()}


class Unpack:
    """Rebuilds works for one model. It builds a method once, because engines keep programs for an objective."""

    def __init__(self, model: Model, build: Build, device: torch.device | str = "cpu") -> None:
        self.model, self.build, self.device = model, build, device
        self.built: dict[str, tuple[Phase, ...]] = {}

    def __call__(self, packed: Packed) -> LocalWork:
        facts = json.loads(packed.facts)
        tuples = {field.name for field in fields(Training) if isinstance(field.default, tuple)}
        given: dict[str, Any] = {
            name: tuple(value) if name in tuples else value for name, value in facts["training"].items()
        }
        training, key = Training(**given), json.dumps([facts["method"], facts["training"]])
        if key not in self.built:
            phases = suited(self.build(facts["method"]), self.model, training)
            self.built[key] = share_states_of(phases, self.model.init(0), self.model)[1]
        tensors = load(packed.tensors)
        trees = tree_map(lambda name: tensors[name].to(self.device), facts["trees"])
        return LocalWork(
            method_at(self.built[key], facts["round"]).objective,
            training,
            Weights(**trees["start"]),
            trees["received"],
            round=facts["round"],
            seed=facts["seed"],
            method=facts["method"],
        )
