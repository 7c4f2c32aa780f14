"""A cohort engine whose uploads go over a wire, where a test may change, drop or overhear a client's message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.compose.groups import merge, part_of, slots_of
from fedstill.core.trainer import CohortEngine, Messages, Trained
from fedstill.core.tree import as_tree, select, tree_map
from fedstill.core.types import Model, Uploads, Weights
from fedstill.loop.message import decode, encode, on_meta, template_of

Tamper = Callable[[int, int, bytes], bytes]  # (round, client, message) -> message; may raise


@dataclass
class Wire:
    """Another engine, whose clients send messages; of several architectures each sends its own."""

    engine: CohortEngine
    model: Model
    tamper: Tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, work, ids, states) -> Trained:
        trained = self.engine.train(work, ids, states)
        messages: dict[int, Any] = {}
        for place, client in enumerate(trained.uploads.ids.tolist()):
            network = self.model.network_of(client)
            own = own_upload(trained.uploads, place, network)
            try:
                data = self.tamper(work.round, client, encode(own, round=work.round))
                if network:
                    opened = decode(data, on_meta(own), client=client, round=work.round)
                    data = as_tree(whole_upload(opened, network, work.start, trained.uploads))
                messages[client] = data
            except Exception as error:  # whatever a client's call ends with is that client's fault alone
                messages[client] = error
        return trained._replace(uploads=Messages(messages, template_of(trained.uploads)))


def own_upload(uploads: Uploads, place: int, network: str) -> Uploads:
    """What one client of a cohort sends: its own prototype, and what stands beside it."""
    own = uploads._replace(weights=part_of(uploads.weights, network), extra=slots_of(uploads.extra, network))
    return select(own, place)


def whole_upload(own: Uploads, network: str, start: Weights, like: Uploads) -> Uploads:
    """One client's row among the cohort's (`like`) from what it sent; the other prototypes are as they were sent."""
    weights = Weights(*({**sent, **new} for sent, new in zip(start, merge({network: own.weights}), strict=True)))
    others = {name: tree_map(lambda leaf: torch.zeros_like(leaf[0]), extra) for name, extra in like.extra.items()}
    return own._replace(weights=weights, extra={**others, **({network: own.extra} if own.extra else {})})
