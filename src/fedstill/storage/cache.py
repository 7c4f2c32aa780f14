"""Results that are expensive and the same for many runs, on disk: one safetensors file and a JSON that vouches for it.

A result is found by what it follows from (its identity): another identity is another folder. Whatever is damaged, cut
or of another identity counts as absent, and is computed again. The file of values is named by its checksum, so that
runs that write one result at the same time cannot mix theirs; `alone` saves the second the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load, save

from fedstill.core.tree import flatten, unflatten
from fedstill.core.types import Tree
from fedstill.data.cache import checksum_of, default_cache_dir, replace_file
from fedstill.storage.files import holder, released, take

FORMAT = 1  # raise it when what is stored changes
FOLDER, ENTRY = "prepared", "entry.json"
PATIENCE = 1.0  # seconds between two looks whether another run is done
_log = logging.getLogger("fedstill.run")


class KeptResults:
    """Trees of tensors by identity, under `folder`; by default in the library's cache ($FEDSTILL_CACHE)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_cache_dir() / FOLDER if folder is None else folder

    def load(self, identity: Mapping[str, Any]) -> Tree | None:
        """The tree that was saved under this identity, on the CPU; None if there is none, or if it is damaged."""
        place = self._place(identity)
        try:
            stored = json.loads((place / ENTRY).read_bytes())
            entry = stored["entry"]
            if stored["sha256"] != checksum_of(entry) or entry["identity"] != _plain(identity):
                return None
            values = (place / f"{entry['values']}.safetensors").read_bytes()
            if hashlib.sha256(values).hexdigest() != entry["values"]:
                _log.warning("%s is damaged: what it held is computed again", place)
                return None
            return unflatten(load(values))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, identity: Mapping[str, Any], tree: Tree) -> None:
        """Keep a tree; an empty one takes away what was kept. A full or read-only disk is a warning."""
        place = self._place(identity)
        if not tree:
            shutil.rmtree(place, ignore_errors=True)
            return
        values = save({name: leaf.detach().cpu().contiguous() for name, leaf in flatten(tree).items()})
        entry = {"identity": _plain(identity), "values": hashlib.sha256(values).hexdigest()}
        text = json.dumps({"entry": entry, "sha256": checksum_of(entry)}, indent=1)
        try:
            place.mkdir(parents=True, exist_ok=True)
            kept = place / f"{entry['values']}.safetensors"
            replace_file(kept, lambda file: file.write(values))
            replace_file(place / ENTRY, lambda file: file.write(text.encode()))
            for old in place.glob("*.safetensors"):
                if old != kept:
                    old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("not kept for other runs: %s (%s)", error.strerror or error, place)

    @contextmanager
    def alone(self, identity: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[None]:
        """Only one run at a time works on a result; the others wait, told for whom, and find it then.

        A run that ends in any way lets go of it. Where nothing can be locked nobody waits, and each does the work.
        """
        place = self._place(identity)
        lock = place.with_name(f".{place.name}.lock")
        held = _when_free(lock, tell)
        if held is None:
            yield
            return
        with released(lock, held):
            yield

    def _place(self, identity: Mapping[str, Any]) -> Path:
        told = json.dumps([FORMAT, _plain(identity)], sort_keys=True)
        return self.folder / hashlib.sha256(told.encode()).hexdigest()[:32]


def _when_free(lock: Path, tell: Callable[[str], None]) -> TextIO | None:
    """The lock as soon as nobody has it; None where there cannot be one."""
    told = ""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            return take(lock, wait=False)
        except BlockingIOError:
            if (who := holder(lock)) != told:
                tell(who)
                told = who
            time.sleep(PATIENCE)
        except OSError:
            return None  # a full or read-only disk: saving will say so


def _plain(identity: Mapping[str, Any]) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(identity, sort_keys=True))
