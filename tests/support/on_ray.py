"""A Ray cluster of this machine for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from fedstill.population.on_ray import RayCrew, ray_crew
from fedstill.population.scattered import MakeCrew
from fedstill.population.worker import Arrays, Kit

STORE = 300 << 20  # bytes
ROOM_FOR_TWO = {
    "address": "local", "num_cpus": 2, "num_gpus": 0, "object_store_memory": STORE, "include_dashboard": False,
}  # fmt: skip


@contextmanager
def modules_of_tests() -> Iterator[None]:
    """Let processes that are started now find the modules of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        yield


@contextmanager
def local_ray(**how: Any) -> Iterator[Any]:
    """Connect to Ray."""
    import ray

    with modules_of_tests():
        ray.init(log_to_driver=False, **how)
        try:
            yield ray
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def room_for_two() -> Iterator[None]:
    """A cluster of this machine with room for two actors, to which nobody else may connect before the module ends."""
    with local_ray(**ROOM_FOR_TWO):
        yield


@pytest.fixture(scope="module")
def two_actors(room_for_two: None) -> Iterator[MakeCrew]:
    """A crew of two actors that are used for one run after another, because a process needs seconds to start."""
    import ray

    crews: list[RayCrew] = []

    @contextmanager
    def make(kit: Kit, rows: Arrays) -> Iterator[RayCrew]:
        if not crews:
            crews.append(stack.enter_context(ray_crew(kit, rows, count=2)))
        else:
            crews[0]._held = [ray.put(kit), ray.put(rows)]
            ray.get([actor.__ray_call__.remote(_made_again) for actor in crews[0]._actors])
        yield crews[0]

    with ExitStack() as stack:
        yield make


def _made_again(actor: Any) -> None:
    actor._worker = None
