"""A small run whose clients stand behind desks, and orders written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from running import built
from toy import federation_of, network, points

from fedstill.compose.combine import broadcast_of, first_state
from fedstill.core.types import Training
from fedstill.loop.federate import Built
from fedstill.methods.lookup import build_method
from fedstill.population.desk import Desk, held_by
from fedstill.population.loopback import Loopback, over_loopback
from fedstill.population.remote import Remote
from fedstill.population.wire import digest_of, facts_of, pack_tree, seal, unseal

SIZES = (5, 9, 4, 7)
RUN = {"run": "a run", "experiment": "a digest"}
LIMIT = 1 << 30
Arrives = Iterable[tuple[int, Any]]
Fault = Callable[[int, int, Callable[[], bytes]], Arrives]  # (round, client, how to get its answer) -> what arrives


def a_run(method: str = "scaffold", **changes: Any) -> Built:
    data = federation_of(points(1, count=sum(SIZES)), points(2, count=40), SIZES, unlabeled=points(3, count=30)[0])
    settings = {
        "model": network(), "federation": data, "training": Training(epochs=1, batch_size=4, lr=0.1), "rounds": 3,
        "cohort": 3, "seed": 5, "engine": "looped", "device": "cpu", "evaluate_every": 3,
    }  # fmt: skip
    return built(method=build_method(method), **{**settings, **changes})


def desk_of(here: Built, folder: Path, client: int = 1, **how: Any) -> Desk:
    return Desk(replace(here, federation=held_by(here.federation, client)), client, folder, **{"run": RUN, **how})


def model_of(desk: Desk, seed: int = 0) -> dict[str, Any]:
    """What a server sends in round 1: the first model, moved a little by a seed, and the slots of the method."""
    generator = torch.Generator().manual_seed(seed)
    start = desk._first._asdict()
    params = {
        name: leaf + 0.01 * seed * torch.randn(leaf.shape, generator=generator)
        for name, leaf in start["params"].items()
    }
    method = desk.task.method(1)
    return {"start": {**start, "params": params}, "received": broadcast_of(method, first_state(method, desk._first))}


def an_order(
    tree: Any, *, facts: Mapping[str, Any] | None = None, mine: Mapping[str, Any] | None = None
) -> tuple[bytes, bytes]:
    """An order to client 1, as an honest server writes it but for some facts; None takes a fact away."""
    common = seal(_without({**facts_of(RUN), "kind": "play", "round": 1, **(facts or {})}), pack_tree(tree))
    return common, own_part(common, **(mine or {}))


def own_part(common: bytes, **mine: Any) -> bytes:
    return seal(_without({"order": digest_of(common), "client": 1, "memory_of": 0, "oldest": 0, **mine}))


def _without(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in facts.items() if fact is not None}


class Faulty(Loopback):
    """A loopback on which a fault decides what arrives of each client."""

    def __init__(self, desks: Mapping[int, Desk], fault: Fault) -> None:
        super().__init__(desks)
        self.fault = fault

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, Any]]:
        number = unseal(common, limit=LIMIT).facts["round"]
        for client, own in each.items():
            yield from self.fault(number, client, partial(self.desks[client].answer, common, own))


def behind(here: Built, folder: Path, fault: Fault, **changes: Any) -> Built:
    """The run with its clients behind a transport with a fault; `folder` holds what the clients keep."""
    wired = over_loopback(here, folder)
    how = wired.population.keywords
    return replace(
        wired, population=partial(Remote, **{**how, "transport": Faulty(how["transport"].desks, fault)}), **changes
    )
