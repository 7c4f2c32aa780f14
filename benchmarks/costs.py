"""Shared by the scripts that measure time: a figure beside its promise, and the shortest of alternating runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WIDTH = 40
HEAD = f"{'part':7s} {'measured':{WIDTH}s} {'ms':>10s} {'factor':>8s}"


@dataclass(frozen=True)
class Line:
    """One figure, and whether it is as promised (None: nothing is promised)."""

    part: str
    name: str
    seconds: float | None
    factor: float | None
    kept: bool | None = None
    note: str = ""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def shortest(runs: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Run all once to warm up, then all in turn `repeats` times; return the fewest seconds of each."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            synchronize(device)
            begin = time.perf_counter()
            run()
            synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
    return {name: min(times) for name, times in seconds.items()}


def show(line: Line) -> None:
    seconds = "" if line.seconds is None else f"{1e3 * line.seconds:.1f}"
    factor = "" if line.factor is None else f"{line.factor:.2f}"
    kept = {None: "", True: "ok", False: "not as promised"}[line.kept]
    print(f"{line.part:7s} {line.name:{WIDTH}s} {seconds:>10s} {factor:>8s}  {kept} {line.note}".rstrip(), flush=True)
