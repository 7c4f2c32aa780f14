"""Clients of this process that can be asked without a run around them."""

from types import SimpleNamespace

import torch

from fedstill.loop.here import Here


def clients_of(federation, trainer=None, *, seed=0, noise_seed=0):
    """Return the population of a federation: it answers questions, and it cannot train."""
    engine = SimpleNamespace(device=torch.device("cpu"))
    model = SimpleNamespace(groups=None)
    return Here(
        SimpleNamespace(
            federation=federation, engine=engine, trainer=trainer, model=model, seed=seed, noise_seed=noise_seed
        ),
        {},
    )
