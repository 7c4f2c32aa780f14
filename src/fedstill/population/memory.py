"""The memory of one client, kept where it lives: one file for each round that the client trained in.

The server says from which round's memory a client goes on. So a round that was lost, late, refused or repeated needs no
second message: the server goes on from the last round whose upload it took.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.core.types import Tree
from fedstill.population.wire import check_form, pack_tree, seal, unpack_tree, unseal
from fedstill.storage.files import write_whole

_NAME = re.compile(r"memory-(\d{6,})\.fedstill")
_OVERHEAD = 1 << 20  # bytes of a file beside its tensors


class Memory:
    """Reads and writes memories by round.

    first: the memory before the first round; an empty one needs no files.
    owner: the client and the run; memories of others are refused.
    """

    def __init__(self, folder: Path, first: Tree, owner: Mapping[str, Any]) -> None:
        self.folder, self.first, self.owner = folder, first, dict(owner)
        self._size = len(pack_tree(first))

    def read(self, round: int) -> Tree:
        """Return the memory after a round, 0 for a client that has not trained yet."""
        if not round or not self.first:
            return self.first
        try:
            facts, body = unseal(self._path(round).read_bytes(), limit=self._size + _OVERHEAD)
            memory = unpack_tree(body)
            check_form(memory, self.first, "the memory")
        except FileNotFoundError:
            raise FedstillError(f"this client has no memory of round {round}: it was lost") from None
        except OSError as error:  # its text would tell the server the folder's name
            raise FedstillError(f"the memory of round {round} cannot be read: {error.strerror}") from None
        except FedstillError as error:
            raise FedstillError(f"the memory of round {round} cannot be read: {error}") from None
        if facts != {**self.owner, "round": round}:
            raise FedstillError(f"the memory of round {round} is another client's, another run's or another round's")
        return memory

    def write(self, round: int, memory: Tree) -> None:
        if self.first:
            write_whole(self._path(round), seal({**self.owner, "round": round}, pack_tree(memory)))

    def forget(self, before: int) -> None:
        """Remove the memories of rounds before `before`, which no server will ask for again."""
        for path in self.folder.glob("memory-*.fedstill"):
            named = _NAME.fullmatch(path.name)
            if named and int(named[1]) < before:
                path.unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"memory-{round:06d}.fedstill"
