"""The vocabulary of fedstill: types only, no logic.

Letters used in shape comments everywhere: C cohort, N population, B batch, K classes, M unlabeled,
T teachers, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from torch import Tensor

from fedstill.core.data import Dataset as Dataset
from fedstill.core.data import Federation as Federation
from fedstill.core.data import Tokenizer as Tokenizer
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.limits import SECTION, Count, Decay, Example, Flag, NotNegative, Positive, PositiveShare, Rows
from fedstill.core.setup import Answers as Answers
from fedstill.core.setup import Ask as Ask
from fedstill.core.setup import Cache as Cache
from fedstill.core.setup import ClientData as ClientData
from fedstill.core.setup import Outlook as Outlook
from fedstill.core.setup import Preparation as Preparation
from fedstill.core.setup import Question as Question
from fedstill.core.setup import Tools as Tools
from fedstill.core.setup import no_preparation as no_preparation
from fedstill.core.trainer import Fitted as Fitted
from fedstill.core.trainer import Player as Player
from fedstill.core.trainer import Scene as Scene
from fedstill.core.trainer import Trainer as Trainer
from fedstill.core.trainer import Watch as Watch


class Stage(Enum):
    """Where a server step stands when methods are joined: in this order."""

    AGGREGATE = "make one model from the cohort's"  # one a method
    MOVE = "decide the server's step from the sent model"  # at most one a method
    KEEP = "keep something, and pass the model through"
    REFINE = "improve the model"
    REPORT = "make two models: one is sent, the other one is reported"  # one a method


class Samples(NamedTuple):
    """The samples that a generator on the server invents."""

    x: Tensor  # (M, ...) as the model reads it: normalised
    y: Tensor  # (M,) int64, the classes that it was asked for


class Targets(NamedTuple):
    """The server's belief about its unlabeled data, and the rows it learns from."""

    probabilities: Tensor  # (M, K), rows sum to 1
    kept: Tensor  # (M,) bool


# What a client sends in a round: its parameters, BatchNorm statistics, size with steps, travel and loss, label counts,
# and whatever its objective sends beside (SCAFFOLD's control).
Upload = Literal["model", "buffers", "numbers", "label_counts", "extra"]


@dataclass(frozen=True)
class Release:
    """Something about private data that leaves clients with noise on it: what a privacy accountant composes.

    Neighbouring federations differ in one sample of one client, or in all that one client holds (`unit`).
    """

    what: str  # for people: "certainty scores", "model updates"
    unit: Literal["sample", "client"]
    multiplier: float | None  # standard deviation of the Gaussian noise / L2 sensitivity; None: no claim, see `why`
    when: Literal["once", "round"]
    against: Literal["server", "public"]  # noise before the server looks, or only before anybody else does
    why: str = ""  # why there is no claim, or what it rests on
    covers: tuple[Upload, ...] = ()  # of a round's: what it protects; a claim needs all that leaves
    without_trust: str = ""  # of noise that the server adds: what to use where each client is to add its own
    # of a round's: sum_j factor_j n_{t-j} is fresh noise, and the multiplier is that of taking part once; one number:
    # the noises of rounds are independent. See privacy/correlated.py
    factor: tuple[int, ...] = (1,)


ENSEMBLE = "ensemble"  # all prototypes together: the mean of their logits


def check_report(report: str, prototypes: Iterable[str]) -> None:
    """What is looked at is the ensemble or one of the prototypes."""
    choices = (ENSEMBLE, *prototypes)
    if report not in choices:
        raise FedstillError(f"model.report = '{report}' is unknown: {suggest(report, choices)}")


Params = dict[str, Tensor]  # flat names as in nn.Module.named_parameters()
Tree = dict[str, Any]  # nested dicts with tensors at the leaves: states, slots, uploads
Seed = int  # 64 bits; see core/seeds.py


class Weights(NamedTuple):
    """All that a model is: parameters (trained) and buffers (BatchNorm statistics)."""

    params: Params
    buffers: Params

    def __repr__(self) -> str:
        return f"Weights({len(self.params)} parameters, {len(self.buffers)} buffers)"


class Output(NamedTuple):
    """A model's output for a batch: logits (B, K) and the features before the head (B, F)."""

    logits: Tensor
    features: Tensor


class Batch(NamedTuple):
    """Samples of one step. `weight` (B,) is 1 for a real sample and 0 for padding.

    `x` is what the trained part reads: where only a head is trained it may be features.
    """

    x: Tensor
    y: Tensor
    weight: Tensor


class Need(Enum):
    """Data that a part of a method looks at beyond parameters, sizes and step counts."""

    LABEL_COUNTS = "the client's own label counts (they stay on the client)"
    LABEL_COUNTS_UPLOADED = "label counts of each client, sent to the server"
    UNLABELED = "unlabeled data on the server"
    VALIDATION = "a few labeled samples on the server"
    FEATURES = "a model that returns (features, logits)"
    HEAD = "a model whose last layer can be called alone"
    TOKENS = "a network that reads text, token by token"
    CLIENT_STATE = "memory on each client between rounds"
    INDIVIDUAL_UPLOADS = "each client's model seen by the server on its own (no secure aggregation)"
    PLAIN_SGD = "the sgd optimiser on clients (the gradient is recovered from the move)"
    ONE_ARCHITECTURE = "one architecture on all clients"


class Apply(Protocol):
    """Run a model: (weights, x) -> (output, new buffers).

    `weight` (B,) tells batch statistics which rows are padding (None: all rows are real);
    `seed` is an int64 scalar tensor from which dropout masks are a pure function.
    """

    def __call__(
        self,
        weights: Weights,
        x: Tensor,
        *,
        training: bool = False,
        weight: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Output, Params]: ...


class ReadTokens(Protocol):
    """Run a text network up to its tokens: (weights, ids (B, L)) -> states (B, L, F); what text pre-training needs.

    `causal`: a token sees itself and those before it, so that its state may predict the next one. Parameters have the
    names that they have in `Model.init`; those of the pooling and of the head are not read.
    """

    def __call__(
        self, weights: Weights, x: Tensor, *, causal: bool = True, training: bool = False, seed: Tensor | None = None
    ) -> Tensor: ...


class Traits(NamedTuple):
    """Facts that an engine or a method must know of a network before it runs it."""

    features: bool = True  # it returns them
    convolutional: bool = False
    stacks_on_gpu: bool = False  # its convolutions are faster for many clients at once there: models/stacked
    batch_statistics: bool = False  # BatchNorm that uses the batch in training
    unbatchable: str | None = None  # why vmap cannot run it, in one sentence


@dataclass(frozen=True, repr=False)
class Model:
    """A stateless view of an nn.Module."""

    name: str
    init: Callable[[Seed], Weights]
    apply: Apply
    head: Callable[[Params, Tensor], Tensor] | None = None  # features -> logits
    head_names: tuple[str, ...] = ()  # its parameters, where no other layer shares them: what part = "head" trains
    frozen_names: tuple[str, ...] = ()  # parameters that do not train; they stand in the buffers, and nobody sends them
    traits: Traits = field(default_factory=Traits)
    groups: Groups | None = None  # it stands for several architectures: see compose/groups.py
    tokens: ReadTokens | None = None  # of a network that reads text
    input_shape: tuple[int, ...] = ()  # of one sample
    classes: int = 0  # K
    feature_size: int = 0  # F; 0 where it has no features
    recipe: Callable[[], Model] | None = None  # builds it again; it can be sent to another process, a Model cannot

    def __repr__(self) -> str:
        return f"Model('{self.name}', samples of {self.input_shape}, {self.classes} classes)"

    @property
    def networks(self) -> Mapping[str, Model]:
        """The prototypes that clients train, by name; a model of one architecture is the only one, named ""."""
        return {"": self} if self.groups is None else self.groups.models

    def network_of(self, client: int) -> str:
        """The name of the prototype that a client trains."""
        return "" if self.groups is None else self.groups.member[client]


@dataclass(frozen=True)
class Groups:
    """Clients with different architectures: the prototypes by name, who runs which, and what is reported."""

    models: Mapping[str, Model]
    member: tuple[str, ...]  # (N,) the prototype of each client
    report: str = ENSEMBLE  # the mean of the prototypes' logits, or the name of one prototype


class Local(NamedTuple):
    """All that one client may look at in one step."""

    params: Params  # now
    buffers: Params  # now: BatchNorm statistics as training left them
    start: Weights  # as received this round
    received: Tree  # slots the server broadcasts: "control", "generator", ...
    state: Tree  # this client's own slots, kept between rounds
    frozen: Mapping[str, Output]  # outputs of the frozen models the objective named, on this batch
    label_counts: Tensor  # (K,) float; NaN unless Need.LABEL_COUNTS is declared
    size: Tensor  # number of local samples
    steps: Tensor  # number of local optimiser steps this round
    travel: Tensor  # how far a constant unit gradient moves the weights this round: sum_s lr_s b_s
    lr: Tensor  # learning rate at the start of the round
    seed: Tensor  # int64 scalar of this client and step; draw with core.seeds.uniform / normal


def nothing(*_: Any) -> Tree:
    """The empty tree: the default of every optional hook."""
    return {}


def no_finish(_: Local, __: Tree) -> tuple[Tree, Tree]:
    return {}, {}


@dataclass(frozen=True)
class Objective:
    """A local term; `combine(*terms)` is their sum. Written for one client: no client dimension."""

    loss: Callable[[Output, Batch, Local], Tensor]  # scalar
    frozen: Mapping[str, Callable[[Local], Weights]] = field(default_factory=dict)
    init: Callable[[Weights], Tree] = nothing  # a client's first state, from the first model
    measure: Callable[[Model, Batch, Local], Tree] | None = None  # see engine: mean over local batches
    finish: Callable[[Local, Tree], tuple[Tree, Tree]] = no_finish  # -> (new state, extra upload)
    needs: frozenset[Need] = frozenset()
    risk: str = ""  # a name: it fits the labels, and a method has one such term; empty: it is added to one
    terms: tuple[Objective, ...] = ()  # what it is the sum of, when `combine` made it
    with_risk: Callable[[Objective], Objective] | None = None  # the same term, for one that differentiates the risk
    bind: Callable[[Model], Objective] | None = None  # the term for this run's model, of one that calls its head
    # (uploads, start, received) -> slots (C, ...) that follow from the rest of an upload: another one is refused
    implied: Callable[[Uploads, Weights, Tree], Tree] | None = None


class Uploads(NamedTuple):
    """The uploads that reached the server; the first dimension of every tensor is the cohort C."""

    weights: Weights
    size: Tensor  # (C,) float64
    steps: Tensor  # (C,)
    travel: Tensor  # (C,) see Local.travel
    loss: Tensor  # (C,) mean local training loss
    extra: Tree
    label_counts: Tensor | None  # (C, K), only with Need.LABEL_COUNTS_UPLOADED
    ids: Tensor  # (C,) int64


def _augmentation(word: str) -> str:
    """The word itself, if a file may name it; pre-training has others of its own."""
    if word not in ("crop", "flip", "cutout"):
        raise PydanticCustomError("literal_error", "unknown", {"expected": "'crop', 'flip' or 'cutout'"})
    return word


@dataclass(frozen=True)
class Training:
    """How weights are trained: the section [local] of an experiment, and a student on the server."""

    __pydantic_config__ = SECTION
    epochs: Count = 1
    steps: Annotated[Count | None, Example(20)] = None  # instead of epochs: exactly so many steps
    batch_size: Rows = 50
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.01
    momentum: Annotated[Decay, Example(0.9)] = 0.0
    nesterov: Flag = False
    weight_decay: Annotated[NotNegative, Example(1e-5)] = 0.0
    clip: Annotated[Positive | None, Example(10.0)] = None  # gradient norm per client, after every term
    lr_decay: Annotated[PositiveShare, Example(0.99)] = 1.0  # per round
    lr_epoch_decay: Annotated[PositiveShare, Example(0.99)] = 1.0  # per local epoch, restarted each round
    lr_schedule: Literal["constant", "cosine", "cyclic"] = "constant"  # cosine: to zero, over the local steps
    lr_cycle: Count = 25  # cyclic: steps in which the rate falls along a line to lr_low, then it starts again
    lr_low: NotNegative = 0.0
    augment: Annotated[tuple[Annotated[str, AfterValidator(_augmentation)], ...], Example(["crop", "flip"])] = ()
    part: Literal["all", "head"] = "all"  # head: linear evaluation, the extractor stays as it is, in eval mode
    keep_optimizer: Flag = False  # the optimiser's moments go on from round to round instead of starting at zero


@dataclass(frozen=True)
class Round:
    """All that the server may look at."""

    number: int  # from 1
    start: Weights  # the model that was sent
    uploads: Uploads
    model: Model
    population: int
    unlabeled: Tensor | None  # (M, ...) in storage form; None unless Need.UNLABELED is declared
    seed: Seed
    trainer: Trainer
    metrics: dict[str, float] = field(default_factory=dict)  # a step may report here
    models: dict[str, Weights] = field(default_factory=dict)  # ... and leave models whose accuracy is of interest
    validation: tuple[Tensor, Tensor] | None = None  # labeled (x, y); None unless Need.VALIDATION is declared
    groups: Mapping[str, Round] = field(default_factory=dict)  # several architectures: the round of each, by name
    shared: dict[str, Any] = field(default_factory=dict)  # ... and what one of them worked out for all, this round
    weighting: Literal["size", "uniform"] = "uniform"  # how much an upload counts: as in the method's aggregate
    teachers: dict[int, float] = field(default_factory=dict)  # a step may report how much each client counts as one


class Sum(NamedTuple):
    """The sums that secure aggregation shows of a cohort: over its clients k of weight m_k, nothing of one client."""

    weights: Weights  # sum_k m_k w_k in float64; integer buffers are left out
    extra: Tree  # sum_k m_k of each slot that is sent beside the model
    mass: Tensor  # () sum_k m_k, float64
    clients: int  # that are in the sum


@dataclass(frozen=True)
class SealedRound:
    """All that the server may look at where it sees no upload: `Round` without them, and sums in their place."""

    number: int  # from 1
    start: Weights  # the model that was sent
    sums: Mapping[Literal["size", "uniform"], Sum]  # m_k = n_k, or 1 for each client that holds samples
    model: Model
    population: int
    unlabeled: Tensor | None
    seed: Seed
    trainer: Trainer
    metrics: dict[str, float] = field(default_factory=dict)
    models: dict[str, Weights] = field(default_factory=dict)
    validation: tuple[Tensor, Tensor] | None = None
    weighting: Literal["size", "uniform"] = "uniform"


def no_change(candidate: Weights, state: Tree, _: Round) -> tuple[Weights, Tree]:
    return candidate, state


def no_objection(_: Outlook) -> None:
    return None


@dataclass(frozen=True)
class ServerStep:
    """(candidate, state, round) -> (candidate, state): one thing that the server does in a round.

    The state is a tree of slots. Three slots are read by the loop: "reported" (Weights: the model that is looked at,
    where it is not the one sent), "targets" (a Targets as a dict) and "samples" (a Samples as a dict).
    """

    name: str  # a word; the run keeps the step's state under it, and a method has no two steps of one name
    apply: Callable[[Weights, Tree, Round], tuple[Weights, Tree]] = no_change
    init: Callable[[Weights], Tree] = nothing
    broadcast: Callable[[Tree], Tree] = nothing  # slots sent to the clients next round
    needs: frozenset[Need] = frozenset()
    stage: Stage = Stage.REFINE
    # once, before the method's first round: the model that is sent then, and the step's state
    prepare: Callable[[Weights, Tree, Preparation], tuple[Weights, Tree]] = no_preparation
    check: Callable[[Outlook], None] = no_objection  # refuses, before the run starts, what `prepare` could not do

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise FedstillError(f"ServerStep({self.name!r}, ...): a step's name comes first, e.g. ServerStep('median')")


@dataclass(frozen=True)
class Aggregate(ServerStep):
    """The step that makes one model from the cohort's."""

    stage: Stage = Stage.AGGREGATE
    weighting: Literal["size", "uniform"] = "uniform"  # how much an upload counts, also for steps that follow it
    # the uploads as later steps see them: without those that it left out, or shortened as it did; None: all as they are
    hands_on: Callable[[Round], Uploads] | None = None


PerClient = Callable[[Uploads, Weights, Seed], Uploads]  # (uploads, the model that was sent, seed) -> uploads
OnCohort = Callable[[Uploads, Weights, Seed, int], Uploads]  # the int: clients in a cohort, on average


@dataclass(frozen=True)
class Mechanism:
    """One stage on the way of the uploads to the server's steps: a bound, noise, a trusted party."""

    per_client: PerClient | None = None  # changes each upload before anybody but its client sees it
    on_cohort: OnCohort | None = None  # a trusted party: the server's steps see its result instead of the uploads
    # the trusted party of a round, by the states of server steps and the noise seeds of the method's rounds before it
    by_round: Callable[[Tree, Sequence[Seed]], OnCohort] | None = None
    releases: tuple[Release, ...] = ()  # what leaves clients with noise on it, for the privacy accountant
    questions: tuple[Question, ...] = ()  # that clients answer before the method's first round


@dataclass(frozen=True)
class Method:
    """A method: what clients minimise, what the server does, what happens on the way."""

    objective: Objective
    aggregate: ServerStep  # makes one model from the cohort's
    server: tuple[ServerStep, ...] = ()  # and these go on from there, in order
    way: tuple[Mechanism, ...] = ()  # what happens to uploads between clients and server
    without_counts: str = ""  # of one that needs uploaded label counts: how to write it so that it needs none

    @property
    def releases(self) -> tuple[Release, ...]:
        return tuple(release for mechanism in self.way for release in mechanism.releases)

    @property
    def questions(self) -> tuple[Question, ...]:
        return tuple(question for mechanism in self.way for question in mechanism.questions)

    @property
    def per_client(self) -> tuple[PerClient, ...]:
        """The changes that clients make to their uploads, in order."""
        return tuple(mechanism.per_client for mechanism in self.way if mechanism.per_client is not None)

    @property
    def trusted(self) -> OnCohort | None:
        """The trusted party that stands before the server's steps, if there is one."""
        return next((mechanism.on_cohort for mechanism in self.way if mechanism.on_cohort is not None), None)

    def trusted_in(self, state: Tree, past: Sequence[Seed]) -> OnCohort | None:
        """The trusted party of a round that begins with these states; past: noise seeds of the rounds before it."""
        return next((stage.by_round(state, past) for stage in self.way if stage.by_round is not None), self.trusted)

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise FedstillError(
                f"two server steps of this method are named '{twice[0]}' ({', '.join(names)}): give each its own name, "
                "because the server keeps their states by name"
            )

    @property
    def steps(self) -> tuple[ServerStep, ...]:
        """All that the server does in a round, in order."""
        return (self.aggregate, *self.server)


class Phase(NamedTuple):
    """A stretch of rounds with one method; the last phase needs no end."""

    method: Method
    until: int | None = None  # the last round of the phase
    text: str = ""  # of all phases, where they were built from one
