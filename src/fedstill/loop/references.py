"""Reference points of a federation: the majority class, each party alone, and all rows in one place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from fedstill.compose.phases import phases_of
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import cohort_size
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import byte_size, stack, to_device
from fedstill.core.tree import rows as rows_of
from fedstill.core.types import Method, Training, Uploads, Weights
from fedstill.engine import Engines, build_engine
from fedstill.engine.engine import Engine
from fedstill.loop.callbacks import Callback
from fedstill.loop.evaluate import accuracy_by_party, global_test, label_counts, make_test_set, measure
from fedstill.loop.federate import Built, federate, first_weights, suited
from fedstill.loop.guard import Guard
from fedstill.loop.history import Result, Row, plain
from fedstill.privacy.plan import Privacy
from fedstill.storage.files import read_bytes, write_whole

REFERENCES_FILE = "references.json"
STACK_BYTES = 1 << 30  # parties that train at once take about so much memory for their models and their batches
Tell = Callable[[float], None]  # the share of the work that is done


@dataclass(frozen=True)
class References:
    """The metrics of models that need no federation, on the test set that the federated model is measured on."""

    majority_class: str  # of all clients' rows together
    majority: Row  # a model that knows nothing but how often each class occurs in these rows
    pooled: Row
    alone: tuple[Row, ...]  # one for each client in `clients`
    clients: tuple[int, ...]  # the clients that hold rows
    rounds: int  # of the run that they belong to
    budget: tuple[str, ...]  # how long the models were trained, in words
    pooled_by_party: tuple[float | None, ...] = ()  # accuracy on each client's own test rows, where there are
    alone_by_party: tuple[float | None, ...] = ()  # the same, each client's own model
    seconds_pooled: float = 0.0
    seconds_alone: float = 0.0  # of all parties together

    @property
    def accuracies_alone(self) -> list[float]:
        return [row["accuracy"] for row in self.alone]

    def summary(self) -> dict[str, float]:
        """Return the accuracies for people and programs; a tenth of the parties is at least one of them."""
        ordered = sorted(self.accuracies_alone)
        tenth = -(-len(ordered) // 10)
        return {
            "majority": self.majority["accuracy"],
            "alone_mean": sum(ordered) / len(ordered),
            "alone_worst": ordered[0],
            "alone_best": ordered[-1],
            "alone_worst_tenth": sum(ordered[:tenth]) / tenth,
            "alone_best_tenth": sum(ordered[-tenth:]) / tenth,
            "pooled": self.pooled["accuracy"],
        }


@dataclass(frozen=True)
class Budget:
    """How much local work the references get.

    A client trains in `turns` rounds of the run on average, rounded up. So does each party alone. The pooled model
    takes `turns` times the local epochs over all rows; where local work is a number of steps, it takes as many steps as
    all clients together.
    """

    turns: int
    alone: Training
    pooled: Training

    def lines(self) -> tuple[str, ...]:
        """Say the budget in words, a line for each kind of model."""
        alone, pooled = (
            f"{self.turns * (training.epochs if training.steps is None else training.steps)} "
            f"{'epochs' if training.steps is None else 'steps'}"
            for training in (self.alone, self.pooled)
        )
        return (
            f"budget of a party alone: {alone} on its rows, at least as many as a client takes on average",
            f"budget of the pooled model: {pooled} on all rows, at least as many as all clients take together",
        )


def budget_of(built: Built) -> Budget:
    """Return the budget of the references to a run; a rate that falls over the rounds falls as far over the turns."""
    schedule, training, federation = built.schedule, built.training, built.federation
    holding = int((federation.offsets.diff() > 0).sum())
    visits = schedule.rounds * min(cohort_size(schedule.cohort, federation.population), holding)
    turns = -(-visits // holding)
    alone = replace(training, lr_decay=training.lr_decay ** (schedule.rounds / turns))
    steps = None if training.steps is None else -(-visits * training.steps // turns)
    return Budget(turns, alone, replace(alone, steps=steps))


def find_references(
    built: Built, method: Method, *, file: Path | None = None, callbacks: Sequence[Callback] = (), resume: bool = False
) -> References:
    """Train the references to a run with its network, its seed and its settings, and measure them on its test set.

    built: the run; its method, its guard and its privacy do not count.
    method: FedAvg, because with one client FedAvg is plain training.
    file: where the result is written as JSON; with `resume` a result there of as many rounds is taken as it is.
    """
    if built.model.groups is not None:
        raise FedstillError(
            "compare.references = true needs one network for all clients, and this model has several: set it to false"
        )
    known = read_references(file) if resume and file is not None and file.exists() else None
    if known is not None and known.rounds == built.schedule.rounds:
        return known
    built = replace(built, method=method, guard=Guard(), privacy=Privacy(), label="pooled")
    budget, federation, engine = budget_of(built), built.federation, _engine(built)
    counts = label_counts(federation)
    test = make_test_set(federation, engine.device, counts)
    frequencies = counts.sum(0) / counts.sum()

    def tell(work: str) -> Tell:
        def share(done: float) -> None:
            for callback in callbacks:
                callback.on_prepare(f"reference points: {work}", done)

        return share

    began = time.perf_counter()
    pooled = train_pooled(built, budget, tell("all rows pooled"))
    between = time.perf_counter()
    parties = train_alone(built, budget, engine, tell("each party alone"))
    alone: dict[int, Row] = {}
    alone_by_party: list[float | None] = [None] * (federation.population if federation.client_test else 0)
    for client, weights in parties:
        alone[client] = plain(built.evaluate(weights, test, engine))
        if federation.client_test:
            (alone_by_party[client],) = accuracy_by_party(weights, federation, engine, client=client)
    made = References(
        majority_class=federation.train.classes[int(frequencies.argmax())],
        majority=plain(measure(frequencies.log().expand(len(test.y), -1).to(engine.device), test)),
        pooled=plain(built.evaluate(pooled.weights, test, engine)),
        alone=tuple(alone.values()),
        clients=tuple(alone),
        rounds=built.schedule.rounds,
        budget=budget.lines(),
        pooled_by_party=pooled.party_accuracy,
        alone_by_party=tuple(alone_by_party),
        seconds_pooled=between - began,
        seconds_alone=time.perf_counter() - between,
    )
    if file is not None:
        write_whole(file, json.dumps(asdict(made), indent=1) + "\n")
    return made


def read_references(file: Path) -> References | None:
    """Return the references in a file; None where it holds something else."""
    try:
        known = TypeAdapter(References).validate_json(read_bytes(file), strict=True)
        known.summary()  # each row has its accuracy
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, IndexError):
        return None
    return known


def _engine(built: Built) -> Engine:
    """Return an engine of this process for the run's network and clients: a party's model never travels."""
    trainer = built.engines(model=built.model, federation=built.federation).trainer
    if isinstance(trainer, Engine):
        return trainer
    device = str(getattr(trainer, "device", "auto"))
    return build_engine("auto", device, model=built.model, federation=built.federation)  # type: ignore[return-value]


def train_pooled(built: Built, budget: Budget, tell: Tell = lambda done: None) -> Result:
    """Train the network as a federation of one client who holds the rows of all; a row with two owners counts twice."""
    rows = len(built.federation.indices)
    federation = replace(built.federation, offsets=torch.tensor([0, rows]), partition="pooled")
    one_client = replace(built, federation=federation)

    def engines(**_: object) -> Engines:
        engine = _engine(one_client)
        return Engines(engine, engine)

    class Watch(Callback):
        def on_round(self, row: Row) -> None:
            tell(row["round"] / budget.turns)

    turns = {"rounds": budget.turns, "evaluate_every": budget.turns}
    schedule = replace(built.schedule, cohort=1, sampling="fixed", target=None, best="accuracy", **turns)
    one_client = replace(one_client, training=budget.pooled, schedule=schedule, evaluate=global_test)
    return federate(replace(one_client, engines=engines), callbacks=[Watch()])


def train_alone(
    built: Built, budget: Budget, engine: Engine, tell: Tell = lambda done: None
) -> Iterator[tuple[int, Weights]]:
    """Train a model for each client on its own rows, and yield the clients that hold rows with their models.

    All clients begin at the model that the federation begins at. Many of them train at once, as a cohort whose server
    sends each client its own model back.
    """
    federation, training, seed = built.federation, budget.alone, built.schedule.seed
    objective = suited(phases_of(built.method), built.model, training)[0].method.objective
    start = to_device(first_weights(built, engine), engine.device)
    sizes = federation.offsets.diff().numpy()
    clients = np.flatnonzero(sizes > 0)
    steps = training.steps or training.epochs * -(-int(sizes.max()) // training.batch_size)
    at_once = max(1, STACK_BYTES // (4 * byte_size(start) + 40 * steps * training.batch_size))
    for first in range(0, len(clients), at_once):
        ids = clients[first : first + at_once]
        states, models = stack([objective.init(start)] * len(ids)), stack([start] * len(ids))
        for turn in range(1, budget.turns + 1):
            work = LocalWork(objective, training, start, round=turn, seed=seed)
            trained = engine.train(work, ids, states, starts=models)
            assert isinstance(trained.uploads, Uploads)  # this engine sends no messages
            states, models = trained.states, trained.uploads.weights
            tell((first + len(ids) * turn / budget.turns) / len(clients))
        yield from ((int(client), rows_of(models, place)) for place, client in enumerate(ids))
