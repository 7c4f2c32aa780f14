"""A Ray cluster of this machine for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from crews import over
from elsewhere import RecipeOf

from fedstill.loop.federate import Built
from fedstill.population.on_ray import ray_crew

STORE = 300 << 20  # bytes


@pytest.fixture(scope="module")
def actors() -> Iterator[None]:
    """Room for two actors, which find the modules of the tests."""
    import ray

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ray.init(address="local", num_cpus=2, num_gpus=0, object_store_memory=STORE, include_dashboard=False)
    yield
    ray.shutdown()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def over_ray(recipe: RecipeOf, count: int = 2) -> Built:
    """The same run with its clients trained by Ray actors."""
    return over(recipe, partial(ray_crew, count=count))
