"""Measure the cost of a large population: 100,000 clients, 1,000 of them a round, with and without client state.

    python benchmarks/scale.py [--population 100000] [--cohort 1000] [--rounds 20] [--on-disk] [--check]

The script prints the seconds and the resident memory of every round. Neither may depend on how many rounds have passed,
because client states are allocated before round 1 and a round only touches its cohort. --check fails if the last five
rounds take a fifth more CPU time than the first five (after round 1), or memory grows by more than 1 MB a round.
--on-disk keeps client states in a sparse file, as a run does when they do not fit in memory. Use one thread
(OMP_NUM_THREADS=1) on a machine that does other work, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fedstill import Built, Callback, Dataset, Federation, Schedule, Training, build_method, build_model, federate

FEATURES, CLASSES = 16, 4
MEGABYTE = 2**20
SLOWER, GROWTH = 1.2, 1.0  # the limits of --check: last rounds over first ones, MB a round


def make_federation(population: int, samples: int) -> Federation:
    """Return clients with 1 to 2 * samples - 1 Gaussian points; the class is the largest of the first features."""
    generator = np.random.Generator(np.random.PCG64(0))
    sizes = generator.integers(1, 2 * samples, population)
    x = generator.standard_normal((int(sizes.sum()), FEATURES), dtype=np.float32)
    test = generator.standard_normal((500, FEATURES), dtype=np.float32)
    names = tuple(str(c) for c in range(CLASSES))
    train, exam = (
        Dataset("points", torch.from_numpy(rows), torch.from_numpy(rows[:, :CLASSES].argmax(1)), names)
        for rows in (x, test)
    )
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    return Federation(train, exam, torch.arange(len(x)), offsets, partition="uneven sizes")


def resident() -> float:
    """Return the resident memory of this process in MB."""
    return _status("VmRSS")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) * 1024 / MEGABYTE


class Meter(Callback):
    """A callback that notes seconds, CPU seconds and memory at the end of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.work: list[float] = []
        self.memory: list[float] = []
        self._last = time.perf_counter(), time.process_time()

    def on_round(self, row: dict[str, object]) -> bool | None:
        now = time.perf_counter(), time.process_time()
        self.seconds.append(now[0] - self._last[0])
        self.work.append(now[1] - self._last[1])
        self.memory.append(resident())
        self._last = now
        return None

    def slowdown(self) -> float:
        """Return the median CPU seconds of the last rounds over the first; round 1 is left out, because it warms up."""
        work = self.work[1:]
        edge = min(5, len(work) // 2)
        return statistics.median(work[-edge:]) / statistics.median(work[:edge])


def measure(method: str, federation: Federation, *, cohort: int, rounds: int, on_disk: bool) -> Meter:
    meter = Meter()
    federate(
        Built(
            method=build_method(method)[0].method,
            model=build_model("mlp", input_shape=(FEATURES,), classes=CLASSES, hidden=(8,), init="torch"),
            federation=federation,
            training=Training(epochs=1, batch_size=8, lr=0.05),
            label=method,
            schedule=Schedule(rounds=rounds, cohort=cohort),
        ),
        callbacks=[meter],
        state_budget=0 if on_disk else None,
    )
    return meter


def slope(values: list[float]) -> float:
    """Return the growth a round by least squares."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def report(method: str, meter: Meter, started: float) -> bool:
    """Print the figures of one method; return whether they are within the limits of --check."""
    seconds, memory = meter.seconds[1:], meter.memory[1:]
    slower, growth = meter.slowdown(), slope(memory)
    print(f"{method}: {started:.0f} MB before the run, round 1 took {meter.seconds[0]:.3f} s")
    print("  seconds of rounds 2.. ", " ".join(f"{value:.3f}" for value in seconds))
    print("  resident MB           ", " ".join(f"{value:.1f}" for value in memory))
    print(
        f"  median {statistics.median(seconds):.4f} s a round; CPU time of the last over the first rounds {slower:.2f}"
    )
    print(f"  memory: {growth:+.3f} MB a round, peak {_status('VmHWM'):.0f} MB")
    return slower <= SLOWER and growth <= GROWTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--population", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=5, help="mean number of samples a client")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument("--on-disk", action="store_true", help="keep client states in a file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when rounds slow down or memory grows")
    options = parser.parse_args()
    if options.rounds < 4:
        parser.error("--rounds: at least 4, so that first and last rounds can be compared")
    federation = make_federation(options.population, options.samples)
    print(
        f"{options.population:,} clients, cohort {options.cohort:,}, {len(federation.indices):,} samples, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    kept = []
    for method in options.methods.split(","):
        started = resident()
        meter = measure(method, federation, cohort=options.cohort, rounds=options.rounds, on_disk=options.on_disk)
        kept.append(report(method, meter, started))
    if options.check and not all(kept):
        sys.exit(1)


if __name__ == "__main__":
    main()
