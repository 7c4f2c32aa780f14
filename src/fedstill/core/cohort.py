"""Who takes part in a round."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Seed

Sampling = Literal["fixed", "poisson"]  # a cohort of one size, or each client by its own coin


def cohort_size(cohort: int | float, population: int) -> int:
    """Clients a round: a share R < 1 of K clients is max(1, round(R K)); a whole number is itself."""
    if isinstance(cohort, float) and cohort == 1.0:
        raise FedstillError(f"cohort = 1.0: write 1 for one client, or {population} for everybody")
    if 0 < cohort < 1:
        return max(1, round(cohort * population))
    if not 1 <= cohort <= population or cohort != int(cohort):
        raise FedstillError(
            f"cohort = {cohort}: use a number from 1 to {population} (the population) or a share between 0 and 1"
        )
    return int(cohort)


def draw_cohort(clients: np.ndarray, count: int, *, seed: Seed, round: int, sampling: Sampling = "fixed") -> np.ndarray:
    """Ids of one round's cohort, ascending; they depend on seed and round only, so all methods see the same clients.

    poisson: each client takes part with probability count / clients, whoever else does; there may be none.
    """
    if sampling == "poisson":
        coins = seed_for(seed, "poisson cohort", round, clients.astype(np.uint64)).astype(np.float64) / 2.0**64
        return np.sort(clients[coins < count / len(clients)])
    generator = numpy_generator(seed_for(seed, "cohort", round))
    return np.sort(clients[generator.choice(len(clients), size=count, replace=False, shuffle=False)])
