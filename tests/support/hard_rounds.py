"""One round of FedFTG's server with the real engine, on models and label counts made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from server_rounds import CLASSES, FEATURES, clients_models, network, preparation_of, server_round

from fedstill.core.types import Model, Round, Weights
from fedstill.methods.data_free.generators import build_generator
from fedstill.methods.data_free.hard_samples import Contest, hard_samples
from fedstill.methods.data_free.inventing import Generator, InventedStudent
from fedstill.server.aggregate import average

NOISE = 3
COUNTS = [[5.0, 1.0, 2.0], [1.0, 6.0, 2.0], [3.0, 3.0, 4.0]]  # of three clients
SHORT: dict[str, Any] = {
    "iterations": 3,
    "batch_size": 6,
    "generator": {"noise": NOISE, "lr": 0.05},
    "student": {"steps": 2, "batch_norm": "train"},
    "one_by_one": True,
}


def generator_for(model: Model) -> Model:
    return build_generator("table", shape=(FEATURES,), classes=CLASSES, noise=NOISE)


def features_for(model: Model) -> Model:
    return build_generator("dense", shape=(model.feature_size,), classes=CLASSES, noise=NOISE)


def contest(**options: Any) -> Contest:
    """Short, with the generator's steps one by one; `generator` and `student` are laid over those of SHORT."""
    given = {**SHORT, **options}
    generator = Generator(**{**SHORT["generator"], **options.get("generator", {})})
    student = InventedStudent(**{**SHORT["student"], **options.get("student", {})})
    return Contest(**{**given, "generator": generator, "student": student})


@dataclass
class Overheard:
    """A trainer that remembers what its players were given."""

    engine: Any
    games: list[tuple] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def take_turns(self, players, start, drawn, given, seed, **how):
        self.games.append((players, start, drawn, given))
        return self.engine.take_turns(players, start, drawn, given, seed, **how)


def hard_round(models: list[Weights], net: Model, *, counts=None, number: int = 1, sizes=None) -> Round:
    this = server_round(models, net, number=number, sizes=sizes)
    told = torch.tensor(counts if counts is not None else COUNTS[: len(models)], dtype=torch.float64)
    uploads = this.uploads._replace(label_counts=told)
    return Round(number, this.start, uploads, net, len(models), None, this.seed, Overheard(this.trainer.engine))


def models_of(net: Model, count: int = 3) -> list[Weights]:
    """Unlike models with unlike BatchNorm statistics."""
    found = clients_models(net, count)
    for k, one in enumerate(found):
        for name, leaf in one.buffers.items():
            if leaf.is_floating_point():
                found[k].buffers[name] = leaf + 0.1 * (k + 1)
    return found


@dataclass
class Played:
    """A round that was played."""

    round: Round
    candidate: Weights
    learnt: Weights
    before: dict[str, Any]
    state: dict[str, Any]

    @property
    def drawn(self):
        return self.round.trainer.games[0][2]

    @property
    def players(self):
        return self.round.trainer.games[0][0]

    def generator(self, when: str = "after") -> Weights:
        kept = (self.state if when == "after" else self.before)["hard_generator"]
        return Weights(kept["params"], kept["buffers"])


def play(rules: Contest, *, net: str | Model = "mlp", models=None, made=None, state=None, **how: Any) -> Played:
    """Average, then fine-tune."""
    model = network(net) if isinstance(net, str) else net
    this = hard_round(models if models is not None else models_of(model), model, **how)
    candidate, _ = average("uniform").apply(this.start, {}, this)
    step = hard_samples(made or (features_for if rules.input == "feature" else generator_for), rules)
    if state is None:
        _, state = step.prepare(candidate, step.init(candidate), preparation_of(this))
    learnt, after = step.apply(candidate, state, this)
    return Played(this, candidate, learnt, state, after)
