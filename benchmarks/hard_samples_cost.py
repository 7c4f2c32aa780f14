"""Measure the cost of FedFTG's server phase: against a loop over clients in plain PyTorch, and against FedAvg's round.

    python benchmarks/hard_samples_cost.py [--device cuda] [--small] [--model resnet18] [--parts phase,round,memory]
                                           [--clients 10] [--repeats 3] [--precision auto] [--check] [--json FILE]

The images are random bytes of CIFAR's shape. Repeats alternate and the shortest counts, because other work on the
machine can only add time. I = 10, I_g = 1, I_d = 5, B = 50, as in the paper. --small takes seconds on a CPU.

    phase    The server step alone, with a step of the generator for each client ("each") and with one for all of them
             ("joint"), against the released code's loop: modules one after the other, teachers asked anew in every step
             of the student. The precision is the same. The set-up (captured graphs) is not timed.
    round    A round of FedFTG (each, joint) against one of FedAvg: E = 5 epochs, 500 samples a client, batches of 50.
    memory   Peak of the server phase beyond the uploads (CUDA only).

With --check the exit code is 1 if on a GPU the phase is not four times as fast as the loop, or FedFTG's round there
takes more than twice FedAvg's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from costs import HEAD, Line, shortest, show
from torch import Tensor, nn

from fedstill.core.setup import Preparation
from fedstill.core.tree import rows, stack, to_device
from fedstill.core.types import Dataset, Federation, Method, Round, Training, Tree, Uploads, Weights
from fedstill.engine import Engine, build_engine, build_engines, choose_device
from fedstill.engine.step import precision_mode
from fedstill.loop.federate import Built, Schedule, federate
from fedstill.methods.data_free.generators import GENERATORS, Wanted
from fedstill.methods.data_free.inventing import asked_for, class_shares, diversity
from fedstill.methods.lookup import build_method
from fedstill.models import MODELS
from fedstill.models import build_model as build_network

CLASSES, IMAGE, NOISE = 10, (3, 32, 32), 100
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PARTS = ("phase", "round", "memory")
PHASE_PROMISE, ROUND_LIMIT = 4.0, 2.0
WAYS = ("each", "joint")


def make_federation(clients: int, samples: int) -> Federation:
    generator, total = torch.Generator().manual_seed(0), clients * samples
    x = torch.randint(0, 256, (total, *IMAGE), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, CLASSES, (total,), generator=generator)
    train = Dataset("noise", x, y, tuple("0123456789"), MEAN, STD)
    test = Dataset("noise", x[:100], y[:100], train.classes, MEAN, STD)
    return Federation(train, test, torch.arange(total), torch.arange(0, total + 1, samples))


def make_engine(options: argparse.Namespace, federation: Federation, device: torch.device) -> Engine:
    model = build_network(options.model, input_shape=IMAGE, classes=CLASSES)
    return build_engine("auto", str(device), model=model, federation=federation, precision=options.precision)


def make_round(engine: Engine, clients: int) -> tuple[Weights, Round]:
    """Return a model and a round whose uploads it is the average of."""
    models = [engine.model.init(seed) for seed in range(clients)]
    uploaded = to_device(stack(models), engine.device)
    candidate = to_device(models[0], engine.device)
    ones = torch.ones(clients, device=engine.device)
    counts = torch.randint(1, 60, (clients, CLASSES), generator=torch.Generator().manual_seed(1)).double()
    uploads = Uploads(
        uploaded, 500.0 * ones.double(), ones, ones, ones, {}, counts.to(engine.device), torch.arange(clients)
    )
    return candidate, Round(1, candidate, uploads, engine.model, clients, None, 3, engine)


def no_asking(*_: Any, **__: Any) -> Any:
    raise AssertionError("the server step asks nothing of the clients")


RELEASED = Path(__file__).resolve().parent / "fedftg" / "released.py"  # has the generator's step for each client


def fedftg(options: argparse.Namespace, way: str) -> Method:
    generator = {"network": options.generator, "noise": NOISE}
    chosen = {"iterations": options.iterations, "generator": generator, "clients": way}
    return build_method(f"{RELEASED}:fedftg", chosen)[0].method


def server_phase(way: str, engine: Engine, options: argparse.Namespace) -> Callable[[], Weights]:
    """Return the fine-tuning step of `fedftg`, ready to be applied."""
    candidate, round = make_round(engine, options.clients)
    step = fedftg(options, way).steps[-1]
    state: Tree = step.init(candidate)
    preparation = Preparation(1, engine.model, options.clients, None, 3, engine, no_asking)
    state = step.prepare(candidate, state, preparation)[1]
    return lambda: step.apply(candidate, state, round)[0]


class PlainLoop:
    """The released code's phase in plain PyTorch: one module after the other."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.device, self.iterations, name = engine.device, options.iterations, options.model
        candidate, round = make_round(engine, options.clients)
        self.teachers = [self.module(name, rows(round.uploads.weights, k)).eval() for k in range(options.clients)]
        for teacher in self.teachers:
            teacher.requires_grad_(False)
        self.student = self.module(name, candidate)
        wanted = Wanted(options.generator, IMAGE, CLASSES, NOISE, ())
        self.generator = GENERATORS[options.generator](wanted).to(self.device)
        assert round.uploads.label_counts is not None
        self.share = class_shares(round.uploads.label_counts).float()

    def module(self, name: str, weights: Weights) -> nn.Module:
        module: nn.Module = MODELS[name](IMAGE, CLASSES)
        module.load_state_dict({**weights.params, **weights.buffers})
        return module.to(self.device)

    def __call__(self) -> None:
        inventing = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        learning = torch.optim.SGD(self.student.parameters(), lr=0.1, weight_decay=1e-3)
        for _ in range(self.iterations):
            z = torch.randn(50, NOISE, device=self.device)
            y = torch.randint(0, CLASSES, (50,), device=self.device)
            self.student.eval()
            self.generator.train()
            for teacher, share in zip(self.teachers, self.share, strict=True):
                self.invent(inventing, teacher, share[y], z, y)
            self.student.train()
            self.generator.eval()
            for _ in range(5):
                self.learn(learning, z, y)

    def images(self, z: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.generator(asked_for(z, y, CLASSES))
        return made.reshape(-1, *IMAGE)

    def invent(self, optimizer: torch.optim.Optimizer, teacher: nn.Module, share: Tensor, z: Tensor, y: Tensor) -> None:
        x = self.images(z, y)
        learnt, taught = self.student(x)[1], teacher(x)[1]
        apart = (share * (learnt - taught.detach()).abs().mean(1)).mean()
        recognised = (share * F.cross_entropy(taught, y, reduction="none")).mean()
        optimizer.zero_grad()
        (-apart + recognised + diversity(x, z) / len(self.teachers)).backward()
        optimizer.step()

    def learn(self, optimizer: torch.optim.Optimizer, z: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            x = self.images(z, y)
            targets = [
                share[y].unsqueeze(1) * teacher(x)[1].softmax(1)
                for teacher, share in zip(self.teachers, self.share, strict=True)
            ]
        optimizer.zero_grad()
        loss = -(F.log_softmax(self.student(x)[1], 1) * torch.stack(targets).sum(0)).mean()
        loss.backward()
        optimizer.step()


def measure_phase(options: argparse.Namespace, device: torch.device) -> list[Line]:
    engine = make_engine(options, make_federation(options.clients, 4), device)
    runs: dict[str, Callable[[], Any]] = {way: server_phase(way, engine, options) for way in WAYS}
    runs["loop"] = PlainLoop(engine, options)
    with precision_mode(engine.precision):
        seconds = shortest(runs, options.repeats, device)
    return phase_lines(seconds, device)


def phase_lines(seconds: dict[str, float], device: torch.device) -> list[Line]:
    """Return a line for each way with the loop's time over ours; on a GPU the promise is about the faster way."""
    best = max(seconds["loop"] / seconds[way] for way in WAYS)
    lines = []
    for name, taken in seconds.items():
        factor = seconds["loop"] / taken
        kept = best >= PHASE_PROMISE if device.type == "cuda" and factor == best and name != "loop" else None
        lines.append(Line("phase", name, taken, factor, kept))
    return lines


def measure_round(options: argparse.Namespace, device: torch.device) -> list[Line]:
    federation = make_federation(options.clients, options.client_samples)
    engine = make_engine(options, federation, device)
    training = Training(epochs=options.epochs, batch_size=50, lr=0.1, weight_decay=1e-3, clip=10.0)

    def seconds(method: Method) -> float:
        result = federate(
            Built(
                method=method,
                model=engine.model,
                federation=federation,
                training=training,
                schedule=Schedule(rounds=options.repeats + 2, cohort=options.clients, evaluate_every=10**6),
                engines=partial(build_engines, engine),
            )
        )
        return min(row["seconds"] for row in result.history.rows[1:-1])

    fedavg = seconds(build_method("fedavg")[0].method)
    taken = {way: seconds(fedftg(options, way)) for way in WAYS}
    return [Line("round", "fedavg", fedavg, 1.0), *round_lines(fedavg, taken, device)]


def round_lines(fedavg: float, taken: dict[str, float], device: torch.device) -> list[Line]:
    """Return a line for each way; nothing is promised for a CPU."""
    return [
        Line(
            "round",
            f"fedftg {way}",
            seconds,
            seconds / fedavg,
            seconds <= ROUND_LIMIT * fedavg if device.type == "cuda" else None,
        )
        for way, seconds in taken.items()
    ]


def measure_memory(options: argparse.Namespace, device: torch.device) -> list[Line]:
    if device.type != "cuda":
        return [Line("memory", "peak of the phase", None, None, note="only measured on a GPU")]
    engine, lines = make_engine(options, make_federation(options.clients, 4), device), []
    for way in WAYS:
        run = server_phase(way, engine, options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        note = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB beyond the uploads"
        lines.append(Line("memory", way, None, None, note=note))
    return lines


MEASURES = {"phase": measure_phase, "round": measure_round, "memory": measure_memory}


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--model", default="", choices=["", *sorted(MODELS)], help="resnet18 by default (small: lenet)")
    parser.add_argument("--generator", default="", choices=["", *GENERATORS], help="conv by default (small: small)")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--precision", default="auto")
    sizes = {
        "clients": (10, 2),
        "client_samples": (500, 50),
        "epochs": (5, 1),
        "iterations": (10, 1),
        "repeats": (3, 1),
    }
    for name, (full, small) in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, help=f"{full:,} by default ({small})")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a promise is not kept")
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    for name, pair in sizes.items():
        setattr(options, name, getattr(options, name) or pair[options.small])
    options.model = options.model or ("lenet" if options.small else "resnet18")
    options.generator = options.generator or ("small" if options.small else "conv")
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    device = choose_device(options.device)
    about = {
        "torch": torch.__version__,
        "device": str(device),
        "threads": torch.get_num_threads(),
        **{
            key: getattr(options, key)
            for key in (
                "model",
                "generator",
                "precision",
                "clients",
                "client_samples",
                "epochs",
                "iterations",
                "repeats",
            )
        },
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(HEAD)
    lines = []
    for part in options.parts:
        for line in MEASURES[part](options, device):
            show(line)
            lines.append(line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**about, "lines": [asdict(line) for line in lines]}, file, indent=1)
    return int(options.check and any(line.kept is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
