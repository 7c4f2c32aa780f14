"""Index plans: which sample each client sees at which step, drawn on the CPU as a function of the seed path.

A plan fixes everything random about local training (batches, augmentation, dropout, learning rates) before
any tensor moves, so that CPU, GPU, chunk size and engine cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import bits, seed_for
from fedstill.core.types import Seed, Training

_WHOLE = ("epochs", "steps", "batch_size", "lr_cycle")
_NUMBERS = ("lr", "momentum", "weight_decay", "clip", "lr_decay", "lr_epoch_decay", "lr_low")
_MAY_BE_NONE = ("steps", "clip")


@dataclass(frozen=True)
class Plan:
    """Local work of a cohort; column c is a client. Rows past a client's own steps are padding."""

    index: np.ndarray  # (S, C, B) int64 rows of the data; padding repeats one of the client's rows
    weight: np.ndarray  # (S, C, B) float32: 1 real, 0 padding
    bits: np.ndarray  # (S, C, B) int64: 64 random bits a sample, for augmentation
    seeds: np.ndarray  # (S, C) int64: one a step
    finish_seeds: np.ndarray  # (C,) int64: for what a client does after its last step
    lr: np.ndarray  # (S, C) float64; the engine rounds it to its own precision
    steps: np.ndarray  # (C,) int64
    travel: np.ndarray  # (C,) float64, see core.types.Local

    @property
    def full(self) -> np.ndarray:
        """(S,) whether no row of a client that still trains is padding."""
        finished = np.arange(len(self.weight))[:, None] >= self.steps[None, :]
        return np.asarray((self.weight.all(2) | finished).all(1))

    @property
    def shared_rate(self) -> bool:
        """Whether all clients have the same learning rate at every step."""
        return bool((self.lr == self.lr[:, :1]).all())

    def columns(self, order: list[int]) -> Plan:
        """The same plan for some clients, in another order, cut to their longest."""
        if order == list(range(len(self.steps))):
            return self
        steps = self.steps[order]
        longest = int(steps.max(initial=0))
        by_step = {name: getattr(self, name)[:longest, order] for name in ("index", "weight", "bits", "seeds", "lr")}
        return Plan(**by_step, finish_seeds=self.finish_seeds[order], steps=steps, travel=self.travel[order])


def _positions(sizes: np.ndarray, seeds: np.ndarray, epochs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Shuffle every client for each of its epochs at once: (client, epoch, rank in the epoch, sample of the client)."""
    owner = np.repeat(np.arange(len(sizes)), epochs)  # a group is one epoch of one client
    pass_of = np.arange(len(owner)) - np.repeat(np.cumsum(epochs) - epochs, epochs)
    group_sizes = sizes[owner]
    group = np.repeat(np.arange(len(owner)), group_sizes)
    sample = np.arange(len(group)) - np.repeat(np.cumsum(group_sizes) - group_sizes, group_sizes)
    client, epoch = owner[group], pass_of[group]
    keys = bits(seeds[client], (epoch.astype(np.uint64) << np.uint64(32)) + sample.astype(np.uint64))
    # One sort for all: the group fills the high bits, so that shuffles never mix.
    places = np.uint64(max(len(owner) - 1, 1).bit_length())
    keys = (group.astype(np.uint64) << (np.uint64(64) - places)) | (keys >> places)
    order = np.argsort(keys)
    return client, epoch, sample, sample[order]


def effective_steps(steps: int, training: Training) -> np.ndarray:
    """b_s: the weight of a constant gradient in the s-th SGD move (1 without momentum), s = 0 .. steps - 1."""
    rho = training.momentum if training.optimizer == "sgd" else 0.0
    power = np.arange(1, steps + 1)
    buffer = power.astype(np.float64) if rho == 1.0 else (1.0 - rho**power) / (1.0 - rho)
    return 1.0 + rho * buffer if training.nesterov and rho else buffer


def _learning_rates(training: Training, steps: np.ndarray, per_epoch: np.ndarray, round: int) -> np.ndarray:
    base = training.lr * training.lr_decay ** (round - 1)
    step = np.arange(int(steps.max(initial=0)))[:, None]
    rates = base * training.lr_epoch_decay ** (step // np.maximum(per_epoch, 1)[None, :])
    if training.lr_schedule == "cosine":
        rates = rates * 0.5 * (1.0 + np.cos(np.pi * np.minimum(step / np.maximum(steps, 1)[None, :], 1.0)))
    if training.lr_schedule == "cyclic":
        done = (step % training.lr_cycle) / max(training.lr_cycle - 1, 1)
        lowest = training.lr_low / training.lr if training.lr else 1.0
        rates = rates * (1.0 + done * (lowest - 1.0))
    return np.asarray(rates, np.float64)


def check_training(training: Training) -> None:
    """Refuse what cannot be trained with, naming the key."""
    for key in (*_WHOLE, *_NUMBERS):
        value, kind = getattr(training, key), Integral if key in _WHOLE else Real
        if not isinstance(value, kind) and not (value is None and key in _MAY_BE_NONE):
            words = "a whole number" if key in _WHOLE else "a number"
            raise FedstillError(f"local.{key} = {value!r} must be {words}: see docs/experiment-file.md")
    limits = {
        "batch_size": training.batch_size >= 1,
        "epochs": training.epochs >= 0,
        "steps": training.steps is None or training.steps >= 0,
        "lr": training.lr >= 0,
        "momentum": 0 <= training.momentum < 1,
        "optimizer": training.optimizer in ("sgd", "adam", "adamw"),
        "lr_schedule": training.lr_schedule in ("constant", "cosine", "cyclic"),
        "lr_cycle": training.lr_cycle >= 1,
        "lr_low": training.lr_low >= 0 and (training.lr_schedule != "cyclic" or training.lr_low <= training.lr),
        "clip": training.clip is None or training.clip > 0,
        "part": training.part in ("all", "head"),
    }
    for key, fine in limits.items():
        if not fine:
            raise FedstillError(f"local.{key} = {getattr(training, key)!r} is impossible; see docs/experiment-file.md")


def make_plan(
    rows: np.ndarray, sizes: np.ndarray, ids: np.ndarray, *, training: Training, round: int, seed: Seed
) -> Plan:
    """Plan one round: `rows` are the clients' data rows one after another, `sizes` how many each has."""
    batch, cohort = training.batch_size, len(sizes)
    per_epoch = -(-sizes // batch)
    if training.steps is None:
        epochs, steps = np.full(cohort, training.epochs), training.epochs * per_epoch
    else:
        epochs = -(-training.steps // np.maximum(per_epoch, 1))
        steps = np.where(sizes > 0, training.steps, 0)
    longest = int(steps.max(initial=0))
    first = np.cumsum(sizes) - sizes
    index = np.zeros((longest, cohort, batch), np.int64)
    index[:] = rows[np.minimum(first, max(len(rows) - 1, 0))][None, :, None] if len(rows) else 0
    weight = np.zeros((longest, cohort, batch), np.float32)
    draws = np.zeros((longest, cohort, batch), np.int64)
    client, epoch, rank, sample = _positions(sizes, seed_for(seed, round, ids, "batches"), epochs)
    step = epoch * per_epoch[client] + rank // batch
    kept = step < steps[client]
    if not kept.all():
        client, epoch, rank, sample, step = (part[kept] for part in (client, epoch, rank, sample, step))
    place = (step * cohort + client) * batch + rank % batch
    index.reshape(-1)[place] = rows[first[client] + sample]
    weight.reshape(-1)[place] = 1.0
    if training.augment:
        counter = (epoch.astype(np.uint64) << np.uint64(32)) + sample.astype(np.uint64)
        draws.reshape(-1)[place] = bits(seed_for(seed, round, ids, "augment")[client], counter).view(np.int64)
    seeds = bits(seed_for(seed, round, ids, "steps")[None, :], np.arange(longest)[:, None]).view(np.int64)
    finish_seeds = seed_for(seed, round, ids, "finish").view(np.int64)
    rates = _learning_rates(training, steps, per_epoch, round)
    active = np.arange(longest)[:, None] < steps[None, :]
    moves = rates * active * effective_steps(longest, training)[:, None]
    travel = np.cumsum(moves, axis=0)[-1:].sum(0)  # step by step: how a plain sum rounds depends on the cohort's width
    return Plan(index, weight, draws, seeds, finish_seeds, rates, steps, travel)


def sweep_plan(rows: np.ndarray, sizes: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Every sample of every client once, in order: (index, weight), each (S, C, B)."""
    longest = int((-(-sizes // batch)).max(initial=0))
    first = np.cumsum(sizes) - sizes
    position = np.arange(longest * batch)[:, None]
    real = position < sizes[None, :]
    index = rows[np.minimum(first[None, :] + np.where(real, position, 0), max(len(rows) - 1, 0))]
    shape = (longest, batch, len(sizes))
    return (
        np.ascontiguousarray(index.reshape(shape).transpose(0, 2, 1)),
        np.ascontiguousarray(real.reshape(shape).transpose(0, 2, 1).astype(np.float32)),
    )
