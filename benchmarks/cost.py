"""Measure how much more a method's local step costs than FedAvg's, beside the cost that its paper implies (its card).

    python benchmarks/cost.py [--device cuda] [--methods fedlmd,moon] [--repeats 7] [--check] [--json FILE]

All methods train the CNN of the papers on random images of CIFAR's shape in one run. Repeats go through all methods in
turn, and the shortest of each counts, because other work on the machine can only add time. A round is timed as a whole:
plan, steps, and a client's work after its last step. There are two settings:

    augmented   crop, flip, cutout: a frozen model sees new images and runs in every step
    plain       nothing augments: outputs of a frozen model are computed once a round and kept

A step is three forward passes (one forward, one backward of twice the work), so a frozen model adds 1/3 in every step,
or once a round, which is 1/3 over the number of epochs. Terms over logits and features add nothing that counts; terms
over all weights (FedProx, SCAFFOLD, FedDyn, FedCurv) are free on the card, and a few walks through memory in truth.

A limit is 15 % above the card. With --check the exit code is 1 if a method that we promise it for is above its limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from costs import synchronize

from fedstill.compose.combine import broadcast_of, first_state
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import to_device, tree_map
from fedstill.core.types import Dataset, Federation, Training
from fedstill.engine import Engine, build_engine
from fedstill.methods import METHODS
from fedstill.methods.lookup import build_method
from fedstill.models import build_model

CLASSES, IMAGE, BATCH = 10, (3, 32, 32), 50
SLACK = 1.15
SETTINGS = {"augmented": ("crop", "flip", "cutout"), "plain": ()}
PROMISED = ("kd", "fedntd", "fedlmd", "fedlmd_tf", "fedrs", "moon")
LIMITS = {("fedlmd", "plain"): 1.15}  # promises that do not follow from the card and the slack


@dataclass(frozen=True)
class Card:
    """The work that a method adds to a step."""

    frozen: int = 0  # models that run without gradient
    sweep: bool = False  # one more forward and backward pass over all data after the round

    def factor(self, setting: str, epochs: int) -> float:
        runs = 1.0 if setting == "augmented" else 1.0 / epochs
        return 1.0 + self.frozen * runs / 3 + self.sweep / epochs


CARDS = {
    "fedavg": Card(),
    "fedprox": Card(),
    "scaffold": Card(),
    "fednova": Card(),
    "feddyn": Card(),
    "fedrs": Card(),
    "label_smoothing": Card(),
    "fedntd_tf": Card(),
    "fedlmd_tf": Card(),
    "kd": Card(frozen=1),
    "fedntd": Card(frozen=1),
    "fedlmd": Card(frozen=1),
    "fedmmd": Card(frozen=1),
    "moon": Card(frozen=2),
    "fedcurv": Card(sweep=True),
}


@dataclass(frozen=True)
class Line:
    """One method in one setting."""

    setting: str
    method: str
    ms_per_step: float
    factor: float
    card: float
    limit: float

    @property
    def passes(self) -> bool:
        return self.factor <= self.limit

    @property
    def promised(self) -> bool:
        return self.method in PROMISED


def limit_of(method: str, setting: str, epochs: int) -> float:
    return LIMITS.get((method, setting), SLACK * CARDS[method].factor(setting, epochs))


def make_federation(clients: int, samples: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    rows = clients * samples
    x = torch.randn(rows, *IMAGE, generator=generator)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    data = Dataset("noise", x, y, tuple("0123456789"))
    return Federation(data, data, torch.arange(rows), torch.arange(0, rows + 1, samples))


def rounds_of(method: str, engine: Engine, training: Training, clients: int) -> Callable[[], float]:
    """Return a function that plays a round of local training and returns its seconds; states go on to the next call."""
    method = build_method(method, {})[0].method
    weights = to_device(engine.model.init(0), engine.device)
    received = broadcast_of(method, first_state(method, weights))
    first = method.objective.init(weights)
    states = tree_map(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), first)
    numbers = iter(range(1, 10**6))

    def play() -> float:
        nonlocal states
        synchronize(engine.device)
        begin = time.perf_counter()
        work = LocalWork(method.objective, training, weights, received, round=next(numbers))
        trained = engine.train(work, np.arange(clients), states)
        synchronize(engine.device)
        states = trained.states
        return time.perf_counter() - begin

    return play


def measure(setting: str, methods: list[str], engine: Engine, options: argparse.Namespace) -> list[Line]:
    """Time all methods in turn, `repeats` times, FedAvg first; return a line for each."""
    training = Training(
        epochs=options.epochs, batch_size=BATCH, lr=0.01, momentum=0.9, weight_decay=1e-5, augment=SETTINGS[setting]
    )
    players = {method: rounds_of(method, engine, training, options.clients) for method in methods}
    for play in players.values():
        play()
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(options.repeats):
        for method, play in players.items():
            seconds[method].append(play())
    steps = options.epochs * options.clients * -(-options.samples // BATCH)
    base = seconds["fedavg"]
    print(f"{setting}: FedAvg's median repeat is {statistics.median(base) / min(base):.2f} times its shortest")
    return [
        Line(
            setting,
            method,
            min(times) / steps * 1e3,
            min(times) / min(base),
            CARDS[method].factor(setting, options.epochs),
            limit_of(method, setting, options.epochs),
        )
        for method, times in seconds.items()
    ]


def show(lines: list[Line]) -> None:
    print(f"{'setting':10s} {'method':16s} {'ms/step':>9s} {'factor':>7s} {'card':>6s} {'limit':>6s}")
    for line in lines:
        print(
            f"{line.setting:10s} {line.method:16s} {line.ms_per_step:9.3f} {line.factor:7.2f} {line.card:6.2f} "
            f"{line.limit:6.2f}  {'ok' if line.passes else 'over'}{' (promised)' if line.promised else ''}"
        )


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default="", help="with FedAvg; all by default")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--clients", type=int, default=0, help="2 on a CPU (client by client there), 10 on a GPU")
    parser.add_argument("--samples", type=int, default=200, help="of each client")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a promise is not kept")
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    options.clients = options.clients or (2 if options.device == "cpu" else 10)
    wanted = [name for name in options.methods.split(",") if name] or list(CARDS)
    unknown = [name for name in wanted if name not in CARDS or name not in METHODS]
    if unknown:
        parser.error(f"no card for {', '.join(unknown)}; choose from {', '.join(CARDS)}")
    options.methods = ["fedavg", *(name for name in wanted if name != "fedavg")]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    federation = make_federation(options.clients, options.samples)
    model = build_model("cnn", input_shape=IMAGE, classes=CLASSES)
    engine = build_engine("auto", options.device, model=model, federation=federation)
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "engine": engine.name,
        "clients": options.clients,
        "samples": options.samples,
        "epochs": options.epochs,
        "repeats": options.repeats,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    lines = [
        line for setting in options.settings.split(",") for line in measure(setting, options.methods, engine, options)
    ]
    show(lines)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**about, "lines": [{**asdict(line), "passes": line.passes} for line in lines]}, file, indent=1)
    return int(options.check and any(line.promised and not line.passes for line in lines))


if __name__ == "__main__":
    sys.exit(main())
