"""One step of local training, written for one client: what every engine runs, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.moving import moves_all, moving, with_rest
from fedstill.core.author_mistakes import hide_undeclared, one_number
from fedstill.core.errors import FedstillError
from fedstill.core.needs import CURES
from fedstill.core.tree import clone, tree_map
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Params, Training, Tree, Weights
from fedstill.engine.device_data import Feed
from fedstill.engine.stack import Layout


@contextmanager
def precision_mode(precision: str, *, alone: bool = False) -> Iterator[None]:
    """What a GPU's kernels may do for speed, restored afterwards: float32 matrix products and convolutions in TF32.

    In bf16 one model that trains `alone`, with the same shapes in every step, may also have its convolutions timed and
    the fastest taken: SimCLR's step 10.5 instead of 11.3 ms. Stacks of clients have many shapes, and no such step.
    """
    before = torch.get_float32_matmul_precision()
    relaxed = precision in ("tf32", "bf16")
    torch.set_float32_matmul_precision("high" if relaxed else "highest")
    try:
        cudnn = torch.backends.cudnn
        timed = cudnn.benchmark or (alone and precision == "bf16")
        kept = {"enabled": cudnn.enabled, "deterministic": cudnn.deterministic}
        with cudnn.flags(**kept, benchmark=timed, allow_tf32=relaxed):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast_to(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def _own_code(method: Any) -> Any:
    """A copy of a bound method with a code object of its own, on which dynamo counts traces: at most eight."""
    made = method.__func__
    copy = FunctionType(made.__code__.replace(), made.__globals__, made.__name__, made.__defaults__, made.__closure__)
    return MethodType(copy, method.__self__)


def _undeclared(output: Output, index: Tensor) -> Tensor:
    """NaN in the place of features that nobody declared, so that nobody reads them by mistake."""
    return output.features.new_full((*index.shape, *output.features.shape[1:]), float("nan"))


@dataclass
class Features:
    """Features of a feed's rows under one extractor; rows that no plan has named yet are zero."""

    values: Tensor  # (n, F)
    known: np.ndarray  # (n,) bool
    extractor: Weights | None = None


class Program:
    """A model, an objective and how to train, bound to one feed; `shared` inputs change from round to round.

    With `static` the shared tensors keep their addresses over rounds (CUDA graphs read them in place).
    The stacks of clients hold the tensors that training moves, and nothing that an optimiser does can reach the others.
    Where only a head is trained, a step starts at the features.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        training: Training,
        feed: Feed,
        *,
        static: bool,
        precision: str,
        compiled: bool = False,
    ) -> None:
        self.model, self.objective, self.training, self.feed = model, objective, training, feed
        self.static, self.precision, self.compiled = static, precision, compiled
        # whether a loss was tried on undeclared inputs that object to being read: once is enough, and a trace cannot
        self.tried = compiled
        # `client_loss` of a model that trains alone, the server's or a client's
        self.loss_alone = torch.compile(_own_code(self.client_loss), dynamic=False) if compiled else self.client_loss
        self.start = Weights({}, {})
        self.received: Tree = {}
        self.layout: Layout = {}  # how a stack's parameters lie in memory: as their gradients do
        self.memory = 0  # bytes one client takes in a step, once measured
        self.budget = 0  # bytes a chunk of clients may take
        self.cache: dict[str, Output] = {}  # outputs of frozen models for every row of the feed
        self.head_only = training.part == "head"
        self.moves_all = moves_all(model, training.part)
        if self.head_only and not model.head_names:
            raise FedstillError(f"part = 'head' cannot train {model.name}: {CURES[Need.HEAD]}, and shares no weights")
        self.features: Features | None = None  # of the start, where a step begins at them

    def twin(self) -> Program:
        """Another program for the same steps, which keeps outputs of its own."""
        how: dict[str, Any] = {"static": self.static, "precision": self.precision, "compiled": self.compiled}
        other = Program(self.model, self.objective, self.training, self.feed, **how)
        other.tried = self.tried
        return other

    def load(self, start: Weights, received: Tree) -> None:
        """Take this round's model and broadcast slots."""
        if self.static and self.start.params:
            tree_map(lambda old, new: old.copy_(new), (self.start, self.received), (start, received))
        else:
            self.start, self.received = (clone(start), clone(received)) if self.static else (start, received)

    @property
    def moving(self) -> Weights:
        """The part of the start that training changes."""
        return self.start if self.moves_all else moving(self.start, self.model, self.training.part)

    def whole(self, moved: Weights, *, width: int | None = None) -> Weights:
        """Weights as `moving`, with the start's tensors for all others; `width` clients share them (no copies)."""
        if self.moves_all:
            return moved
        return with_rest(moved, clone(self.start) if self.static else self.start, width=width)

    def batch(self, index: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of an index (..., B); x are features where a step begins at them."""
        if self.features is None:
            return self.feed.batch(index, bits, self.training.augment)
        return self.features.values[index], self.feed.y[index]

    def cacheable(self, client: Local) -> list[str]:
        """Frozen models that no step of `client` changes within a round, so that their outputs can be kept."""
        if self.training.augment:
            return []
        moving = dict.fromkeys(("params", "buffers", "frozen", "seed"))
        probe = client._replace(**moving)  # type: ignore[arg-type]
        names = []
        for name, teacher in self.objective.frozen.items():
            try:
                weights = teacher(probe)
            except (TypeError, AttributeError):
                continue
            if weights.params is not None and weights.buffers is not None:
                names.append(name)
        return names

    def remember(self, name: str, rows: Tensor, output: Output) -> None:
        """Keep a frozen model's outputs for some rows (features only where they are declared)."""
        keeps_features = Need.FEATURES in self.objective.needs
        old = self.cache.get(name)
        if old is None:
            size = len(self.feed.y)
            logits = output.logits.new_zeros(size, *output.logits.shape[1:])
            features = output.features.new_zeros(size if keeps_features else 0, *output.features.shape[1:])
            old = self.cache[name] = Output(logits, features)
        old.logits[rows] = output.logits
        if keeps_features:
            old.features[rows] = output.features

    def cached(self, index: Tensor) -> dict[str, Output]:
        """The remembered outputs of a batch, (..., B, K)."""
        return {
            name: Output(out.logits[index], out.features[index] if len(out.features) else _undeclared(out, index))
            for name, out in self.cache.items()
        }

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast_to(self.precision, self.feed.device)

    def client_loss(
        self, params: Params, buffers: Params, batch: Batch, local: Local, full: bool
    ) -> tuple[Tensor, Params]:
        """(loss, new buffers) of one client; `full`: no row of the batch is padding."""
        with self.autocast():
            frozen = dict(local.frozen)
            with torch.no_grad():
                for name, teacher in self.objective.frozen.items():
                    if name not in frozen:
                        frozen[name] = self.model.apply(teacher(local), batch.x, training=False)[0]
            weight = None if full or not self.model.traits.batch_statistics else batch.weight
            if self.head_only:
                return self._head_loss(params, batch, local._replace(frozen=frozen), weight), {}
            now = Weights(params, buffers)
            now = now if self.moves_all else with_rest(now, local.start)
            output, after = self.model.apply(now, batch.x, training=True, weight=weight, seed=local.seed)
            moved = after if self.moves_all else {name: after[name] for name in buffers}
            return self._value(output, batch, local._replace(params=params, buffers=now.buffers, frozen=frozen)), moved

    def _head_loss(self, head: Params, batch: Batch, local: Local, weight: Tensor | None) -> Tensor:
        """The loss as a function of the head alone; terms that look at parameters see all of them."""
        params, buffers = {**local.start.params, **head}, local.start.buffers
        features = batch.x
        if self.features is None:
            with torch.no_grad():
                features = self.model.apply(local.start, batch.x, training=False, weight=weight)[0].features
        assert self.model.head is not None
        output = Output(self.model.head(params, features), features)
        return self._value(output, batch, local._replace(params=params, buffers=buffers))

    def _value(self, output: Output, batch: Batch, local: Local) -> Tensor:
        if not self.tried:
            self.tried, local = True, hide_undeclared(local, self.objective.needs)
        return one_number(self.objective, self.objective.loss(output, batch, local))
