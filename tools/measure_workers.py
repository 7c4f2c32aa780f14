"""Measure what it costs, and what it gains, to spread a cohort over workers, beside the same cohort in one process.

    python tools/measure_workers.py [--ray] [--repeats 15]
    python tools/measure_workers.py --training --network cnn --method fedavg --workers 1 2
    python tools/measure_workers.py --training --network cnn --method fedavg --workers 1 2 --device cuda --steps 50

All ways take turns, so that whatever else the machine does hits all. "Idle" is a round in which clients take no step:
what is left is the way of orders, uploads and memories there and back. One torch thread a process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fedstill.compose.combine import broadcast_of, first_state
from fedstill.compose.phases import phases_of
from fedstill.core.population import Order
from fedstill.core.tree import flatten, stack
from fedstill.core.types import Dataset, Federation, Training
from fedstill.engine import build_engines
from fedstill.loop.federate import Built, Schedule, first_weights, make_task, share_states_of, suited
from fedstill.loop.site import Site
from fedstill.methods.lookup import build_method
from fedstill.models import build_model
from fedstill.population.on_ray import ray_crew
from fedstill.population.scattered import Scattered
from fedstill.population.spawned import spawned_crew
from fedstill.population.worker import Kit, outline_of, rows_of

SHAPES = {"mlp": (1, 28, 28), "cnn": (3, 32, 32)}


@dataclass(frozen=True)
class Case:
    """A cohort; it is the recipe of the workers, too."""

    method: str
    network: str
    cohort: int
    rows: int  # of each client
    steps: int
    device: str

    def built(self, federation: Federation) -> Built:
        options = {"hidden": (64,)} if self.network == "mlp" else {}
        return Built(
            method=build_method(self.method),
            model=build_model(self.network, input_shape=SHAPES[self.network], classes=10, **options),
            federation=federation,
            training=Training(batch_size=32, lr=0.05, steps=self.steps),
            schedule=Schedule(rounds=1, cohort=self.cohort),
            engines=partial(build_engines, "looped" if self.same_bits else "auto", self.device),
        )

    def __call__(self, federation: Federation, device: str) -> Built:
        return self.built(federation)

    @property
    def same_bits(self) -> bool:
        """Return whether workers must give the bits of one process: clients that train alone on a CPU do."""
        return self.network == "cnn" and self.device == "cpu"

    def federation(self) -> Federation:
        count, noise = self.cohort * self.rows, np.random.Generator(np.random.PCG64(0))
        x = torch.from_numpy(noise.integers(0, 255, (count, *SHAPES[self.network])).astype(np.uint8))
        data = Dataset("noise", x, torch.arange(count) % 10, tuple("abcdefghij"))
        return Federation(data, data, torch.arange(count), torch.arange(self.cohort + 1) * self.rows)


def measure(case: Case, on_ray: bool, counts: Sequence[int], repeats: int) -> list[list[float]]:
    """Return the seconds of each play in one process, and on each of these counts of workers."""
    built = case.built(case.federation())
    engines = built.engines(model=built.model, federation=built.federation)
    task = make_task(built, suited(phases_of(built.method), built.model, built.training), engines)
    weights = first_weights(built, engines.trainer)
    first, phases = share_states_of(task.phases, weights, built.model)
    task = replace(task, phases=phases)
    method, ids = task.method(1), np.arange(case.cohort)
    order = Order(1, weights, broadcast_of(method, first_state(method, weights)))
    states = stack([first] * case.cohort)
    kit, alone = Kit(case, outline_of(built.federation), case.device, 0, 1), Site(task)
    crew, hosts = (ray_crew if on_ray else spawned_crew), [alone]
    times: list[list[float]] = [[] for _ in range(1 + len(counts))]
    with ExitStack() as open_crews:
        if on_ray:  # room for all crews at once, because only one of them is at work at a time
            open_crews.enter_context(cluster_of(sum(counts)))
        for count in counts:
            hosts.append(Scattered(task, open_crews.enter_context(crew(kit, rows_of(built.federation), count=count))))
            hosts[-1].gather()
        for turn in range(repeats + 1):
            results = []
            for place, where in enumerate(hosts):
                began = time.perf_counter()
                results.append(where.play(order, ids, states, 0))
                if case.device == "cuda":
                    torch.cuda.synchronize()
                if turn:  # the first one warms up
                    times[place].append(time.perf_counter() - began)
            if case.same_bits:
                expected, *others = (flatten(each.uploads.weights) for each in results)
                assert all(torch.equal(expected[name], leaf) for other in others for name, leaf in other.items())
    return times


@contextmanager
def cluster_of(cpus: int) -> Iterator[None]:
    """Start a Ray cluster of this machine that believes to have so many cores."""
    import ray

    ray.init(address="local", num_cpus=cpus, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--ray", action="store_true", help="Ray actors instead of spawned processes")
    words.add_argument("--repeats", type=int, default=15)
    words.add_argument("--idle", action="store_true", help="only rounds without a step")
    words.add_argument("--training", action="store_true", help="only rounds with steps")
    words.add_argument("--method", nargs="+", default=["fedavg", "scaffold"])
    words.add_argument("--network", nargs="+", default=[*SHAPES], choices=SHAPES)
    words.add_argument("--steps", type=int, help="of each client, in place of 10 (mlp) and 5 (cnn)")
    words.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: spawned workers share the GPUs")
    words.add_argument("--workers", nargs="+", type=int, default=[2], help="how many, each count a column")
    options = words.parse_args()
    torch.set_num_threads(1)
    heads = ["one process", *(f"{count} worker{'s' if count > 1 else ''}" for count in options.workers)]
    print(f"{'milliseconds, min / median':36}" + "".join(f"{head:>18}" for head in heads))
    for method in options.method:
        for network, cohort, rows, steps in (("mlp", 50, 300, 10), ("cnn", 10, 160, 5)):
            for taken in (0, options.steps or steps):
                if network not in options.network or (options.idle and taken) or (options.training and not taken):
                    continue
                case = Case(method, network, cohort, rows, taken, options.device)
                columns = [
                    f"{1000 * min(t):.0f} / {1000 * statistics.median(t):.0f}"
                    for t in measure(case, options.ray, options.workers, options.repeats)
                ]
                label = f"{method}, {network}, {cohort} clients, {'idle' if not taken else f'{taken} steps'}"
                print(f"{label:36}" + "".join(f"{column:>18}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
