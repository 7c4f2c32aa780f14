"""The wire without a network: all clients stand in this process, and orders and answers are bytes all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.loop.federate import Built
from fedstill.population.desk import Desk, held_by
from fedstill.population.remote import Remote, without_rows


class Loopback:
    """A transport to desks of this process, one after another in the order of their ids."""

    def __init__(self, desks: Mapping[int, Desk]) -> None:
        self.desks = desks

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        for client, own in each.items():
            if client in self.desks:
                yield client, self.desks[client].answer(common, own)
            else:
                yield client, FedstillError("this client is away")


def over_loopback(built: Built, folder: Path, run: Mapping[str, str] | None = None) -> Built:
    """Return the same run with its clients behind a Loopback: the server has no row of them. folder: of the clients."""
    federation, run = built.federation, run or {"run": "loopback"}
    holders = np.flatnonzero(federation.offsets.diff().cpu().numpy() > 0)
    desks = {
        client: Desk(
            replace(built, federation=held_by(federation, client)), client, folder / f"client-{client}", run=run
        )
        for client in holders.tolist()
    }
    make = partial(Remote, transport=Loopback(desks), engines=built.engines, run=run)
    return replace(built, federation=without_rows(federation), population=make, holders=holders)
