"""Measure a round of local training beside other busy processes: what the others cost it.

    python benchmarks/busy.py [--busy 0,1,2] [--only mlp-50,mlp-1000,cnn-10] [--threads 2] [--repeats 9] [--check]

For each case the script trains the cohort of benchmarks/speed.py alone and beside one and two processes that compute
without end. It prints the median of the seconds, and how many times those of the quiet machine they are. Repeats go
through the numbers of busy processes in turn. --threads gives torch's threads, as `engine.threads` does; without it
the engine has its workers. --check fails where one busy process costs more than 2.2 times, or two more than 3.3 times.
The machine must do nothing else: look at the load average, which the script prints.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from speed import CASES, Case, make_federation

from fedstill.core.trainer import LocalWork, given_threads
from fedstill.core.types import Training
from fedstill.engine import build_engine
from fedstill.methods.lookup import build_method
from fedstill.models import build_model

LIMITS = {1: 2.2, 2: 3.3}
WORK = "while True: sum(range(100000))"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many processes compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0.0)  # they must have started
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class Cohort:
    """One round of a case, to be repeated."""

    def __init__(self, case: Case) -> None:
        case = replace(case, epochs=1) if case.model != "mlp" else case
        federation = make_federation(case)
        model = build_model(case.model, input_shape=case.shape, classes=10, **case.options)
        self.engine = build_engine("auto", "cpu", model=model, federation=federation)
        training = Training(epochs=case.epochs, batch_size=case.batch, lr=0.01, momentum=0.9)
        self.work = LocalWork(build_method("fedavg")[0].method.objective, training, model.init(0))
        self.ids = np.arange(len(case.sizes))

    def seconds(self, least: float) -> float:
        """Return the seconds of a round, over as many rounds as take `least` seconds."""
        began, rounds = time.perf_counter(), 0
        while rounds == 0 or time.perf_counter() - began < least:
            self.engine.train(self.work, self.ids, {})
            rounds += 1
        return (time.perf_counter() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", default="0,1,2")
    parser.add_argument("--only", default="mlp-50,mlp-1000,cnn-10")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--least", type=float, default=0.5, help="seconds of one measurement")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    counts = [int(count) for count in options.busy.split(",")]
    cores = len(os.sched_getaffinity(0))
    how = f"engine.threads = {options.threads}" if options.threads else f"workers of {torch.get_num_threads()} threads"
    print(f"{cores} cores, load average {os.getloadavg()[0]:.1f}, {how}, torch {torch.__version__}")
    broken = []
    with given_threads(options.threads) if options.threads else nullcontext():
        for name in options.only.split(","):
            cohort = Cohort(next(case for case in CASES if case.name == name))
            cohort.seconds(options.least)
            times: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(options.repeats):
                for count in counts:
                    with ExitStack() as stack:
                        stack.enter_context(busy(count))
                        times[count].append(cohort.seconds(options.least))
            quiet = statistics.median(times[counts[0]])
            shown = []
            for count in counts:
                seconds = statistics.median(times[count])
                shown.append(f"{count} busy {seconds:.3f} s ({seconds / quiet:.2f})")
                if seconds / quiet > LIMITS.get(count, float("inf")):
                    broken.append(f"{name} beside {count}")
            print(f"{name}: {', '.join(shown)}", flush=True)
    if options.check and broken:
        sys.exit(f"over the limit: {', '.join(broken)}")


if __name__ == "__main__":
    main()
