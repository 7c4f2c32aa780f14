"""Who trains: a `CohortEngine` trains clients, a `Trainer` is what a server step trains with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedstill.core.types import Model, Objective, Output, Params, Seed, Training, Tree, Uploads, Weights


@dataclass(frozen=True)
class LocalWork:
    """The work of a cohort in one round: the same for all of its clients, whoever they are.

    All of it but the objective is data. Another process builds the objective again from `method`.
    """

    objective: Objective
    training: Training
    start: Weights
    received: Tree = field(default_factory=dict)  # slots that the server broadcasts
    round: int = 1
    seed: Seed = 0  # of the run
    method: str = ""  # the text that it was built from; empty: it was made in Python, and stays in this process


class Messages(NamedTuple):
    """Uploads in the form in which they arrive from clients that nobody vouches for."""

    by_client: Mapping[int, bytes | Mapping[str, Any] | Exception]  # an exception: the client's call ended with it
    template: Uploads  # the form of one upload, without data
    arrived: int | None = None  # bytes on the way, where messages were opened on arrival; None: those of the messages
    wanted: int | None = None  # uploads that the round can use, where more clients were asked; None: all of them
    notes: tuple[tuple[int, str], ...] = ()  # (client, event) for the audit; no upload is refused for one


class Trained(NamedTuple):
    """The result of a cohort: uploads go to the server, states stay with the clients."""

    uploads: Uploads | Messages
    states: Tree


class CohortEngine(Protocol):
    """Trains the clients of a federation. It knows their data and their network from when it was built."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...

    def train(self, work: LocalWork, ids: np.ndarray, states: Tree) -> Trained:
        """Train the clients `ids`, whose memories are `states`; results are stacked in the order of `ids`.

        All tensors that go in and come out lie on `device`. A client's result depends on no other client.
        """
        ...


Watch = Callable[[int, "Weights"], bool]  # (steps done, weights now, which the next step overwrites) -> stop?


class Lesson(NamedTuple):
    """The task that one model is taught: an objective on (x, y), or on some rows of them."""

    objective: Objective
    x: Tensor
    y: Tensor  # labels (M,) or soft targets (M, K)
    training: Training
    rows: Tensor | None = None  # None: all of them


class Fitted(NamedTuple):
    """A trained model, and all that is needed to train it further."""

    weights: Weights
    optimizer: Tree  # what its optimiser remembers
    loss: Tensor  # mean over the steps


class Trainer(Protocol):
    """Trains and asks models on the server's own device, with the training loop of the clients."""

    def fit(
        self, lesson: Lesson, start: Weights, seed: Seed, *, optimizer: Tree | None = None, watch: Watch | None = None
    ) -> Fitted:
        """Train one model from `start` by a lesson.

        optimizer: what the optimiser remembers from an earlier part of the same training; None or empty: a fresh one.
        watch: is called after each step, and may end the training.
        """
        ...

    def outputs(
        self,
        weights: Weights,
        x: Tensor,
        stacked: bool = False,
        *,
        features: bool = True,
        batch: int | None = None,
        seed: Seed = 0,
        rows: Tensor | None = None,
        keep: bool = True,
    ) -> Output:
        """Outputs in eval mode over all of x, or some `rows` of it, in chunks; stacked weights give (T, M, ...).

        features: False leaves them out (they take most of the memory). batch: run in train mode instead, so many
        rows at a time (BatchNorm by the batch, live dropout by `seed`). keep: False says that x does not come back,
        and takes no place from the sets that do.
        """
        ...

    def batch_statistics(self, weights: Weights, x: Tensor, batch: int = 128) -> Params:
        """Buffers with BatchNorm's statistics taken anew over all of x: the mean over batches, by their rows."""
        ...

    def take_turns(
        self,
        players: Mapping[str, Player],
        start: Mapping[str, Weights],
        drawn: Tree,
        given: Tree,
        seed: Seed,
        *,
        optimizers: Mapping[str, Tree] | None = None,
    ) -> dict[str, Fitted]:
        """Train several models, each step of one seeing all: I exchanges, in each of them every player's turn in order.

        drawn: (I, ...) a row for each exchange. given: tensors that all of them see. optimizers: by name, the memory
        that a player's optimiser goes on from (none: a fresh one). The loss of a player is the mean over its steps.
        """
        ...

    def lend(self, model: Model) -> Trainer:
        """The same device, precision and data forms for another model (pre-training adds a projection head)."""
        ...


class Scene(NamedTuple):
    """All that a player may look at in one step; no gradient goes into any of it."""

    weights: Mapping[str, Weights]  # of every player, as they are now
    drawn: Tree  # of this exchange: its row of what `take_turns` was given
    given: Tree  # the same in all exchanges: teachers, class weights
    seen: Tree  # what the player's own `look` found when its turn began
    step: Tensor  # int64 scalar: its step within the turn, from 0; a look comes before step 0 and reads 0
    seed: Tensor  # int64 scalar of this exchange, player and step, or of its look; for core.seeds.uniform / normal
    each: Callable[[Weights, Tensor], Output]  # (stacked weights, x) -> (T, B, ...) in eval mode; x gets its gradient


def nothing_seen(_: Scene) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Player:
    """One of several models that are trained in turns. Functions are made once: an engine keeps what it captured.

    loss: (own weights, which get the gradient, scene) -> (scalar, new buffers).
    training: optimiser and rate; its `steps` are those of one turn.
    look: once when a turn begins, without gradient: what stays the same over its steps.
    """

    loss: Callable[[Weights, Scene], tuple[Tensor, Params]]
    training: Training
    look: Callable[[Scene], Tree] = nothing_seen


_GIVEN = ContextVar("threads are given", default=False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch work with so many threads. Small matrices on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def given_threads(count: int) -> Iterator[None]:
    """Let torch work with so many threads, and engines train one client at a time with all of them."""
    token = _GIVEN.set(True)
    try:
        with threads(count):
            yield
    finally:
        _GIVEN.reset(token)


def threads_are_given() -> bool:
    """Whether somebody said how many threads torch has (`engine.threads`)."""
    return _GIVEN.get()
