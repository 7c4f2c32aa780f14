"""What each client remembers between rounds: one record a client, all alike until they are written.

In the memory of the engine's device while all records take at most an eighth of what is free there (several runs may
share it), else in that of the host by the same rule, otherwise in a sparse file that is read and written record by
record (no mmap, so resident memory does not grow with the population).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.tree import byte_size, leaves, to_device, tree_map
from fedstill.core.types import Tree
from fedstill.engine.device_data import free_memory

SNAPSHOT_PART = 256 << 20
SHARE = 8  # one part of so many of the free memory may hold records

ClientRows = tuple[np.ndarray, Tree]  # (ids, their states stacked in that order)


class ClientStore:
    """States of a whole population; `read` and `write` take distinct client ids and stacked trees.

    budget: bytes that may lie on the device, with the file beyond; None: see above.
    Close it (or use it in a `with`) when it may live on disk.
    """

    def __init__(
        self,
        template: Tree,
        population: int,
        *,
        device: torch.device | str = "cpu",
        budget: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.template = to_device(template, device)
        self.touched = np.zeros(population, dtype=bool)
        self.device = torch.device(device)
        self.record_bytes = byte_size(template)
        outline = list(leaves(self.template))
        place = _place(self.record_bytes * population, self.device, budget)
        self.on_disk = place is None
        self._table: _Memory | _File = (
            _File(outline, population, folder)
            if place is None
            else _Memory([leaf.to(place) for leaf in outline], population)
        )

    def __enter__(self) -> ClientStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._table.close()

    def read(self, ids: np.ndarray) -> Tree:
        """The states of `ids`, stacked; a client that was never written has the template's."""
        if self.record_bytes == 0:  # only leaves without elements: nothing is stored for them
            return tree_map(lambda leaf: leaf.new_empty((len(ids), *leaf.shape)), self.template)
        columns = iter(self._table.read(ids, self.touched))
        return tree_map(lambda leaf: next(columns).to(leaf.device), self.template)

    def write(self, ids: np.ndarray, states: Tree) -> None:
        """Replace the states of `ids`."""
        if self.record_bytes == 0 or len(ids) == 0:
            return
        self._table.write(ids, self._columns(states, len(ids)))
        self.touched[ids] = True

    def snapshot(self, part_bytes: int = SNAPSHOT_PART) -> Iterator[ClientRows]:
        """All that was ever written, in parts that fit in memory, on the CPU."""
        if self.record_bytes == 0:
            return
        written = np.flatnonzero(self.touched)
        step = max(1, part_bytes // self.record_bytes)
        for first in range(0, len(written), step):
            ids = written[first : first + step]
            yield ids, to_device(self.read(ids), "cpu")

    def restore(self, parts: Iterable[ClientRows]) -> None:
        for ids, states in parts:
            self.write(ids, to_device(states, self.device))

    def _columns(self, states: Tree, count: int) -> list[Tensor]:
        """The leaves of `states` in the template's order, after a check that they are the template's."""
        try:
            columns = list(leaves(tree_map(lambda _, leaf: leaf, self.template, states)))
        except KeyError as missing:
            raise FedstillError(
                f"client state: slot {missing} is in the objective's init but not in its finish; return it from both"
            ) from None
        for leaf, outline in zip(columns, leaves(self.template), strict=True):
            if leaf.shape != (count, *outline.shape) or leaf.dtype != outline.dtype:
                raise FedstillError(
                    f"client state: finish returned {tuple(leaf.shape[1:])} {leaf.dtype} where init has "
                    f"{tuple(outline.shape)} {outline.dtype}; keep shapes and dtypes"
                )
        return columns


def _place(wanted: int, device: torch.device, budget: int | None) -> torch.device | None:
    """Whose memory the records lie in; None: nobody's."""
    if budget is not None:
        return device if wanted <= budget else None
    places = dict.fromkeys((device, torch.device("cpu")))
    return next((place for place in places if wanted <= free_memory(place) // SHARE), None)


class _Memory:
    """One tensor (N, ...) a leaf, where the outline lies."""

    def __init__(self, outline: list[Tensor], population: int) -> None:
        # a clone of the expanded leaf touches every page: memory is committed now, not in the middle of a run
        self._tables = [
            leaf.expand(population, *leaf.shape).clone(memory_format=torch.contiguous_format) for leaf in outline
        ]

    def read(self, ids: np.ndarray, _: np.ndarray) -> list[Tensor]:
        return [table.index_select(0, torch.as_tensor(ids, device=table.device)) for table in self._tables]

    def write(self, ids: np.ndarray, columns: list[Tensor]) -> None:
        for table, column in zip(self._tables, columns, strict=True):
            table.index_copy_(0, torch.as_tensor(ids, device=table.device), column.to(table.device))

    def close(self) -> None:
        self._tables = []


class _File:
    """Records of fixed length in a nameless sparse file, gone when closed or when the process dies."""

    def __init__(self, outline: list[Tensor], population: int, folder: Path | None) -> None:
        self._outline = [(leaf.shape, leaf.dtype) for leaf in outline]
        self._first = _pack([leaf.unsqueeze(0) for leaf in outline])  # (1, record)
        self._record = self._first.shape[1]
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        os.truncate(self._file.fileno(), population * self._record)

    def read(self, ids: np.ndarray, touched: np.ndarray) -> list[Tensor]:
        records = np.repeat(self._first, len(ids), axis=0)
        written = np.flatnonzero(touched[ids])
        for run in _runs(ids[written]):
            self._file.seek(int(ids[written[run.start]]) * self._record)
            content = self._file.read((run.stop - run.start) * self._record)
            records[written[run]] = np.frombuffer(content, np.uint8).reshape(-1, self._record)
        columns, first = [], 0
        for shape, dtype in self._outline:
            length = shape.numel() * dtype.itemsize
            part = torch.from_numpy(np.ascontiguousarray(records[:, first : first + length]))
            empty = torch.empty((len(records), *shape), dtype=dtype)
            columns.append(part.view(dtype).reshape(empty.shape) if length else empty)
            first += length
        return columns

    def write(self, ids: np.ndarray, columns: list[Tensor]) -> None:
        records = _pack(columns)
        try:
            for run in _runs(ids):
                self._file.seek(int(ids[run.start]) * self._record)
                self._file.write(records[run].data)
            self._file.flush()
        except OSError as error:
            raise FedstillError(f"cannot write client states to disk: {error.strerror}; free some space") from None

    def close(self) -> None:
        self._file.close()


def _pack(columns: list[Tensor]) -> np.ndarray:
    """Stacked leaves -> (C, record) bytes."""
    count = len(columns[0])
    parts = [
        column.detach().cpu().contiguous().reshape(count, -1).view(torch.uint8).numpy()
        for column in columns
        if column[0].numel()
    ]
    return np.concatenate(parts, axis=1)


def _runs(ids: np.ndarray) -> list[slice]:
    """Stretches of consecutive ids: one system call each."""
    if len(ids) == 0:
        return []
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [slice(a, b) for a, b in pairwise(edges)]
