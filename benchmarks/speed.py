"""Measure how fast a round of local training is: the ratio over a well-written sequential PyTorch loop.

    python benchmarks/speed.py [--device cuda] [--only cnn-10,mlp-50] [--repeats 5] [--json FILE]

One run measures all cases. The baseline keeps its data on the device, reuses one module and loads the received
weights in place, as a careful research script does; the network is written as in its paper. Both sides train
the same clients for the same steps. Repeats alternate between the two, and the shortest of each counts, because other
work on the machine can only add time. Convolutions on a CPU run one epoch instead of five.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from costs import synchronize
from torch import nn

from fedstill.core.trainer import LocalWork
from fedstill.core.types import Dataset, Federation, Training
from fedstill.engine import build_engine
from fedstill.methods.lookup import build_method
from fedstill.models import MODELS, build_model


@dataclass(frozen=True)
class Case:
    """A cohort: one round of one network."""

    name: str
    model: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    epochs: int = 5
    batch: int = 50
    options: dict[str, Any] = field(default_factory=dict)
    baseline_clients: int | None = None  # time only so many clients of the baseline, scaled to all
    wanted: dict[str, float] = field(default_factory=dict)  # device -> the ratio we promise
    engines: tuple[str, ...] = ("auto",)


def uneven(clients: int, total: int, alpha: float = 0.1) -> tuple[int, ...]:
    """Return client sizes as in the published LDA(0.1) split: Dirichlet draws for ten classes, summed."""
    draws = np.random.Generator(np.random.PCG64(1)).dirichlet([alpha] * clients, size=10) * total / 10
    return tuple(int(size) for size in np.maximum(draws.sum(0), 20))


IMAGE = (3, 32, 32)
BOTH = ("batched", "looped")
CASES = [
    Case("mlp-50", "mlp", (64,), (20,) * 50, 5, 10, {"hidden": (64,)}, wanted={"cpu": 10}),
    Case("mlp-1000", "mlp", (64,), (20,) * 1000, 5, 10, {"hidden": (64,)}, 200, wanted={"cpu": 20}),
    Case("cnn-10", "cnn", IMAGE, (500,) * 10, wanted={"cpu": 1.2, "cuda": 10}, engines=BOTH),
    Case("cnn-100", "cnn", IMAGE, (500,) * 100, baseline_clients=10, wanted={"cuda": 15}, engines=BOTH),
    Case("cnn-10-uneven", "cnn", IMAGE, uneven(10, 5000), wanted={"cuda": 8}, engines=BOTH),
    Case("cnn-100-uneven", "cnn", IMAGE, uneven(100, 50000), baseline_clients=20, wanted={"cuda": 8}, engines=BOTH),
    Case(
        "resnet8-10",
        "resnet8",
        IMAGE,
        (500,) * 10,
        options={"norm": "group"},
        baseline_clients=4,
        wanted={"cuda": 7},
        engines=BOTH,
    ),
    Case("vgg8-10", "vgg8", IMAGE, (500,) * 10, baseline_clients=4, wanted={"cuda": 6}, engines=BOTH),
    Case(
        "resnet18-10",
        "resnet18",
        IMAGE,
        (500,) * 10,
        options={"stem": "imagenet"},
        baseline_clients=4,
        wanted={"cuda": 10},
        engines=BOTH,
    ),
]
CPU_CASES = {"mlp-50", "mlp-1000", "cnn-10"}


class PaperCNN(nn.Module):
    """The FedAvg CNN as published: convolution, ReLU, pooling; twice; 512; classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
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

    def forward(self, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, self.body(x)


def make_federation(case: Case) -> Federation:
    generator = torch.Generator().manual_seed(0)
    rows = sum(case.sizes)
    x = torch.randn(rows, *case.shape, generator=generator)
    y = torch.randint(0, 10, (rows,), generator=generator)
    data = Dataset("noise", x, y, tuple("0123456789"))
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(case.sizes)]))
    return Federation(data, data, torch.arange(rows), offsets)


def sequential(case: Case, federation: Federation, device: torch.device) -> Callable[[], float]:
    """Return the baseline, which trains client after client and returns the seconds of the whole cohort."""
    network: nn.Module = PaperCNN() if case.model == "cnn" else MODELS[case.model](case.shape, 10, **case.options)
    network.to(device).train()
    x, y = federation.train.x.to(device), federation.train.y.to(device)
    start = [p.detach().clone() for p in network.parameters()]
    indices, offsets = federation.indices.to(device), federation.offsets.tolist()
    timed = range(len(case.sizes))[:: max(1, len(case.sizes) // (case.baseline_clients or len(case.sizes)))]
    share = sum(case.sizes[k] for k in timed) / sum(case.sizes)

    def run() -> float:
        uploads = []
        synchronize(device)
        begin = time.perf_counter()
        for client in timed:
            with torch.no_grad():
                torch._foreach_copy_(list(network.parameters()), start)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
            rows = indices[offsets[client] : offsets[client + 1]]
            for _ in range(case.epochs):
                for batch in rows[torch.randperm(len(rows), device=device)].split(case.batch):
                    optimizer.zero_grad(set_to_none=True)
                    F.cross_entropy(network(x[batch])[1], y[batch]).backward()
                    optimizer.step()
            uploads.append([p.detach().clone() for p in network.parameters()])
        [torch.stack(layer).mean(0) for layer in zip(*uploads, strict=True)]
        synchronize(device)
        return (time.perf_counter() - begin) / share

    return run


def ours(case: Case, federation: Federation, device: torch.device, engine_name: str) -> tuple[Callable[[], float], str]:
    """Return a round of FedAvg through the library (plan, training, average), and the name of its engine."""
    model = build_model(case.model, input_shape=case.shape, classes=10, **case.options)
    engine = build_engine(engine_name, str(device), model=model, federation=federation)
    method = build_method("fedavg", {})[0].method
    training = Training(epochs=case.epochs, batch_size=case.batch, lr=0.01, momentum=0.9, weight_decay=1e-5)
    weights = model.init(0)
    weights = type(weights)(*({k: v.to(device) for k, v in part.items()} for part in weights))
    ids = np.arange(len(case.sizes))
    rounds = iter(range(1, 10**6))

    def run() -> float:
        synchronize(device)
        begin = time.perf_counter()
        trained = engine.train(LocalWork(method.objective, training, weights, round=next(rounds)), ids, {})
        share = (trained.uploads.size / trained.uploads.size.sum()).float()
        {name: torch.tensordot(share.to(p.dtype), p, 1) for name, p in trained.uploads.weights.params.items()}
        synchronize(device)
        return time.perf_counter() - begin

    return run, engine.name


def matmul_rate(device: torch.device) -> float:
    """Return the TFLOP/s of a large float32 matrix product, with the precision of convolutions (TF32 on a GPU)."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    times = []
    for _ in range(8):
        synchronize(device)
        begin = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - begin)
    torch.set_float32_matmul_precision(before)
    return 2 * size**3 / statistics.median(times[3:]) / 1e12


def measure(case: Case, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Time the baseline and each engine in turn; return a row for each engine."""
    if device.type == "cpu" and case.model != "mlp":
        case = replace(case, epochs=1)
    federation = make_federation(case)
    baseline = sequential(case, federation, device)
    baseline()
    contenders = []
    engines = case.engines if device.type == "cuda" else ("auto",)
    for engine in engines:
        run, name = ours(case, federation, device, engine)
        begin = time.perf_counter()
        run()
        contenders.append((name, run, [], time.perf_counter() - begin))
    slow = []
    for _ in range(repeats):
        slow.append(baseline())
        for _, run, times, _ in contenders:
            times.append(run())
    steps = case.epochs * sum(-(-size // case.batch) for size in case.sizes)
    base = min(slow)
    return [
        {
            "case": case.name,
            "engine": name,
            "client_steps": steps,
            "sequential_ms_per_step": base / steps * 1e3,
            "ours_ms_per_step": min(times) / steps * 1e3,
            "ratio": base / min(times),
            "wanted": case.wanted.get(device.type),
            "first_round_s": first,
        }
        for name, _, times, first in contenders
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--only", default="", help="names of cases, with commas; by default all, on a CPU the small ones"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    rate = matmul_rate(device)
    print(f"torch {torch.__version__}, {device}, float32 matmul {rate:.2f} TFLOP/s, {torch.get_num_threads()} threads")
    print(
        f"{'case':16s} {'engine':8s} {'loop ms/step':>12s} {'ours ms/step':>12s} {'ratio':>7s} {'wanted':>7s}  "
        "first round"
    )
    chosen = (
        set(options.only.split(",")) if options.only else {c.name for c in CASES if device.type == "cuda"} or CPU_CASES
    )
    rows = []
    for case in CASES:
        if case.name not in chosen:
            continue
        for row in measure(case, device, options.repeats):
            wanted = f"{row['wanted']:.1f}" if row["wanted"] else "-"
            print(
                f"{row['case']:16s} {row['engine']:8s} {row['sequential_ms_per_step']:12.3f} "
                f"{row['ours_ms_per_step']:12.3f} {row['ratio']:6.1f}x {wanted:>7s}  {row['first_round_s']:.2f} s",
                flush=True,
            )
            if case.model == "cnn":
                flops = 3 * 2 * 17.67e6 * case.batch / (row["ours_ms_per_step"] / 1e3) / 1e12
                print(
                    f"{'':16s} the CNN reaches {flops:.2f} TFLOP/s, {flops / rate:.0%} of the matmul rate", flush=True
                )
            rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"device": str(device), "torch": torch.__version__, "matmul_tflops": rate, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
