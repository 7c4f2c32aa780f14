"""One round of a server with the real engine, on models made by hand; and whole runs of a tiny federation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import toy
from by_hand import uploads_of
from running import federate
from torch import Tensor
from whole_server import whole

from fedstill.core.setup import Preparation
from fedstill.core.tree import stack
from fedstill.core.types import Answers, ClientData, Dataset, Federation, Method, Model, Round, Training, Weights
from fedstill.engine import build_engine

CLASSES, FEATURES, CLIENTS, EACH = 3, 4, 5, 12
LOCAL = Training(batch_size=6, epochs=2, lr=0.2, momentum=0.5)


SMALL = {"features": FEATURES, "classes": CLASSES}


def network(net: str = "mlp") -> Model:
    return toy.network(net, hidden=6, **SMALL)


def points(count: int, use: str) -> toy.Points:
    return toy.points(0, "server rounds", use, count=count, **SMALL)


def federation() -> Federation:
    """Five clients of twelve, sorted by class: the first knows nothing of the last class."""
    train, test, (unlabeled, _) = points(CLIENTS * EACH, "train"), points(40, "test"), points(20, "unlabeled")
    return toy.federation_of(train, test, [EACH] * CLIENTS, unlabeled=unlabeled, validation=points(15, "validation"))


def run(method: Method, *, net: str = "mlp", rounds: int = 3, **how: Any):
    settings = {
        "method": method, "model": network(net), "federation": federation(), "training": LOCAL,
        "rounds": rounds, "cohort": 4, "seed": 3, "engine": "batched", "device": "cpu",
    }  # fmt: skip
    return federate(**{**settings, **how})


@dataclass
class Watched:
    """An engine that remembers what its students were trained with, and after which steps somebody looked."""

    engine: Any
    trainings: list[Training] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    steps: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def fit(self, lesson, start, seed, *, watch=None, **how):
        self.trainings.append(lesson.training)

        def counted(done: int, now: Weights) -> bool:
            self.steps = done
            return watch(done, now)

        fitted = self.engine.fit(lesson, start, seed, watch=None if watch is None else counted, **how)
        self.steps = 0
        return fitted

    def outputs(self, *given, **how):
        if self.steps:
            self.looks.append(self.steps)
        return self.engine.outputs(*given, **how)


def server_round(
    models: list[Weights], model: Model, *, unlabeled: Tensor | None = None, validation=None, sizes=None,
    number: int = 1, precision: str = "float64", train: Dataset | None = None,
) -> Round:  # fmt: skip
    """A round in which these models came in, and the first of them was sent."""
    data = federation() if train is None else dataclasses.replace(federation(), train=train)
    engine = build_engine("looped", "cpu", model=model, federation=data, precision=precision)
    return Round(
        number=number, start=models[0], uploads=uploads_of(models, sizes or [1.0] * len(models)), model=model,
        population=len(models), unlabeled=data.unlabeled if unlabeled is None else unlabeled, seed=7,
        trainer=Watched(engine), validation=validation,
    )  # fmt: skip


def preparation_of(this: Round, clients: dict[int, Tensor] | None = None) -> Preparation:
    """What comes before such a round; `clients` hold these samples."""

    def ask(question, among=None, **_):
        each = {k: question(ClientData(k, x, torch.zeros(len(x)).long())) for k, x in (clients or {}).items()}
        return Answers(torch.tensor(list(each)), stack(list(each.values())))

    return Preparation(1, this.model, this.population, this.unlabeled, this.seed, this.trainer, ask, run_seed=this.seed)


def served(method: Method, this: Round) -> Weights:
    """The model that the server makes of a round."""
    state = whole(method).init(this.start)
    _, state = whole(method).prepare(this.start, state, preparation_of(this))
    return whole(method).apply(this.start, state, this)[0]


def in_float64(weights: Weights) -> Weights:
    def widened(tree):
        return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tree.items()}

    return Weights(widened(weights.params), widened(weights.buffers))


def clients_models(model: Model, count: int, *, only: str = "") -> list[Weights]:
    """Random models; `only`: alike but for the parameters whose names start so."""
    first = in_float64(model.init(0))

    def mixed(seed: int) -> Weights:
        other = in_float64(model.init(seed)).params
        return first._replace(params={n: other[n] if n.startswith(only) else p for n, p in first.params.items()})

    return [mixed(seed) for seed in range(1, count + 1)]
