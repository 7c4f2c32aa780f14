"""Measure the cost of the server's work: the pass of all teachers over the unlabeled set, and a round of MrTF.

    python benchmarks/server_cost.py [--device cuda] [--small] [--models cnn,vgg8,mlp] [--parts pass,round,memory]
                                     [--repeats 5] [--check] [--json FILE]

The images are random bytes of CIFAR's shape. Repeats alternate and the shortest counts, because other work on the
machine can only add time. --small takes seconds on a CPU.

    pass     `engine.outputs` of 10 stacked models on 10,000 images, against loops of plain PyTorch: one module after
             the other in eval mode, images on the device and normalised beforehand, in batches of 64, 128, 640 and as
             many as the engine takes. Same precision. "together" (vmap) and "in turn" (large pieces, one model after
             the other) are the engine's two ways; it should have taken the faster one. On a GPU the promise is held
             against the loop in batches of 64, as the papers' loaders do; a loop with larger batches is
             much nearer. Sets of at least one full piece (4,096 images) run in turn there because that is faster (10
             models x 10,000 images on an H200, in turn and together: cnn 55 and 66 ms, mlp 8.0 and 17.2, VGG8 146 and
             496; VGG8's loops 1918, 1208, 286 in batches of 64, 128, 640).
    round    A round of MrTF with all its modules against the sum of its parts, each timed alone: FedAvg's round, the
             passes of the teachers, of the sent model and of the average (with features), the student's steps.
    memory   Peak of the pass beyond weights and outputs for 10 and for 100 teachers (CUDA only).

With --check the exit code is 1 if the pass is slower than promised (on a GPU 5 times the loop in batches of 64, on a
CPU not slower than any loop, up to 10 %), the round takes more than 1.5 times its parts, or memory grows with the
number of teachers by more than half.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from costs import HEAD, Line, shortest, show
from torch import Tensor, nn

from fedstill.core.trainer import Lesson
from fedstill.core.tree import byte_size, rows, stack, to_device
from fedstill.core.types import Dataset, Federation, Training, Weights
from fedstill.engine import Engine, build_engine, build_engines, choose_device
from fedstill.engine.forward import ROWS_AT_ONCE, forward_many
from fedstill.engine.step import precision_mode
from fedstill.loop.federate import Built, Schedule, federate
from fedstill.methods.lookup import build_method
from fedstill.models import MODELS, build_model
from fedstill.server.distill.student import soft_target_loss

CLASSES, IMAGE = 10, (3, 32, 32)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCHES = (64, 128, 640)
PARTS = ("pass", "round", "memory")
GPU_PROMISE = 5.0  # times the loop in batches of 64, the size of the papers' loaders
CPU_PROMISE = 0.9  # times every loop
ROUND_LIMIT, MEMORY_LIMIT = 1.5, 1.5


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *IMAGE), generator=generator, dtype=torch.uint8)


def make_federation(clients: int, samples: int, unlabeled: int) -> Federation:
    total = clients * samples
    y = torch.randint(0, CLASSES, (total,), generator=torch.Generator().manual_seed(1))
    train = Dataset("noise", images(total), y, tuple("0123456789"), MEAN, STD)
    test = Dataset("noise", train.x[:100], y[:100], train.classes, MEAN, STD)
    offsets = torch.arange(0, total + 1, samples)
    return Federation(train, test, torch.arange(total), offsets, images(unlabeled, seed=2))


def make_engine(name: str, federation: Federation, device: torch.device) -> Engine:
    model = build_model(name, input_shape=IMAGE, classes=CLASSES)
    return build_engine("auto", str(device), model=model, federation=federation)


def some_models(engine: Engine, count: int) -> Weights:
    return to_device(stack([engine.model.init(seed) for seed in range(count)]), engine.device)


def plain_modules(name: str, teachers: Weights, device: torch.device) -> list[nn.Module]:
    """Return the same networks as ordinary modules on the device."""
    modules = []
    for place in range(len(next(iter(teachers.params.values())))):
        module: nn.Module = MODELS[name](IMAGE, CLASSES)
        teacher = rows(teachers, place)
        module.load_state_dict({**teacher.params, **teacher.buffers})
        modules.append(module.to(device).eval())
    return modules


@torch.no_grad()
def plain_loop(modules: list[nn.Module], x: Tensor, batch: int) -> Tensor:
    return torch.stack([torch.cat([module(piece)[1] for piece in x.split(batch)]) for module in modules])


def measure_pass(name: str, options: argparse.Namespace, device: torch.device) -> list[Line]:
    federation = make_federation(1, 8, options.samples)
    engine = make_engine(name, federation, device)
    assert federation.unlabeled is not None
    x, teachers = federation.unlabeled.to(device), some_models(engine, options.teachers)
    feed, modules = engine._feed_of(x), plain_modules(name, teachers, device)
    inputs = feed.inputs(slice(None))

    def ours() -> Tensor:
        return engine.outputs(teachers, x, stacked=True, features=False).logits

    def loop(batch: int) -> Callable[[], Tensor]:
        return lambda: plain_loop(modules, inputs, batch)

    def way(in_turn: bool) -> Callable[[], Any]:
        return lambda: forward_many(engine.model, teachers, feed, loop=in_turn, features=False)

    runs: dict[str, Callable[[], Any]] = {"engine": ours, "together": way(False), "in turn": way(True)}
    batches = sorted({*BATCHES, ROWS_AT_ONCE.get(device.type, 512)})
    runs |= {f"loop {batch}": loop(batch) for batch in batches}
    with precision_mode(engine.precision):
        gap = float((ours() - plain_loop(modules, inputs, 640)).abs().max())
        seconds = shortest(runs, options.repeats, device)
    return pass_lines(name, seconds, device, gap)


def pass_lines(name: str, seconds: dict[str, float], device: torch.device, gap: float) -> list[Line]:
    lines = []
    for run, taken in seconds.items():
        factor, kept = taken / seconds["engine"], None
        if run.startswith("loop"):
            if device.type == "cpu":
                kept = factor >= CPU_PROMISE
            elif run == "loop 64":
                kept = factor >= GPU_PROMISE
        lines.append(Line("pass", f"{name}: {run}", taken, factor, kept))
    faster = min("together", "in turn", key=lambda way: seconds[way])
    note = f"largest difference of a logit {gap:.1e}"
    if seconds["engine"] > 1.25 * seconds[faster]:
        note += f"; '{faster}' is faster than the engine's choice"
    lines[0] = Line(**{**asdict(lines[0]), "note": note})
    return lines


def round_seconds(
    method: str, chosen: dict[str, Any], engine: Engine, federation: Federation, how: dict[str, Any], rounds: int
) -> float:
    """Return the seconds of the shortest round, without the first and the last, because the last is evaluated."""
    result = federate(
        Built(
            method=build_method(method, chosen)[0].method,
            model=engine.model,
            federation=federation,
            **how,
            schedule=Schedule(rounds=rounds + 2, cohort=federation.population, evaluate_every=10**6),
            engines=partial(build_engines, engine),
        )
    )
    return min(row["seconds"] for row in result.history.rows[1:-1])


def measure_round(name: str, options: argparse.Namespace, device: torch.device) -> list[Line]:
    federation = make_federation(options.clients, options.client_samples, options.samples)
    engine = make_engine(name, federation, device)
    how = {"training": Training(epochs=options.epochs, batch_size=64, lr=0.01, momentum=0.9)}
    student = Training(steps=options.steps, optimizer="adam", lr=3e-4, batch_size=64)
    learning = {"steps": options.steps, "lr": student.lr, "batch_size": student.batch_size}
    chosen = {"warm_up": 0, "student": learning}
    whole = round_seconds("mrtf", chosen, engine, federation, how, options.repeats)
    fedavg = round_seconds('fedavg+average(weighting="uniform")', {}, engine, federation, how, options.repeats)
    assert federation.unlabeled is not None
    x, teachers = federation.unlabeled.to(device), some_models(engine, options.clients)
    sent, objective = rows(teachers, 0), soft_target_loss()
    targets = torch.softmax(engine.outputs(rows(teachers, 1), x).logits, dim=-1)
    parts = shortest(
        {
            "the teachers' pass": lambda: engine.outputs(teachers, x, stacked=True, features=False),
            "the sent model's pass": lambda: engine.outputs(sent, x, features=False),
            "the average's pass, with features": lambda: engine.outputs(sent, x),
            "the student's steps": lambda: engine.fit(Lesson(objective, x, targets, student), sent, 0).weights,
        },
        options.repeats,
        device,
    )
    parts = {"FedAvg's round": fedavg, **parts}
    total = sum(parts.values())
    lines = [Line("round", f"{name}: {part}", taken, taken / total) for part, taken in parts.items()]
    return [*lines, Line("round", f"{name}: MrTF's round", whole, whole / total, whole <= ROUND_LIMIT * total)]


def measure_memory(name: str, options: argparse.Namespace, device: torch.device) -> list[Line]:
    if device.type != "cuda":
        return [Line("memory", f"{name}: peak of a pass", None, None, note="only measured on a GPU")]
    federation = make_federation(1, 8, options.samples)
    engine = make_engine(name, federation, device)
    assert federation.unlabeled is not None
    x, beyond = federation.unlabeled.to(device), []
    for count in (options.teachers, 10 * options.teachers):
        teachers = some_models(engine, count)
        engine.outputs(rows(teachers, slice(0, 2)), x, stacked=True, features=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = engine.outputs(teachers, x, stacked=True, features=False)
        beyond.append(torch.cuda.max_memory_allocated() - before - byte_size(tuple(output)))
        del teachers, output
    few, many = beyond
    factor = many / max(few, 1)
    notes = [f"{size / 2**20:.0f} MiB beyond weights and outputs" for size in beyond]
    return [
        Line("memory", f"{name}: {options.teachers} teachers", None, 1.0, note=notes[0]),
        Line("memory", f"{name}: {10 * options.teachers} teachers", None, factor, factor <= MEMORY_LIMIT, notes[1]),
    ]


MEASURES = {"pass": measure_pass, "round": measure_round, "memory": measure_memory}


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--models", default="", help="of the passes; cnn, vgg8 and mlp by default (small: cnn and mlp)")
    parser.add_argument("--round-model", default="", help="vgg8 by default (small: cnn)")
    parser.add_argument("--parts", default=",".join(PARTS))
    sizes = {
        "teachers": (10, 3),
        "samples": (10_000, 160),
        "clients": (10, 3),
        "client_samples": (500, 64),
        "epochs": (5, 1),
        "steps": (500, 10),
        "repeats": (5, 3),
    }
    for name, (full, small) in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, help=f"{full:,} by default ({small})")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a promise is not kept")
    parser.add_argument("--json", default="")
    options = parser.parse_args(arguments)
    for name, pair in sizes.items():
        setattr(options, name, getattr(options, name) or pair[options.small])
    options.models = (options.models or ("cnn,mlp" if options.small else "cnn,vgg8,mlp")).split(",")
    options.round_model = options.round_model or ("cnn" if options.small else "vgg8")
    options.parts = options.parts.split(",")
    for given, known in ((options.models, MODELS), ([options.round_model], MODELS), (options.parts, PARTS)):
        if unknown := [word for word in given if word not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
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
            for key in ("teachers", "samples", "clients", "client_samples", "epochs", "steps", "repeats")
        },
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(HEAD)
    lines = []
    for part in options.parts:
        for name in [options.round_model] if part == "round" else options.models:
            for line in MEASURES[part](name, options, device):
                show(line)
                lines.append(line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**about, "lines": [asdict(line) for line in lines]}, file, indent=1)
    return int(options.check and any(line.kept is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
