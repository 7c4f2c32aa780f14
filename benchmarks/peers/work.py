"""The work that every library does, and the clock that watches it. It needs torch and nothing of fedstill.

A script with_NAME.py gives `main` a function of (case, rounds, clock). The function calls `clock.round_begins()` before
each round or at its end, whichever its library lets it do, and returns the tensors of the last model in the order of
`network(case).parameters()`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

MARK = "FEDSTILL_PEERS_RUN"  # in the environment of all processes of a run, so that daemons are found, too


@dataclass(frozen=True)
class Case:
    """One cohort: every client takes part in every round."""

    name: str
    shape: tuple[int, ...]
    clients: int
    samples: int  # of each client
    batch: int
    epochs: int
    lr: float

    @property
    def steps(self) -> int:
        """Client steps of a round."""
        return self.clients * self.epochs * -(-self.samples // self.batch)


CASES = {
    case.name: case
    for case in (
        Case("mlp-50", (64,), 50, 20, 10, 5, 0.1),
        Case("mlp-1000", (64,), 1000, 20, 10, 5, 0.1),
        Case("cnn-10", (3, 32, 32), 10, 500, 50, 1, 0.05),
    )
}


def network(case: Case) -> nn.Module:
    """Return the network as its paper has it: the same initial weights at every call."""
    torch.manual_seed(0)
    if len(case.shape) == 1:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


@functools.cache
def clients(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return (x, y) of each client: noise, with the labels that a fixed linear map gives it."""
    generator = torch.Generator().manual_seed(0)
    rows = case.clients * case.samples
    x = torch.randn(rows, *case.shape, generator=generator)
    y = (x.flatten(1) @ torch.randn(x[0].numel(), 10, generator=generator)).argmax(1)
    return list(zip(x.split(case.samples), y.split(case.samples), strict=True))


class Batches:
    """A client's batches in a new order in every epoch, cut from tensors: the fast way to write a loader."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.y)).split(self.size):
            yield self.x[rows], self.y[rows]


def train(model: nn.Module, batches: Batches, case: Case) -> int:
    """A client's epochs, where a library leaves them to its user; return the number of steps."""
    steps = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    for _ in range(case.epochs):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    return steps


def processes(mark: str) -> Iterator[Path]:
    """Yield the folders in /proc of the processes whose environment has this mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield folder
        except OSError:  # it has ended, or is somebody else's
            continue


def cpu_seconds(mark: str) -> float:
    """Return what the processes of a run have computed until now, with children that have ended."""
    total = 0
    for folder in processes(mark):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(field) for field in fields[11:15])
    return total / os.sysconf("SC_CLK_TCK")


class Clock:
    """Notes when rounds begin and end, and what the start took."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.start_cpu = self.start_wall = 0.0
        self.steps = 0

    def round_begins(self) -> None:
        """Call it once before the first round, and at the end of each."""
        self.marks.append(time.perf_counter())
        if len(self.marks) == 2:
            self.start_cpu = cpu_seconds(os.environ.get(MARK, ""))
            self.start_wall = time.time() - float(os.environ.get("FEDSTILL_PEERS_BEGAN", "nan"))
            self.marks[-1] = time.perf_counter()  # the look at /proc is not the library's

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]


def loss(case: Case, parameters: Sequence[Tensor]) -> float:
    """Return the cross-entropy of a model on all rows, a client at a time: it must not be what takes most memory."""
    model = network(case)
    with torch.no_grad():
        for parameter, given in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(torch.as_tensor(given))
        return sum(float(F.cross_entropy(model(x), y)) for x, y in clients(case)) / case.clients


def declare_torchvision() -> None:
    """Let torchvision be imported beside a torch without CUDA, for libraries that import it on their own.

    Its wheel is built for CUDA. Beside another torch its operators do not load, and its import asks for these two.
    """
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


Run = Callable[[Case, int, Clock], Sequence[Tensor]]


def main(run: Run, *, writes: Callable[[], bool] = lambda: True, counts: bool = False) -> None:
    """Run a library as the command line says, and write what was measured.

    writes: whether this process is the one that writes, where a library has several of the same script.
    counts: whether `run` counts the steps itself, because no optimiser of this process makes them one by one.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("rounds", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--whole", action="store_true", help="one batch of all rows of a client: no order to draw")
    parser.add_argument("--count", action="store_true", help="count the steps of optimisers")
    options = parser.parse_args()
    case = CASES[options.case]
    if options.whole:
        case = replace(case, batch=case.samples, epochs=2)
    clock = Clock()

    def count(*_: object) -> None:
        clock.steps += 1

    if options.count and not counts:
        register_optimizer_step_post_hook(count)
    torch.manual_seed(0)
    last = run(case, options.rounds, clock)
    if not writes():
        return
    torch.save([torch.as_tensor(tensor).clone() for tensor in last], options.out.with_suffix(".pt"))
    threads = torch.get_num_threads()
    facts = {
        "seconds": clock.seconds,
        "start_cpu": clock.start_cpu,
        "start_wall": clock.start_wall,
        "steps": clock.steps,
        "loss": loss(case, last),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": threads,
        "torch": torch.__version__,
    }
    options.out.write_text(json.dumps(facts))
