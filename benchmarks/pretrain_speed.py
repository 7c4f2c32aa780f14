"""Measure the speed of SimCLR pre-training: images a second through the augmentation alone and through whole steps.

    python benchmarks/pretrain_speed.py [--device cuda] [--model resnet8_wide] [--batch 512] [--steps 100] [--side 32]
                                        [--precision auto] [--compile] [--repeats 3] [--check]

The images are random bytes. An image counts once, though a step trains on two views of it. The shortest of the repeats
counts, because other work on the machine can only add time.

    views    `Feed.batch` with two random views a sample, normalised; on a GPU replayed as a CUDA graph, as in a step.
    step     One epoch of `Trainer.fit` as the server's pre-training calls it: plan, views, two forward passes,
             NT-Xent, gradient and Adam. The first call (which compiles and captures the step) is not timed.

With --check the exit code is 1 if a GPU takes 50,000 images a second or fewer through whole steps. An H200 takes
more in bf16 with --compile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import bits, seed_for
from fedstill.core.trainer import Lesson
from fedstill.core.tree import to_device
from fedstill.core.types import Dataset, Federation, Training
from fedstill.engine import Engine, build_engine
from fedstill.methods.pretraining.contrastive import simclr_pretext
from fedstill.models import MODELS, build_model

CLASSES = 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PROMISE = 50_000  # images a second through a whole step, ResNet-8 of FedAUX on an H200


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="resnet8_wide", choices=sorted(MODELS))
    parser.add_argument("--precision", default="auto")
    for name, default in {"batch": 512, "steps": 100, "side": 32, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="steps by torch.compile, as engine.compile = true")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a promise is not kept")
    return parser.parse_args(arguments)


def make_engine(chosen: argparse.Namespace) -> tuple[Engine, Tensor]:
    """Return an engine for the model, and the images on which it is pre-trained."""
    generator = torch.Generator().manual_seed(0)
    shape = (chosen.batch * chosen.steps, 3, chosen.side, chosen.side)
    x = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    train = Dataset("noise", x[:8], torch.zeros(8, dtype=torch.int64), tuple("0123456789"), MEAN, STD)
    data = Federation(train, train, torch.arange(8), torch.tensor([0, 8]))
    model = build_model(chosen.model, input_shape=shape[1:], classes=CLASSES)
    how = {"precision": chosen.precision, "compile": chosen.compile}
    engine = build_engine("auto", chosen.device, model=model, federation=data, **how)
    return engine, x.to(engine.device)


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of the shortest of several runs, after one that does not count."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(repeats))


def views_alone(engine: Engine, x: Tensor, batch: int, steps: int) -> Callable[[], None]:
    feed, device = engine._feed_of(x), engine.device
    index = torch.arange(batch, device=device)
    draws = torch.from_numpy(bits(seed_for(0, "views"), np.arange(batch)).view(np.int64)).to(device)

    def eager() -> None:
        for _ in range(steps):
            feed.batch(index, draws, ("views",))

    if device.type != "cuda":
        return eager
    feed.batch(index, draws, ("views",))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        feed.batch(index, draws, ("views",))

    def replayed() -> None:
        for _ in range(steps):
            graph.replay()

    return replayed


def whole_steps(engine: Engine, x: Tensor, batch: int) -> Callable[[], object]:
    pretext = simclr_pretext(Training(epochs=1, batch_size=batch, optimizer="adam", lr=1e-3, weight_decay=1e-6))
    model = pretext.model(engine.model)
    trainer, start, y = engine.lend(model), to_device(model.init(0), engine.device), pretext.targets(x)
    return lambda: trainer.fit(Lesson(pretext.objective, x, y, pretext.training), start, 0, optimizer={}).loss.item()


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    engine, x = make_engine(chosen)
    images = chosen.batch * chosen.steps
    views = images / seconds(views_alone(engine, x, chosen.batch, chosen.steps), chosen.repeats, engine.device)
    steps = images / seconds(whole_steps(engine, x, chosen.batch), chosen.repeats, engine.device)
    kernels = ", compiled" if chosen.compile else ""
    where = f"{engine.device}, {engine.precision}{kernels}, batch {chosen.batch}, {chosen.side}x{chosen.side}"
    print(f"views  {views:12,.0f} images/s  {1e3 * chosen.batch / views:9.3f} ms a batch  ({where})")
    print(f"step   {steps:12,.0f} images/s  {1e3 * chosen.batch / steps:9.3f} ms a batch  ({chosen.model}, {where})")
    if not kept(steps, engine.device):
        print(f"promised: more than {PROMISE:,} images/s")
        return 1 if chosen.check else 0
    return 0


def kept(rate: float, device: torch.device) -> bool:
    """Return whether the promise is kept; nothing is promised for a CPU."""
    return device.type != "cuda" or rate > PROMISE


if __name__ == "__main__":
    sys.exit(main())
