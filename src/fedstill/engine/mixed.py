"""Clients with different architectures: one engine a prototype behind the interface of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.groups import merge, merge_uploads, only, part_of, places_of, together
from fedstill.core.errors import FedstillError
from fedstill.core.trainer import LocalWork, Trained
from fedstill.core.tree import rows as rows_of
from fedstill.core.tree import tree_map
from fedstill.core.types import Groups, Model, Output, Params, Tree, Uploads, Weights
from fedstill.engine.engine import Engine


class MixedEngine:
    """Trains each client with the engine of its prototype. Built by `build_engine`."""

    def __init__(self, model: Model, engines: Mapping[str, Engine]) -> None:
        assert model.groups is not None
        self.model, self.engines = model, engines
        self.groups: Groups = model.groups
        first = next(iter(engines.values()))
        self.device, self.dtype, self.dataset, self.workers = first.device, first.dtype, first.dataset, first.workers

    @cached_property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(engine.name for engine in self.engines.values()))

    def train(self, work: LocalWork, ids: np.ndarray, states: Tree) -> Trained:
        """Each group from its own part of the start; uploads and states come back whole, in the order of `ids`.

        Slots received and states stand under the prototypes' names; a client's slots of other prototypes stay as they
        are.
        """
        places, after = places_of(ids.tolist(), self.groups), dict(states)
        sent = {}
        for prototype, here in places.items():
            if len(ids) and not len(here):  # in an empty cohort all train nobody: uploads need a form to be merged in
                continue
            slots = states.get(prototype, {})
            start, received = part_of(work.start, prototype), work.received.get(prototype, {})
            trained = self.engines[prototype].train(
                replace(work, start=start, received=received), ids[here.numpy()], rows_of(slots, here.to(self.device))
            )
            assert isinstance(trained.uploads, Uploads)  # its engines train in this process
            sent[prototype] = trained.uploads
            after[prototype] = tree_map(partial(_written, here.to(self.device)), slots, trained.states) if slots else {}
        return Trained(merge_uploads(sent, work.start, places), after)

    def outputs(self, weights: Weights, x: Tensor, stacked: bool = False, **how: Any) -> Output:
        """Outputs of the reported model; weights that lack it, or some of the ensemble, answer with what they hold."""
        present = [prototype for prototype in self.engines if only(weights, prototype).params]
        asked = [self.groups.report] if self.groups.report in present else present
        answers = {
            prototype: self.engines[prototype].outputs(part_of(weights, prototype), x, stacked, **how)
            for prototype in asked
        }
        return together(answers, self.groups.report)

    def batch_statistics(self, weights: Weights, x: Tensor, batch: int = 128) -> Params:
        """Of each prototype."""
        parts = {prototype: part_of(weights, prototype) for prototype in self.engines}
        statistics = {
            prototype: Weights({}, self.engines[prototype].batch_statistics(part, x, batch))
            for prototype, part in parts.items()
        }
        return merge(statistics).buffers

    def lend(self, model: Model) -> Engine:
        """The engine of a prototype for that one, a fresh one with the same data for any other model."""
        for prototype, known in self.groups.models.items():
            if known is model:
                return self.engines[prototype]
        return next(iter(self.engines.values())).lend(model)

    def fit(self, *_: Any, **__: Any) -> NoReturn:
        raise FedstillError("a mixed model is trained prototype by prototype: use per_group, or lend(its model)")

    take_turns = fit


def _written(here: Tensor, before: Tensor, now: Tensor) -> Tensor:
    return now if len(here) == len(before) else torch.index_copy(before, 0, here, now)
