"""A cache on disk for results that are expensive and the same for many runs; an identity names each result.

    $FEDSTILL_CACHE/<part>/<hash of the identity>/entry.json        identity, shape of the tree, checksums
                                                  <sha256>.values   the arrays, one behind the other

Another identity is another folder. A damaged entry counts as absent, and its result is computed again. Every load
checks the bytes that it returns, and reads them into memory first, because a memory map would show later damage. The
file of arrays is named by its checksum, because two runs that write one result at the same time must not mix files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.types import Tree
from fedstill.storage.files import default_cache_dir, holder, lock, write_whole, writing

FORMAT = 2  # raise it when the layout of an entry changes
ENTRY = "entry.json"
ALIGNMENT = 64  # bytes: where an array may begin
PATIENCE = 1.0  # seconds between two looks whether another run is done
_log = logging.getLogger("fedstill.run")


class Cache:
    """Keeps trees under identities: dicts whose leaves are tensors, numpy arrays, or values that JSON can hold."""

    def __init__(self, part: str, root: Path | None = None) -> None:
        self.folder = (root or default_cache_dir()) / part

    def load(self, identity: Mapping[str, Any]) -> Tree | None:
        """Return the tree that was saved under this identity, on the CPU; None if it is absent or damaged."""
        place = self._place(identity)
        try:
            stored = json.loads((place / ENTRY).read_bytes())
            entry = stored["entry"]
            if stored["sha256"] != _checksum(entry) or entry["identity"] != _plain(identity):
                return None
            content = np.fromfile(place / f"{entry['values']}.values", np.uint8)
            if hashlib.sha256(content.data).hexdigest() != entry["values"]:
                _log.warning("%s is damaged: its result is computed again", place)
                return None
            tree: Tree = _filled(entry["tree"], content)
            return tree
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, identity: Mapping[str, Any], tree: Tree) -> None:
        """Write a tree under its identity; an empty tree removes the entry. A full or read-only disk is a warning."""
        place = self._place(identity)
        if not tree:
            shutil.rmtree(place, ignore_errors=True)
            return
        arrays: list[np.ndarray] = []
        shape = _outlined(tree, arrays)
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(array.data)
        values = place / f"{digest.hexdigest()}.values"
        entry = {"identity": _plain(identity), "tree": shape, "values": digest.hexdigest()}
        try:
            with writing(values) as file:
                for array in arrays:
                    file.write(array.data)
            write_whole(place / ENTRY, json.dumps({"entry": entry, "sha256": _checksum(entry)}, indent=1))
            for old in place.glob("*.values"):
                if old != values:
                    old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("not kept for other runs: %s (%s)", error.strerror or error, place)

    @contextmanager
    def alone(self, identity: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[None]:
        """Let one run at a time compute a result; the others wait, because they find it in the cache afterwards.

        `tell` gets the process that a run waits for. A run that ends in any way gives the lock back. Where the disk
        has no locks nobody waits, and each run computes the result.
        """
        place, waited_for = self._place(identity), ""
        path = place.with_name(f".{place.name}.lock")
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(lock(path, wait=False))
                    break
                except BlockingIOError:
                    if not waited_for:
                        waited_for = holder(path)
                        tell(waited_for)
                    time.sleep(PATIENCE)
                except OSError:
                    break  # a full or read-only disk: `save` will warn
            yield

    def _place(self, identity: Mapping[str, Any]) -> Path:
        text = json.dumps([FORMAT, _plain(identity)], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:32]


def _outlined(node: Any, arrays: list[np.ndarray]) -> Any:
    """Return the nesting of a tree as JSON, and append its arrays to the list as bytes, each padded to ALIGNMENT."""
    if isinstance(node, dict):
        return {"tree": {key: _outlined(value, arrays) for key, value in node.items()}}
    if isinstance(node, Tensor):
        kind, dtype = "tensor", str(node.dtype).removeprefix("torch.")
        # strided, because an empty tensor may have a stride of 0
        flat = node.detach().cpu().contiguous().as_strided((node.numel(),), (1,))
        content = flat.view(torch.uint8).numpy()
    elif isinstance(node, np.ndarray):
        kind, dtype = "array", node.dtype.str
        content = np.ascontiguousarray(node).reshape(-1).view(np.uint8)
    else:
        return {"value": node}
    start = sum(map(len, arrays))
    arrays += [content, np.zeros(-len(content) % ALIGNMENT, np.uint8)]
    return {kind: [dtype, list(node.shape), start]}


def _filled(shape: Any, content: np.ndarray) -> Any:
    """Return the tree whose nesting `_outlined` gave; its arrays are views of `content`."""
    ((kind, facts),) = shape.items()
    if kind == "tree":
        return {key: _filled(value, content) for key, value in facts.items()}
    if kind == "value":
        return facts
    name, sizes, start = facts
    dtype = getattr(torch, name) if kind == "tensor" else np.dtype(name)
    part = content[start : start + math.prod(sizes) * dtype.itemsize]
    return (torch.from_numpy(part) if kind == "tensor" else part).view(dtype).reshape(sizes)


def _checksum(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def _plain(identity: Mapping[str, Any]) -> Any:
    """Return an identity as it comes back from JSON."""
    return json.loads(json.dumps(identity, sort_keys=True, default=str))
