"""The memory of one client, kept where it lives: one file for each round that the client trained in.

The server says from which round's memory a client goes on. So a round that was lost, late, refused or repeated needs no
second message: the server goes on from the last round whose upload it took.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.core.types import Tree
from fedstill.population.wire import check_form, pack_tree, seal, unpack_tree, unseal
from fedstill.storage.files import write_whole

_NAME = re.compile(r"memory-(\d{6,})\.fedstill")
_OVERHEAD = 1 << 20  # bytes of a file beside its tensors


class Memory:
    """Reads and writes memories by round. first: the memory before the first round; an empty one needs no files."""

    def __init__(self, folder: Path, first: Tree) -> None:
        self.folder, self.first = folder, first
        self._size = len(pack_tree(first))

    def read(self, round: int) -> Tree:
        """Return the memory after a round, 0 for a client that has not trained yet."""
        if not round or not self.first:
            return self.first
        path = self._path(round)
        try:
            facts, body = unseal(path.read_bytes(), limit=self._size + _OVERHEAD)
            memory = unpack_tree(body)
            check_form(memory, self.first, "the memory")
        except FileNotFoundError:
            raise FedstillError(
                f"this client has no memory of round {round}: it was lost, or is another client's"
            ) from None
        except (OSError, FedstillError) as error:
            raise FedstillError(f"the memory of round {round} cannot be read: {error}") from None
        if facts.get("round") != round:
            raise FedstillError(f"{path.name} holds the memory of round {facts.get('round')}")
        return memory

    def write(self, round: int, memory: Tree) -> None:
        if self.first:
            write_whole(self._path(round), seal({"round": round}, pack_tree(memory)))

    def forget(self, before: int) -> None:
        """Remove the memories of rounds before `before`, which no server will ask for again."""
        for path in self.folder.glob("memory-*.fedstill"):
            named = _NAME.fullmatch(path.name)
            if named and int(named[1]) < before:
                path.unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"memory-{round:06d}.fedstill"
