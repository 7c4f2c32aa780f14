"""A file that two processes of one machine map: one lays arrays down there, and the other one looks at them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError

SMALL = 4096  # bytes of an array up to which it travels in the message itself
ALIGNED = 64  # an array begins at a multiple of so many bytes


class Laid(NamedTuple):
    """Where an array lies."""

    first: int  # byte
    shape: tuple[int, ...]
    dtype: str


class Area:
    """Each message takes the place of the one before: who reads it is done with it before the next one is laid down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = np.zeros(0, np.uint8)
        path.touch(mode=0o600)

    def lay(self, message: Any) -> Any:
        """Return a message of dicts, tuples and lists with the places of its large arrays."""
        arrays: list[np.ndarray] = []
        ends: list[int] = [0]

        def laid(node: Any) -> Any:
            if isinstance(node, np.ndarray) and node.nbytes > SMALL:
                first = -(-ends[-1] // ALIGNED) * ALIGNED
                arrays.append(node)
                ends.append(first + node.nbytes)
                return Laid(first, node.shape, node.dtype.str)
            return _mapped(laid, node)

        outline = laid(message)
        self._grow(ends[-1])
        for array, end in zip(arrays, ends[1:], strict=True):
            self._view(Laid(end - array.nbytes, array.shape, array.dtype.str))[...] = array
        return outline

    def read(self, outline: Any) -> Any:
        """Return the message with its arrays, which are good until the next one is laid down."""
        if isinstance(outline, Laid):
            if len(self._bytes) < self._path.stat().st_size:
                self._bytes = np.memmap(self._path, np.uint8, "r+")
            return self._view(outline)
        return _mapped(self.read, outline)

    def _view(self, laid: Laid) -> np.ndarray:
        dtype = np.dtype(laid.dtype)
        length = dtype.itemsize * int(np.prod(laid.shape))
        return self._bytes[laid.first : laid.first + length].view(np.ndarray).view(dtype).reshape(laid.shape)

    def _grow(self, size: int) -> None:
        if size <= len(self._bytes):
            return
        try:
            with self._path.open("r+b") as file:
                if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and else a signal at the first write
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError as error:
            raise FedstillError(
                f"no room for {size:,} bytes in '{self._path.parent}' ({error.strerror}): set TMPDIR to a larger place"
            ) from None
        self._bytes = np.memmap(self._path, np.uint8, "r+")


def _mapped(function: Any, node: Any) -> Any:
    if isinstance(node, dict):
        return {name: function(child) for name, child in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(function(child) for child in node))
    return type(node)(function(child) for child in node) if isinstance(node, tuple | list) else node
