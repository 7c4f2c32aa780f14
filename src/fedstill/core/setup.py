"""What leaves clients, and what is kept, before a method's first round: types only. `core.types` hands them on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from fedstill.core.data import Tokenizer

if TYPE_CHECKING:
    from fedstill.core.trainer import Trainer
    from fedstill.core.types import Model, Seed, Tree, Weights


@dataclass(frozen=True)
class Preparation:
    """All that a server step may look at, and ask, before its method's first round."""

    round: int  # the first round: 1, or later where the method follows another one
    model: Model
    population: int
    unlabeled: Tensor | None  # (M, ...) in storage form; None unless Need.UNLABELED is declared
    seed: Seed  # of this preparation: another one in every phase
    trainer: Trainer
    ask: Ask  # a question to every client that holds data
    cache: Cache | None = None
    tell: Callable[[str, float], None] = lambda line, share: None  # progress: a line, and the share that is done
    metrics: dict[str, float] = field(default_factory=dict)  # a step may report here
    groups: Mapping[str, Preparation] = field(default_factory=dict)  # several architectures: each sees its own clients
    candidates: Mapping[str, Weights] = field(default_factory=dict)  # ... what each prototype is by now, by name
    shared: dict[str, Any] = field(default_factory=dict)  # ... and what one of them worked out for all
    inputs: Mapping[str, Any] = field(default_factory=dict)  # how stored samples become inputs: mean, std
    run_seed: Seed = 0  # the run's own: the same in every phase
    noise_seed: Seed = 0  # of noise that protects: no other run has it
    labeled: tuple[Tensor, Tensor] | None = None  # (x, y) for looking at what was prepared, never for training
    tokenizer: Tokenizer | None = None  # of text whose ids are tokens


def no_preparation(candidate: Weights, state: Tree, _: Preparation) -> tuple[Weights, Tree]:
    return candidate, state


class Outlook(NamedTuple):
    """The facts about a method's first round that are known before the run starts."""

    round: int  # its first: 1, or later where it follows another method
    unlabeled: Tensor | None  # (M, ...) in storage form; None unless Need.UNLABELED is declared
    tokenizer: Tokenizer | None = None  # of text whose ids are tokens
    part: str = "all"  # what clients train: see core.types.Training
    model: Model | None = None


class ClientData(NamedTuple):
    """The data that one client shows to a question before the first round. They do not leave the client."""

    id: int
    x: Tensor  # (n, ...) in storage form
    y: Tensor  # (n,)


class Tools(NamedTuple):
    """The tools that a client lends to a question."""

    trainer: Trainer  # of the client's own network
    seed: Seed  # of the question; the same for all clients
    noise_seed: Seed  # of noise that protects; in a deployment nobody but the client knows it


class Question(NamedTuple):
    """A question that clients answer before a method's first round. They find it by name in their own method.

    answer: (the client's data, what the server sent with the question, tools) -> what leaves the client.
    """

    name: str
    answer: Callable[[ClientData, Tree, Tools], Tree]


AnyQuestion = Question | Callable[[ClientData], dict[str, Any]]  # a plain function reaches clients of this process only


class Answers(NamedTuple):
    """The answers of the clients that were asked, stacked in the order of `ids`. Clients that failed are left out."""

    ids: Tensor  # (A,) int64
    values: dict[str, Any]


class Ask(Protocol):
    """Ask the clients that hold data: all of them, or those `among` some ids.

    sent: what each of these clients is sent with the question; it is counted. A Question reads it.
    release: the `what` of the method's Release that speaks of the answers; without one they count as open.
    """

    def __call__(
        self, question: AnyQuestion, /, among: Collection[int] | None = None, *, sent: Any = None, release: str = ""
    ) -> Answers: ...


class Cache(Protocol):
    """Results that are expensive and the same for many runs, kept on disk by what they follow from."""

    def load(self, identity: Mapping[str, Any]) -> dict[str, Any] | None: ...

    def save(self, identity: Mapping[str, Any], tree: dict[str, Any]) -> None: ...

    def alone(self, identity: Mapping[str, Any], tell: Callable[[str], None]) -> AbstractContextManager[None]:
        """While it is held no other run works on this result; who comes second waits, and tells for whom."""
        ...
