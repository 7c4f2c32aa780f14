"""Randomness by path: every draw is a pure function of one root seed and where it is used.

The only module that may touch a global random stream. Draws that must agree between CPU, GPU and other
machines are counter-based (splitmix64: Steele, Lea & Flood, OOPSLA 2014), so that order, chunking and
resuming cannot change them.

>>> seed_for(0, 3, 17, "batches") == seed_for(0, 3, 17, "batches")
True
>>> seed_for(0, 3, np.arange(2), "batches").shape
(2,)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def bits(seed: Any, counter: Any) -> np.ndarray:
    """64 random bits for each (seed, counter); both may be arrays and broadcast."""
    seed, counter = np.asarray(seed, np.uint64), np.asarray(counter, np.uint64)
    with np.errstate(over="ignore"):
        mixed: np.ndarray = _mix(seed + (counter + np.uint64(1)) * np.uint64(_GOLDEN))
    return mixed


def _word(part: Any) -> Any:
    if isinstance(part, str):
        return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
    if isinstance(part, np.ndarray):
        return part.astype(np.uint64)
    return int(part) % 2**64


class Secret(int):
    """A root of 256 bits that nobody may learn. Seeds below it are hashed, so that none of them leads to another."""

    @classmethod
    def of(cls, content: bytes) -> Secret:
        return cls(int.from_bytes(hashlib.blake2b(content, digest_size=32).digest(), "little"))

    def below(self, *path: Any) -> Secret:
        """The secret at a path of texts and numbers."""
        key = self.to_bytes(32, "little")
        for part in path:
            content = f"text {part}" if isinstance(part, str) else f"number {int(part)}"
            key = hashlib.blake2b(content.encode(), key=key, digest_size=32).digest()
        return Secret(int.from_bytes(key, "little"))

    def __repr__(self) -> str:
        return "Secret(...)"

    __str__ = __repr__


def seed_for(root: Any, *path: Any) -> Any:
    """The seed at a path below `root`; an array in the path gives an array of seeds (uint64).

    Below a Secret every seed is a Secret, and the path has no arrays.
    """
    if isinstance(root, Secret):
        return root.below(*path)
    seed: Any = np.asarray(_word(root), np.uint64)
    for part in path:
        seed = bits(bits(seed, 0), _word(part))
    return int(seed) if np.ndim(seed) == 0 else seed


def numpy_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def private_bits(seed: int, count: int) -> np.ndarray:
    """`count` times 64 bits of SHAKE-128: whoever sees some of them learns nothing about the others. 13 ns a number."""
    width = 32 if isinstance(seed, Secret) else 8
    return np.frombuffer(hashlib.shake_128(int(seed).to_bytes(width, "little")).digest(8 * count), "<u8")


def torch_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """On a CPU torch takes 32 bits of a seed: they can be tried out, so nothing that protects is drawn from it."""
    return torch.Generator(device).manual_seed(seed % 2**63)


@contextmanager
def torch_stream(seed: int) -> Iterator[None]:
    """Seed torch's global CPU stream inside the block (layer initialisation draws from it), then restore it."""
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed % 2**63)
        yield


def to_signed(seed: Any) -> Any:
    """The same 64 bits as a signed integer or int64 array (what a torch tensor holds)."""
    if isinstance(seed, np.ndarray):
        return seed.view(np.int64)
    return seed - 2**64 if seed >= 2**63 else seed


def _shift(z: Tensor, places: int) -> Tensor:
    return (z >> places) & ((1 << (64 - places)) - 1)  # torch shifts int64 arithmetically


def _tensor_bits(seed: Tensor, count: int) -> Tensor:
    counter = torch.arange(1, count + 1, device=seed.device, dtype=torch.int64)
    z = seed.unsqueeze(-1) + counter * to_signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * to_signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * to_signed(_MIX_2)
    mixed: Tensor = z ^ _shift(z, 31)
    return mixed


def uniform(seed: Tensor, shape: Sequence[int]) -> Tensor:
    """U[0, 1) of `shape` as a pure function of an int64 scalar tensor; works under vmap and in CUDA graphs."""
    values = _tensor_bits(seed, math.prod(shape))
    return (_shift(values, 40).float() * 2.0**-24).reshape(tuple(shape))


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """(..., count) of U[0, 1) for int64 seeds (...): row by row the numbers of `uniform`."""
    return _shift(_tensor_bits(seeds, count), 40).float() * 2.0**-24


def normal(seed: Tensor, shape: Sequence[int]) -> Tensor:
    """N(0, 1) of `shape` as a pure function of an int64 scalar tensor (Box-Muller)."""
    count = math.prod(shape)
    first, second = uniform(seed, (2, count)).unbind(0)
    radius = torch.sqrt(-2.0 * torch.log1p(-first))
    return (radius * torch.cos(2.0 * math.pi * second)).reshape(tuple(shape))


Sampling = Literal["fixed", "poisson", "cyclic"]  # a cohort of one size, each client by its own coin, or in turn


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


def draw_cohort(clients: np.ndarray, count: int, *, seed: int, round: int, sampling: Sampling = "fixed") -> np.ndarray:
    """Ids of one round's cohort, ascending; they depend on seed and round only, so all methods see the same clients.

    poisson: each client takes part with probability count / clients, whoever else does; there may be none.
    cyclic: clients take turns in one order, so that none comes again before floor(clients / count) rounds.
    """
    if sampling == "poisson":
        if isinstance(seed, Secret):
            numbers = private_bits(seed_for(seed, "poisson cohort", round), int(clients.max()) + 1)[clients]
        else:
            numbers = seed_for(seed, "poisson cohort", round, clients.astype(np.uint64))
        coins = numbers.astype(np.float64) / 2.0**64
        return np.sort(clients[coins < count / len(clients)])
    if sampling == "cyclic":
        order = numpy_generator(seed_for(seed, "order")).permutation(clients)
        return np.sort(order[((round - 1) * count + np.arange(count)) % len(clients)])
    generator = numpy_generator(seed_for(seed, "cohort", round))
    return np.sort(clients[generator.choice(len(clients), size=count, replace=False, shuffle=False)])
