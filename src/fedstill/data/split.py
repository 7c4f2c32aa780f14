"""Set rows apart before clients share the others: test set, central pool, validation rows, unlabeled samples.

Samples of another source are brought to the task's form: pixels, columns and classes. The test set is drawn from a
fixed seed, because all seeds of an experiment must be tested on the same rows.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Dataset
from fedstill.data.files import files_below, files_of
from fedstill.data.images import IMAGE_SUFFIXES, fit_images
from fedstill.data.load import load
from fedstill.data.source import Reading, Source, Unlabeled, keep_rows, row_ids, stratified_holdout
from fedstill.data.text import in_one_list
from fedstill.data.tokens import as_tokens

_log = logging.getLogger("fedstill.run")
FIXED = 0  # seed of draws that are the same for all seeds of an experiment


def with_test_of(source: Source, place: str, *, label: str | None = None, cache_dir: str | None = None) -> Source:
    """Return the source with the test split of another one (cross-domain), in the task's form and classes.

    Inputs are normalised like the clients' inputs. label: the label column of the other source, if it has that column.
    """
    try:
        other = load_like(place, source, key="data.test", labelled=True, label=label, cache_dir=cache_dir)
    except FedstillError:
        if label is None:
            raise
        other = load_like(place, source, key="data.test", labelled=True, cache_dir=cache_dir)
    if other.origin == source.origin:
        raise FedstillError(f"data.test: '{place}' is the clients' own dataset; leave data.test out for its test split")
    source, other = in_one_list(source, other)
    y = match_classes(other.test, source)
    if y is None:
        theirs, ours = other.test.classes, source.train.classes
        raise FedstillError(
            f"data.test: the classes of '{place}' ({len(theirs)}) and of the task ({len(ours)}) differ in "
            f"{', '.join(sorted(set(theirs) ^ set(ours))[:10])}; give a set of the same classes, named alike"
        )
    data = source.train
    x = match_storage(other.test.x, data.x, where=f"'{place}'", key="data.test")
    test = replace(data, name=other.test.name, x=x, y=y)
    rows = {**source.rows, "test": other.rows.get("test", np.arange(len(y)))}
    notes = (*source.notes, f"tested on {other.test.name}, {len(y)} rows", *other.notes)
    return source._replace(test=test, rows=rows, notes=notes)


def central_pool(source: Source, client_rows: int, *, test_share: float) -> Source:
    """Leave clients some train rows and give the server all others, a share of them to test on, the others unlabeled.

    All rows stand in one order drawn from a fixed seed. The test set is taken from its front, the clients' train rows
    from its back, rows between them are unlabeled. So another number of `client_rows` with equally many test rows is
    tested on the same rows, as long as clients leave them; fewer test rows are a part of more.

    Reference: D2C-FL, Sect. 4.1 (20,000 train rows for clients; of 40,000 others 20 % to test, 80 % unlabeled).
    """
    train, test = len(source.train.y), len(source.test.y)
    if not 0 < client_rows <= train:
        raise FedstillError(
            f"data.client_rows = {client_rows}: {source.train.name} has {train} train rows; give 1 to that"
        )
    order = numpy_generator(seed_for(FIXED, "central")).permutation(train + test)  # train rows, then test rows
    clients = order[order < train][train - client_rows :]
    pool = order[~np.isin(order, clients)]
    count = min(max(1, round(test_share * len(pool))), len(pool) - 1)
    if count < 1:
        raise FedstillError(f"data.client_rows = {client_rows} leaves {len(pool)} rows to the server; give fewer")
    names = np.array([*row_ids(source, "train"), *row_ids(source, "test")], np.str_)
    x, y = (torch.cat([source.train.x, source.test.x]), torch.cat([source.train.y, source.test.y]))
    tested, unlabeled = (np.sort(rows) for rows in (pool[:count], pool[count:]))
    central = Unlabeled(x[unlabeled], tuple(names[unlabeled].tolist()), y[unlabeled])
    left = keep_rows(source, "train", np.sort(clients))
    note = (
        f"{client_rows} rows for clients, {count} to test; the server gets the other {len(unlabeled)} without labels "
        "where data.unlabeled = 'central'"
    )
    return left._replace(
        test=replace(source.test, x=x[tested], y=y[tested]),
        rows={**left.rows, "test": names[tested]},
        central=central,
        notes=(*source.notes, note),
    )


def limit_test(source: Source, limit: int) -> Source:
    """Return the source with a random part of its test set, of that size."""
    count = len(source.test.y)
    if limit >= count:
        return source
    rows = numpy_generator(seed_for(FIXED, "test", "limit")).choice(count, limit, replace=False)
    kept = keep_rows(source, "test", np.sort(rows))
    return kept._replace(notes=(*source.notes, f"tested on {limit} of {count} rows, drawn at random"))


def hold_validation(source: Source, count: int, *, seed: int) -> tuple[Source, tuple[Tensor, Tensor] | None]:
    """Take labeled train rows for the server, each class by its share; return (source without them, these rows)."""
    if not count:
        return source, None
    rows = len(source.train.y)
    if not 0 < count < rows:
        raise FedstillError(f"data.validation: cannot hold out {count} of {rows} train rows; give 1 to {rows - 1}")
    labels = source.train.y.numpy()
    kept, taken = stratified_holdout(labels, count / rows, seed=seed_for(seed, "validation"))
    index = torch.from_numpy(taken)
    return keep_rows(source, "train", kept), (source.train.x[index], source.train.y[index])


def split_unlabeled(
    source: Source, choice: str | int, *, seed: int, limit: int | None = None, cache_dir: str | None = None
) -> tuple[Source, Unlabeled | None]:
    """Give the server its unlabeled samples; return (source without rows that it takes, samples in the task's form).

    choice: 'none'; 'test' (transductive: the test inputs); 'central' (rows that data.client_rows leaves to the server);
    a number of train rows, taken away from the clients; or another source, all of whose inputs are brought to the
    task's form. limit: keep a random part of that size. Digits are always a number: a folder called 2024 is './2024'.
    """
    if isinstance(choice, str) and choice.lstrip("-").isdigit():
        choice = int(choice)
    if choice in ("none", "", 0):
        return source, None
    if isinstance(choice, int):
        rows = len(source.train.y)
        if isinstance(choice, bool) or not 0 < choice < rows:
            raise FedstillError(f"data.unlabeled: cannot hold out {choice} of {rows} train rows; give 1 to {rows - 1}")
        order = numpy_generator(seed_for(seed, "unlabeled")).permutation(rows)
        taken = keep_rows(source, "train", np.sort(order[:choice]))
        unlabeled = Unlabeled(taken.train.x, row_ids(taken, "train"), taken.train.y)
        source = keep_rows(source, "train", np.sort(order[choice:]))
    elif choice == "test":
        unlabeled = Unlabeled(source.test.x, row_ids(source, "test"), source.test.y)
    elif choice == "central":
        if source.central is None:
            raise FedstillError(
                "data.unlabeled = 'central' means rows that clients leave: set data.client_rows, e.g. 20000"
            )
        unlabeled = source.central
    else:
        other = _load_unlabeled(choice, source, cache_dir)
        if other.origin == source.origin:
            raise FedstillError(
                f"data.unlabeled: '{choice}' is the clients' own dataset; give a number of its rows to hold out, "
                "or 'test'"
            )
        source, other = in_one_list(source, other)
        unlabeled = _as_unlabeled(choice, other, source)
    if limit is None or limit >= len(unlabeled.x):
        return source, unlabeled
    drawn = numpy_generator(seed_for(seed, "unlabeled", "limit")).choice(len(unlabeled.x), limit, replace=False)
    kept = torch.from_numpy(np.sort(drawn))
    return source, unlabeled._replace(
        x=unlabeled.x[kept],
        ids=tuple(unlabeled.ids[row] for row in kept.tolist()),
        truth=None if unlabeled.truth is None else unlabeled.truth[kept],
    )


def read_unlabeled(place: str | Path, source: Source, *, cache_dir: str | None = None) -> Unlabeled:
    """Read a folder of images (in any folders, of any size), a table or texts in the form of the task's `source`.

    A table must have the task's columns. `skipped` names images that cannot be read, and files of other kinds beside
    them. Every other file or row comes once, in the order of the names: its path below the folder, the table's id
    column as it is written, or its row number. Texts may also be the lines of .txt files. Labels count as truth if all
    classes have names of the task's classes. A Path is never the name of an embedded set.
    """
    if source.texts is not None:
        raise FedstillError(f"'{place}': the task's texts are no tokens yet; call tokenise first")
    return _as_unlabeled(place, _load_unlabeled(place, source, cache_dir), source)


def _load_unlabeled(place: str | Path, source: Source, cache_dir: str | None) -> Source:
    """Load another source in the task's form; `skipped` names the files of its folder that are no images.

    These names are not cached, because the images alone name the cache entry. Where a parquet file holds the images,
    `skipped` names only the images beside it.
    """
    label = source.train.label or None
    other = load_like(place, source, key="data.unlabeled", labelled=False, label=label, cache_dir=cache_dir)
    root = Path(other.origin)
    if not root.is_absolute() or not root.is_dir():
        return other
    reading = reading_like(source, labelled=False)
    taken = files_of(root, reading)
    beside = sorted(set(files_below(root)) - set(taken))
    if taken[0].suffix.lower() not in IMAGE_SUFFIXES:
        beside = [file for file in beside if reading.fit and file.suffix.lower() in IMAGE_SUFFIXES]
    return other._replace(skipped=(*other.skipped, *(file.relative_to(root).as_posix() for file in beside)))


def _as_unlabeled(place: str | Path, other: Source, source: Source) -> Unlabeled:
    x = match_storage(other.train.x, source.train.x, where=f"'{place}'")
    for note in other.notes:
        _log.warning("'%s': %s", place, note)
    truth = match_classes(other.train, source, some=True) if other.train.label else None
    return Unlabeled(x, row_ids(other, "train"), truth, other.skipped, other.notes)


LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as pillow turns RGB to grey


def load_like(
    place: str | Path, task: Source, *, key: str, labelled: bool, label: str | None = None, cache_dir: str | None = None
) -> Source:
    """Load another source in the task's form: images in its size, tables with its columns, texts as its tokens.

    Messages begin with the setting `key`. If the texts of the task are not tokens yet, texts come as texts.
    """
    reading = replace(reading_like(task, labelled=labelled), label=label)
    if task.train.text and not reading.text:
        raise FedstillError(
            f"{key}: '{place}' cannot be matched with a task that reads characters (data.window); images, tables and "
            "tokens (data.tokens) can"
        )
    try:
        other = load(place, reading, cache_dir=cache_dir)
    except FedstillError as error:
        raise FedstillError(*(re.sub(r"^data\.\w+:", f"{key}:", line) for line in error.lines)) from error
    return other if task.train.tokenizer is None else as_tokens(other, task.train.tokenizer)


def reading_like(task: Source, *, labelled: bool) -> Reading:
    x, columns = task.train.x, task.train.columns
    fit = (x.shape[2], x.shape[3]) if x.ndim == 4 else None
    text = task.texts is not None or task.train.tokenizer is not None
    names = tuple(column.name for column in columns)
    reading = Reading(inputs=names, like=columns, fit=fit, labelled=labelled, text=text)
    return replace(reading, missing=columns[0].missing, unknown=columns[0].unknown) if columns else reading


def match_classes(data: Dataset, task: Source, *, some: bool = False) -> Tensor | None:
    """Return labels in the task's numbers; None unless the classes have the same names, in any order.

    some: it is enough that every class is a class of the task.
    """
    wanted = task.train.classes
    if data.classes == wanted:
        return data.y
    if not (set(data.classes) <= set(wanted) if some else sorted(data.classes) == sorted(wanted)):
        return None
    return torch.tensor([wanted.index(name) for name in data.classes])[data.y]


def match_storage(x: Tensor, like: Tensor, *, where: str = "the unlabeled set", key: str = "data.unlabeled") -> Tensor:
    """Return images x recoloured (grey <-> RGB), cut and resized to the form of `like` (bilinear, antialiased)."""
    if x.shape[1:] == like.shape[1:] and x.dtype == like.dtype:
        return x
    if x.ndim != like.ndim or (x.ndim != 4 and x.shape[1:] != like.shape[1:]):
        raise FedstillError(
            f"{key}: samples of {where} are {tuple(x.shape[1:])}, the task's {tuple(like.shape[1:])}; "
            "only images can be brought to another shape"
        )
    if x.ndim != 4:
        return x.to(like.dtype)
    if x.dtype != like.dtype:
        floats, of = (like, "the task") if x.dtype == torch.uint8 else (x, where)
        low, high = (value.item() for value in torch.aminmax(floats))
        if low < 0.0 or high > 1.0:  # only 0 to 1 is known to mean 0 to 255
            raise FedstillError(
                f"{key}: pixels of {of} are floats from {low:g} to {high:g}, the others are bytes; "
                "scale them to [0, 1] or give bytes (uint8)"
            )
    if x.shape[1] == 3 and like.shape[1] == 1:
        luma = torch.einsum("nchw,c->nhw", x.float(), torch.tensor(LUMA))[:, None]
        recoloured = luma.round().to(torch.uint8) if x.dtype == torch.uint8 else luma
    else:
        recoloured = x if x.shape[1] == like.shape[1] else x[:, :1].expand(-1, like.shape[1], -1, -1)
    resized = fit_images(recoloured, like.shape[2], like.shape[3])
    if like.dtype == x.dtype:
        return resized
    if x.dtype == torch.uint8:
        return resized.to(like.dtype) / 255.0
    return (resized * 255.0).round().clamp(0, 255).to(like.dtype)
