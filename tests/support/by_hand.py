"""A federation small enough to follow by hand: full-batch gradient descent, one client after the other.

Independent of fedstill.engine: it calls the hooks of Objective and ServerStep directly, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from whole_server import whole

from fedstill.compose.combine import combine
from fedstill.core.trainer import Fitted
from fedstill.core.tree import rows, stack
from fedstill.core.types import (
    Batch,
    Dataset,
    Federation,
    Local,
    Method,
    Model,
    Objective,
    Output,
    Round,
    Uploads,
    Weights,
)

F64 = torch.float64


def number(value) -> torch.Tensor:
    return torch.tensor(value, dtype=F64)


def scalar_model() -> Model:
    """One parameter w and no output: for objectives that are functions of w alone."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        empty = weights.params["w"].new_zeros((1, 1))
        return Output(empty, empty), {}

    return Model("scalar", init=lambda seed: scalar(0.0), apply=apply)


def scalar(w: float) -> Weights:
    return Weights({"w": number(w)}, {})


def linear_model() -> Model:
    """Softmax regression: logits = x weight^T + bias."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        return Output(x @ weights.params["weight"].T + weights.params["bias"], x), {}

    return Model("linear", init=lambda seed: linear(3, 4), apply=apply)


def seeing_model() -> Model:
    """Softmax regression whose features are its logits, so that they move with the weights."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        logits = x @ weights.params["weight"].T + weights.params["bias"]
        return Output(logits, logits), {}

    return Model("seeing", linear_model().init, apply)


def linear(classes: int, features: int, seed: int | None = None) -> Weights:
    """Zeros, or random weights from a seed."""
    weight = torch.zeros(classes, features, dtype=F64)
    if seed is not None:
        weight = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return Weights({"weight": weight, "bias": torch.zeros(classes, dtype=F64)}, {})


def quadratic() -> Objective:
    """x / 2 (w - y)^2: the batch holds the curvature and the centre."""

    def loss(output, batch, local):
        return 0.5 * batch.x.sum() * (local.params["w"] - batch.y.sum()) ** 2

    return Objective(loss)


def quadratic_data(curvature: float, centre: float) -> Batch:
    return Batch(number([curvature]), number([centre]), number([1.0]))


def blobs(client: int, samples: int, classes: int = 3, features: int = 4) -> Batch:
    """Overlapping classes whose proportions and centres differ from client to client."""
    generator = torch.Generator().manual_seed(100 + client)
    labels = torch.multinomial(torch.rand(classes, generator=generator) ** 3 + 0.05, samples, True, generator=generator)
    centres = torch.randn(classes, features, generator=generator, dtype=F64)
    x = centres[labels] + torch.randn(samples, features, generator=generator, dtype=F64)
    return Batch(x, labels, torch.ones(samples, dtype=F64))


def federation_of(clients: list[Batch], unlabeled: torch.Tensor | None = None, classes: str = "abc") -> Federation:
    """What these clients hold, for a run of the library; it is examined on the same samples."""
    x, y = (torch.cat([getattr(batch, part) for batch in clients]) for part in ("x", "y"))
    train, sizes = Dataset("by hand", x, y, tuple(classes)), torch.tensor([0, *(len(batch.y) for batch in clients)])
    return Federation(train, train, torch.arange(len(y)), sizes.cumsum(0), unlabeled)


def local_view(start: Weights, **changes) -> Local:
    """A Local in which everything that is not given is NaN or empty."""
    unknown = number(float("nan"))
    view = Local(
        start.params, start.buffers, start, {}, {}, {}, unknown, unknown, unknown, unknown, unknown,
        torch.tensor(0, dtype=torch.int64),
    )  # fmt: skip
    return view._replace(**changes)


def travel_of(steps: int, lr: float, momentum: float) -> float:
    """How far a constant gradient of 1 carries heavy-ball SGD, step by step."""
    velocity = distance = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        distance += lr * velocity
    return distance


def train_client(objective, model, start, batch, *, received, state, steps, lr, momentum=0.0):
    """-> (weights, new state, extra upload, travel)."""
    view = local_view(
        start,
        received=received,
        state=state,
        size=batch.weight.sum(),
        steps=number(float(steps)),
        travel=number(travel_of(steps, lr, momentum)),
        lr=number(lr),
    )
    params = {name: leaf.clone() for name, leaf in start.params.items()}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for _ in range(steps):
        params = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        step_view = view._replace(params=params)
        frozen = {n: model.apply(teacher(step_view), batch.x)[0] for n, teacher in objective.frozen.items()}
        output, _ = model.apply(Weights(params, start.buffers), batch.x, training=True)
        loss = objective.loss(output, batch, step_view._replace(frozen=frozen))
        gradients = torch.autograd.grad(loss, list(params.values()))
        for (name, leaf), gradient in zip(list(params.items()), gradients, strict=True):
            velocity[name] = momentum * velocity[name] + gradient
            params[name] = leaf.detach() - lr * velocity[name]
    view = view._replace(params=params)
    measured = objective.measure(model, batch, view) if objective.measure else {}
    state, extra = objective.finish(view, measured)
    return Weights(params, start.buffers), state, extra, float(view.travel)


@dataclass
class DescentTrainer:
    """A Trainer whose `fit` is full-batch gradient descent with training.lr; it remembers what it was asked."""

    model: Model
    asked: list = field(default_factory=list)

    def fit(self, lesson, start, seed, *, optimizer=None, watch=None):
        objective, x, y, training, rows = lesson
        self.asked.append((training, seed))
        x, y = (x, y) if rows is None else (x[rows], y[rows])
        data = Batch(x, y, torch.ones(len(x), dtype=F64))
        how = {"received": {}, "state": {}, "lr": training.lr}
        if watch is None:
            start = train_client(objective, self.model, start, data, steps=training.steps, **how)[0]
        for done in range(1, 0 if watch is None else training.steps + 1):  # descent has no memory: a step is a step
            start = train_client(objective, self.model, start, data, steps=1, **how)[0]
            if watch(done, start):
                break
        return Fitted(start, {}, torch.tensor(0.0))

    def outputs(self, weights, x, stacked=False, *, features=True, batch=None, seed=0):
        if not stacked:
            return self.model.apply(weights, x)[0]
        count = len(next(iter(weights.params.values())))
        return stack([self.model.apply(rows(weights, t), x)[0] for t in range(count)])


def uploads_of(models: list[Weights], sizes, *, travel=None, extra=None) -> Uploads:
    count = len(models)
    return Uploads(
        weights=stack(models),
        size=number(list(sizes)),
        steps=torch.ones(count),
        travel=number(list(travel) if travel is not None else [1.0] * count),
        loss=torch.zeros(count),
        extra=extra or {},
        label_counts=None,
        ids=torch.arange(count),
    )


def round_of(
    start: Weights, uploads: Uploads, *, model=None, population=None, unlabeled=None, number=1, weighting="uniform"
) -> Round:
    model = model or scalar_model()
    return Round(
        number=number,
        start=start,
        uploads=uploads,
        model=model,
        population=population or len(uploads.ids),
        unlabeled=unlabeled,
        seed=7,
        trainer=DescentTrainer(model),
        weighting=weighting,
    )


@dataclass(frozen=True)
class History:
    weights: list  # the global model after each round
    server: list  # the server's state after each round
    clients: dict  # client -> its latest state
    metrics: list


def federate_by_hand(
    method: Method,
    model: Model,
    data: list[Batch],
    start: Weights,
    *,
    rounds: int,
    steps,
    lr: float,
    momentum: float = 0.0,
    cohorts=None,
    unlabeled=None,
) -> History:
    """`steps` is a number or one per client; `cohorts` lists the clients of each round (default: all)."""
    per_client = steps if isinstance(steps, (list, tuple)) else [steps] * len(data)
    objective, server = method.objective, whole(method)
    states = {k: objective.init(start) for k in range(len(data))}
    state, weights = server.init(start), start
    seen: list = []
    states_seen: list = []
    metrics: list = []
    for t in range(rounds):
        cohort = cohorts[t] if cohorts else range(len(data))
        results = {
            k: train_client(
                objective,
                model,
                weights,
                data[k],
                received=server.broadcast(state),
                state=states[k],
                steps=per_client[k],
                lr=lr,
                momentum=momentum,
            )
            for k in cohort
        }
        states.update({k: result[1] for k, result in results.items()})
        uploads = uploads_of(
            [result[0] for result in results.values()],
            [float(data[k].weight.sum()) for k in cohort],
            travel=[result[3] for result in results.values()],
            extra=stack([result[2] for result in results.values()]),
        )
        this = round_of(weights, uploads, model=model, population=len(data), unlabeled=unlabeled, number=t + 1)
        weights, state = server.apply(weights, state, this)
        seen.append(weights)
        states_seen.append(state)
        metrics.append(this.metrics)
    return History(seen, states_seen, states, metrics)


def with_quadratic(method: Method, *terms: Objective) -> Method:
    """The method's server, with clients that minimise a quadratic plus `terms`."""
    return replace(method, objective=combine(quadratic(), *terms))
