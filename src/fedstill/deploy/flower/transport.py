"""A transport over Flower: the server's orders go to SuperNodes through a SuperLink, and their answers come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedstill.core.errors import FedstillError

_log = logging.getLogger("fedstill.run")

SLOW = 0.5  # of the deadline; whoever has not answered by then is named
POLL = 0.2  # seconds between two looks for answers
LOOK_AT_NODES = 2.0  # seconds between two looks for nodes that were started again
FORM = "fedstill.parcel"  # of an array that holds bytes
COMMON, OWN, ANSWER = "common", "own", "answer"  # records of a message
ON_THE_WAY = "its answer was lost on the way"
NO_SITE = 2  # Flower's code where a ClientApp raises; ours does so where no daemon answers
LOST = {3: ON_THE_WAY, 4: ON_THE_WAY, 5: "its SuperNode went away", 8: "its ClientApp was killed"}  # by Flower's codes


class Node(NamedTuple):
    """A connected SuperNode; `since` changes when it is started again."""

    id: int
    since: str


class Letter(NamedTuple):
    """An order that is under way to a client."""

    client: int
    node: Node


class OverFlower:
    """Carries orders to SuperNodes and their answers back, within the deadline of each order.

    Who a client is follows from the roster: from the public key that its node proved to the SuperLink. Nothing that a
    node says of itself counts. A client whose node is not connected when an order goes out is left out at once. A node
    that is lost afterwards gets the order again when it is back, because a site answers the same order with the same
    bytes.

    grid: Flower's, as a ServerApp gets it.
    client_of: the client of each public key, as PEM.
    deadline: seconds until an order's answers are waited for no longer, and until a node throws the order away.
    names: of the clients by their ids, for people.
    """

    def __init__(
        self, grid: Any, client_of: Mapping[bytes, int], *, deadline: float, names: Sequence[str] = ()
    ) -> None:
        self.grid, self.client_of, self.deadline, self.names = grid, dict(client_of), deadline, names

    def connected(self) -> dict[int, Node]:
        """Return the node of each client of the roster that is connected now."""
        nodes: dict[int, Node] = {}
        for node in self._superlink(self.grid.get_nodes):
            client = self.client_of.get(bytes(node.public_key).strip())
            if client is not None:
                nodes[client] = Node(node.node_id, node.last_activated_at)
        return nodes

    def wait_for(self, clients: set[int], seconds: float) -> set[int]:
        """Wait until all these clients are connected, at most so long; return who is not."""
        ends = time.monotonic() + seconds
        while (missing := clients - self.connected().keys()) and time.monotonic() < ends:
            time.sleep(LOOK_AT_NODES)
        return missing

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        ends, named = time.monotonic() + self.deadline, False
        shared = record_of(common)  # one object, which the SuperLink stores once for all nodes
        nodes, looked = self.connected(), time.monotonic()
        letters = self._send({client: nodes[client] for client in each if client in nodes}, shared, each, ends)
        for client in each.keys() - nodes.keys():
            yield client, FedstillError("its SuperNode is not connected")
        waiting = each.keys() & nodes.keys()
        lost: dict[int, str] = {}
        while waiting and time.monotonic() < ends:
            for name, letter in list(letters.items()):
                if letter.client not in waiting:
                    del letters[name]
                    continue
                answer = self._collect(name, letter)
                if answer is None:
                    continue
                del letters[name]
                if isinstance(answer, Lost):
                    lost[letter.client] = str(answer)
                else:
                    waiting.discard(letter.client)
                    yield letter.client, answer
            if waiting and time.monotonic() - looked > LOOK_AT_NODES:
                nodes, looked = self.connected(), time.monotonic()
                again = {
                    client: nodes[client] for client in waiting & nodes.keys() if not _under_way(letters, nodes, client)
                }
                letters |= self._send(again, shared, each, ends)
            if waiting and not named and ends - time.monotonic() < (1 - SLOW) * self.deadline:
                named = True
                who = ", ".join(self.names[client] if self.names else f"client {client}" for client in sorted(waiting))
                _log.warning(
                    "no answer from %s after %.0f s of at most %.0f s", who, SLOW * self.deadline, self.deadline
                )
            time.sleep(POLL)
        for client in waiting & lost.keys():
            yield client, FedstillError(f"no answer before the deadline: {lost[client]}")

    def _send(self, to: Mapping[int, Node], shared: Any, each: Mapping[int, bytes], ends: float) -> dict[str, Letter]:
        """Send the order to these clients' nodes; return what is under way, by its name."""
        from flwr.app import Message, RecordDict

        left = ends - time.monotonic()
        if not to or left <= 0:
            return {}
        messages = [
            Message(RecordDict({COMMON: shared, OWN: record_of(each[client])}), node.id, "train", ttl=left)
            for client, node in to.items()
        ]
        names = self._superlink(self.grid.push_messages, messages)
        letters = (Letter(client, node) for client, node in to.items())
        return {name: letter for name, letter in zip(names, letters, strict=True) if name}

    def _collect(self, name: str, letter: Letter) -> bytes | Exception | None:
        """Return the answer to one letter if it is there. One at a time, so that a broken answer harms no other's."""
        try:
            replies = self._superlink(self.grid.pull_messages, [name])
        except Gone:
            raise
        except Exception as error:
            return FedstillError(f"its answer cannot be read: {type(error).__name__}")
        return answer_in(replies[0], letter.node.id) if replies else None

    def _superlink(self, call: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
        """Return what a call of the grid gives; Gone is raised if nobody is there to answer it."""
        from flwr.supercore.run import RunNotRunningException
        from httpx import HTTPError

        try:
            return list(call(*arguments))
        except (HTTPError, RunNotRunningException) as error:
            raise Gone(f"the SuperLink is gone: {type(error).__name__}: {error}") from None


class Gone(FedstillError):
    """The SuperLink does not answer any more, or has ended the run; a new ServerApp may go on."""


class Lost(FedstillError):
    """An order or its answer that Flower lost; the same order may go out again."""


def _under_way(letters: Mapping[str, Letter], nodes: Mapping[int, Node], client: int) -> bool:
    return any(letter == Letter(client, nodes[client]) for letter in letters.values())


def answer_in(reply: Any, node: int) -> bytes | Exception:
    """Return the bytes of a node's reply, or why there are none."""
    if reply.has_error():
        code = reply.error.code
        if code in LOST:
            return Lost(LOST[code])
        if code == NO_SITE:
            return FedstillError("its SuperNode is up, and no `fedstill site` answers it: see the SuperNode's log")
        return FedstillError(f"Flower's error {code} at its node: see the log of its SuperNode")
    if reply.metadata.src_node_id != node:
        return FedstillError("another node answered in its name: not used")
    try:
        return bytes_of(reply.content[ANSWER])
    except Exception:  # records hold what a node chose
        return FedstillError("its node answered something else than a parcel")


def record_of(data: bytes) -> Any:
    """Return bytes as Flower's record; it cuts an array into pieces of 5 MB, other values it does not."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({"bytes": Array(dtype="uint8", shape=(len(data),), stype=FORM, data=data)})


def bytes_of(record: Any) -> bytes:
    """Return the bytes of a record that `record_of` made; nothing in it is decoded as an array."""
    array = record["bytes"]
    if array.stype != FORM or not isinstance(array.data, bytes):
        raise ValueError
    return array.data
