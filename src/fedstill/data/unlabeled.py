"""Samples for the server without labels: held out of train, the test inputs, the central pool, or a user's own."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.data.images import IMAGE_SUFFIXES
from fedstill.data.matching import load_like, match_classes, match_storage, reading_like
from fedstill.data.readers import files_below, files_of, printable
from fedstill.data.source import Source, Unlabeled, keep_rows, row_ids
from fedstill.data.texts import in_one_list

__all__ = ["Unlabeled", "read_unlabeled", "split_unlabeled"]

_log = logging.getLogger("fedstill.run")


def split_unlabeled(
    source: Source, choice: str | int, *, seed: int, limit: int | None = None, cache_dir: str | None = None
) -> tuple[Source, Unlabeled | None]:
    """(what is left of the source, the server's unlabeled samples in the task's storage form).

    choice: 'none'; 'test' (transductive: the test inputs); 'central' (what data.client_rows leaves to the server); a
    number of train rows, taken away from the clients before they are shared out; or another source, all of whose
    inputs are brought to the task's form. limit keeps a random part of that size. Digits are always a number: a folder
    called 2024 is './2024'.
    """
    if isinstance(choice, str) and choice.lstrip("-").isdigit():
        choice = int(choice)
    if choice in ("none", "", 0):
        return source, None
    rest = source
    if isinstance(choice, int):
        rest, found = _hold_out(source, choice, seed)
    elif choice == "test":
        found = Unlabeled(source.test.x, row_ids(source, "test"), source.test.y)
    elif choice == "central":
        found = _central(source)
    else:
        rest, found = _of_another(choice, source, cache_dir)
    return rest, found if limit is None or limit >= len(found.x) else _some(found, limit, seed)


def read_unlabeled(place: str | Path, source: Source, *, cache_dir: str | None = None) -> Unlabeled:
    """A folder of images (in any folders, of any size), a table or texts, in the storage form of the task's `source`.

    A table's columns are found by the names of the task's. Images that cannot be read, and files of other kinds
    beside them, are named in `skipped`; every other file or row comes once, in the order of the names: its path below
    the folder, the table's id column as it is written, or its row number. Texts may also be the lines of .txt files.
    Labels that are there count as truth if all classes have names of the task's. A Path is never the name of an
    embedded set.
    """
    if source.texts is not None:
        raise FedstillError(f"'{place}': the task's texts are no tokens yet; call tokenise first")
    return _as_unlabeled(place, _load(place, source, cache_dir), source)


def _load(place: str | Path, source: Source, cache_dir: str | None) -> Source:
    label = source.label or None
    other = load_like(place, source, key="data.unlabeled", labelled=False, label=label, cache_dir=cache_dir)
    return other._replace(skipped=(*other.skipped, *_other_files(other.origin, source)))


def _as_unlabeled(place: str | Path, other: Source, source: Source) -> Unlabeled:
    x = match_storage(other.train.x, source.train.x, where=f"'{place}'")
    for note in other.notes:
        _log.warning("'%s': %s", place, note)
    truth = match_classes(other.train, source, some=True) if other.label else None
    return Unlabeled(x, row_ids(other, "train"), truth, other.skipped, other.notes)


def _of_another(place: str, source: Source, cache_dir: str | None) -> tuple[Source, Unlabeled]:
    other = _load(place, source, cache_dir)
    if other.origin == source.origin:
        raise FedstillError(
            f"data.unlabeled: '{place}' is the clients' own dataset; give a number of its rows to hold out, or 'test'"
        )
    source, other = in_one_list(source, other)
    return source, _as_unlabeled(place, other, source)


def _other_files(origin: str, source: Source) -> tuple[str, ...]:
    """What is left out of a folder of images: files that are none by their name, or whose name is no text.

    Not cached, for the images alone decide the cache. Where a parquet file holds the images, only images are named.
    """
    root = Path(origin)
    if not root.is_absolute() or not root.is_dir():
        return ()
    reading = reading_like(source, labelled=False)
    taken = files_of(root, reading)
    beside = set(files_below(root)) - set(taken)
    if taken[0].suffix.lower() not in IMAGE_SUFFIXES:
        beside = {file for file in beside if reading.fit and file.suffix.lower() in IMAGE_SUFFIXES}
    return tuple(sorted(printable(file.relative_to(root)) for file in beside))


def _central(source: Source) -> Unlabeled:
    if source.central is None:
        raise FedstillError(
            "data.unlabeled = 'central' is what the clients leave to the server: set data.client_rows, e.g. 20000"
        )
    return source.central


def _hold_out(source: Source, count: int, seed: int) -> tuple[Source, Unlabeled]:
    rows = len(source.train.y)
    if isinstance(count, bool) or not 0 < count < rows:
        raise FedstillError(f"data.unlabeled: cannot hold out {count} of {rows} train rows; give 1 to {rows - 1}")
    order = numpy_generator(seed_for(seed, "unlabeled")).permutation(rows)
    taken = keep_rows(source, "train", np.sort(order[:count]))
    found = Unlabeled(taken.train.x, row_ids(taken, "train"), taken.train.y)
    return keep_rows(source, "train", np.sort(order[count:])), found


def _some(found: Unlabeled, limit: int, seed: int) -> Unlabeled:
    drawn = numpy_generator(seed_for(seed, "unlabeled", "limit")).choice(len(found.x), limit, replace=False)
    rows = torch.from_numpy(np.sort(drawn))
    return found._replace(
        x=found.x[rows],
        ids=tuple(found.ids[row] for row in rows.tolist()),
        truth=None if found.truth is None else found.truth[rows],
    )
