"""One step of local training, written for one client: what every engine runs, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fedstill.core.tree import clone, tree_map
from fedstill.core.types import Batch, Local, Model, Need, Objective, Output, Params, Training, Tree, Weights
from fedstill.engine.feed import Feed
from fedstill.engine.stack import Layout


@contextmanager
def float32_mode(precision: str) -> Iterator[None]:
    """Whether float32 matrix products and convolutions on a GPU may use TF32; restored afterwards."""
    before = torch.get_float32_matmul_precision()
    relaxed = precision in ("tf32", "bf16")
    torch.set_float32_matmul_precision("high" if relaxed else "highest")
    try:
        cudnn = torch.backends.cudnn
        kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
        with cudnn.flags(**kept, allow_tf32=relaxed):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _undeclared(output: Output, index: Tensor) -> Tensor:
    """NaN in the place of features that nobody declared, so that nobody reads them by mistake."""
    return output.features.new_full((*index.shape, *output.features.shape[1:]), float("nan"))


class Program:
    """A model, an objective and how to train, bound to one feed; `shared` inputs change from round to round.

    With `static` the shared tensors keep their addresses over rounds (CUDA graphs read them in place).
    """

    def __init__(
        self, model: Model, objective: Objective, training: Training, feed: Feed, *, static: bool, precision: str
    ) -> None:
        self.model, self.objective, self.training, self.feed = model, objective, training, feed
        self.static, self.precision = static, precision
        self.start = Weights({}, {})
        self.received: Tree = {}
        self.layout: Layout = {}  # how a stack's parameters lie in memory: as their gradients do
        self.memory = 0  # bytes one client takes in a step, once measured
        self.budget = 0  # bytes a chunk of clients may take
        self.cache: dict[str, Output] = {}  # outputs of frozen models for every row of the feed

    def load(self, start: Weights, received: Tree) -> None:
        """Take this round's model and broadcast slots."""
        if self.static and self.start.params:
            tree_map(lambda old, new: old.copy_(new), (self.start, self.received), (start, received))
        else:
            self.start, self.received = (clone(start), clone(received)) if self.static else (start, received)

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
        if self.precision == "bf16":
            return torch.autocast(self.feed.device.type, dtype=torch.bfloat16)
        return nullcontext()

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
            output, moved = self.model.apply(
                Weights(params, buffers),
                batch.x,
                training=True,
                weight=None if full or not self.model.batch_statistics else batch.weight,
                seed=local.seed,
            )
            local = local._replace(params=params, buffers=buffers, frozen=frozen)
            return self.objective.loss(output, batch, local), moved
