"""From columns to a Source: which column is the label, how inputs become numbers, which rows are the test split."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Dataset
from fedstill.data.cells import check_owned, code_notes
from fedstill.data.columns import (
    Column,
    complete,
    encode_labels,
    finite,
    join,
    storage_form,
    table_column,
)
from fedstill.data.images import decode_readable, fit_images
from fedstill.data.row_names import called_id, fault, may_hold_ids, names_groups, order, rank
from fedstill.data.source import InputColumn, Reading, Source, as_tensor, statistics, stratified_holdout
from fedstill.data.texts import as_rows, find_text

LABEL_NAMES = frozenset({"label", "labels", "target", "class", "y"})
MAX_KEY_LENGTH = 64  # characters; longer words are text, not the name of an owner


class Frame(NamedTuple):
    """One split before decoding; "" and NaN stand for a missing value."""

    columns: Mapping[str, Column]
    names: Mapping[str, tuple[str, ...]] = {}  # class names of integer columns, where the file states them

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))


class Inputs(NamedTuple):
    """What is learnt from, as one array a split in the order of the frames."""

    x: list[np.ndarray]
    columns: tuple[InputColumn, ...] = ()  # of a table
    unreadable: tuple[int, ...] = ()  # images left out: rows counted over all splits
    texts: np.ndarray | None = None  # of which x are rows


class Encoded(NamedTuple):
    """Splits as arrays, in the order of the frames."""

    inputs: Inputs
    y: list[np.ndarray]
    classes: tuple[str, ...]
    label: str


class RowNames(NamedTuple):
    """What the rows of all splits are called."""

    names: list[str]
    order: np.ndarray  # rows in the order of their names
    notes: tuple[str, ...] = ()  # id columns that could not be used, and why


def assemble(
    frames: Mapping[str, Frame], reading: Reading, *, name: str, origin: str, notes: Iterable[str] = ()
) -> Source:
    """Turn the splits of a source into train and test, which never share a row."""
    frames, notes = with_rows(frames, name), tuple(notes)
    if not reading.labelled:
        return _without_labels(frames, reading, name=name, origin=origin, notes=notes)
    train_name, test_name, said = choose_splits(frames)
    train = frames[train_name]
    label = find_label(train, reading, name)
    used = [train]
    if test_name is not None and _has_labels(frames[test_name], label):
        used.append(frames[test_name])
    elif test_name is not None:
        said = (*said, f"split '{test_name}' has no labels and is left out")
    inputs = find_inputs(train, reading, label, name)
    y, classes = encode_labels([frame.columns[label] for frame in used], train.names.get(label), label, name)
    encoded = Encoded(encode_inputs(used, inputs, reading, name), y, classes, label)
    keys = find_keys(train, reading, label=label, inputs=inputs, name=name)
    said = (*said, *_learnt_ids(train, inputs, reading, name))
    if not reading.like:
        words = {column.name: column.words for column in encoded.inputs.columns}
        said = (*said, *code_notes([frame.columns for frame in used], words, name))
    return _to_source(encoded, keys, reading, name=name, origin=origin, notes=(*notes, *said))


def with_rows(frames: Mapping[str, Frame], where: str) -> dict[str, Frame]:
    """The splits that hold something."""
    found = {split: frame for split, frame in frames.items() if frame.rows}
    if not found:
        some = any(frame.columns for frame in frames.values())
        raise FedstillError(f"data.source: {where} has no {'rows' if some else 'column of numbers, words or images'}")
    return found


def _learnt_ids(frame: Frame, inputs: list[str], reading: Reading, where: str) -> tuple[str, ...]:
    """A note on each input that nobody asked for and that looks like the name of its row."""
    found = []
    for name in inputs:
        column = frame.columns[name]
        if not (isinstance(column, np.ndarray) and _is_plain(column) and is_id(name, reading)):
            continue
        if may_hold_ids(name, column) and len(set(column.tolist())) == frame.rows > 1:
            found.append(
                f"learnt from column '{name}', which differs in every row of {where}: leave it out with data.inputs"
            )
    return tuple(found)


def _to_source(
    encoded: Encoded, keys: dict[str, np.ndarray], reading: Reading, *, name: str, origin: str, notes: tuple[str, ...]
) -> Source:
    x, y, rows = encoded.inputs.x, encoded.y, {}
    if len(x) == 1:
        kept, held_out = stratified_holdout(y[0], reading.held_out, seed=reading.seed)
        x, y = [x[0][kept], x[0][held_out]], [y[0][kept], y[0][held_out]]
        keys, rows = {key: values[kept] for key, values in keys.items()}, {"train": kept, "test": held_out}
        held = f"{len(held_out)} of {len(y[0]) + len(y[1])} rows are held out (stratified, seed {reading.seed})"
        notes = (*notes, f"{name} has no labelled test split: {held}")
    mean, std = statistics(x[0], name)
    train, test = (
        Dataset(name, as_tensor(x[i]), as_tensor(y[i]), encoded.classes, mean=mean, std=std) for i in range(2)
    )
    columns, texts = encoded.inputs.columns, encoded.inputs.texts
    return Source(train, test, keys, notes, origin, columns=columns, rows=rows, label=encoded.label, texts=texts)


def _without_labels(
    frames: Mapping[str, Frame], reading: Reading, *, name: str, origin: str, notes: tuple[str, ...]
) -> Source:
    """All rows of all splits as the train split, with a name each, in the order of their names; no test split.

    Labels that happen to be there are kept: a simulation may look at them.
    """
    splits = list(frames.values())
    label = _label_if_any(splits[0], reading)
    inputs = find_inputs(splits[0], reading, label, name)
    encoded = encode_inputs(splits, inputs, reading, name)
    names, order, said = name_rows(frames, reading, used={*inputs, label})
    y, classes, label = _labels_if_any(splits, label, name)
    lost = np.zeros(len(names), bool)
    lost[list(encoded.unreadable)] = True
    where = np.cumsum(~lost) - 1  # of a row among those that were read
    kept = order[~lost[order]]
    train, test = (
        Dataset(name, as_tensor(np.concatenate(encoded.x)[where[rows]]), as_tensor(y[rows]), classes)
        for rows in (kept, kept[:0])
    )
    skipped = tuple(names[row] for row in order[lost[order]])
    ids = np.array([names[row] for row in kept], np.str_)
    return Source(
        train,
        test,
        {},
        (*notes, *said),
        origin,
        columns=encoded.columns,
        rows={"train": ids},
        skipped=skipped,
        label=label or "",
        texts=encoded.texts,
    )


def is_id(name: str, reading: Reading) -> bool:
    """A column that may name its rows: called so, and not told to be something else."""
    return called_id(name) and name not in (*reading.inputs, reading.label)


def name_rows(frames: Mapping[str, Frame], reading: Reading, *, used: Collection[str | None]) -> RowNames:
    """By the best id column that tells all rows apart, as it is written; else by number.

    Numbers are plain where there is no id column. Where there is one that will not do they are 'row/17', which nobody
    takes for an id.
    """
    told: list[str] = []
    candidates = [name for name in next(iter(frames.values())).columns if is_id(name, reading) and name not in used]
    for name in sorted(candidates, key=rank):
        ids = _texts([frame.columns.get(name) for frame in frames.values()])
        if names_groups(name, ids):
            continue
        why_not = fault(ids)
        if not why_not:
            return RowNames(ids, order(ids), tuple(f"{why}; column '{name}' does" for why in told))
        told.append(f"column '{name}' cannot name the rows: {why_not}")
    alone, prefix = len(frames) == 1, "row/" if told else ""
    starts = {split: prefix if alone else f"{split}/" for split in frames}
    names = [f"{starts[split]}{row}" for split, frame in frames.items() for row in range(frame.rows)]
    notes = tuple(f"{why}; they are called {names[0]} and so on" for why in told)
    return RowNames(names, np.arange(len(names)), notes)


def _texts(columns: Sequence[Column | None]) -> list[str]:
    """Ids as they are; [] where a split has none, or something else than words and whole numbers."""
    if not all(isinstance(c, np.ndarray) and c.ndim == 1 and c.dtype.kind in "iuO" for c in columns):
        return []
    return [str(value) for column in columns for value in np.asarray(column).tolist()]


def _label_if_any(frame: Frame, reading: Reading) -> str | None:
    """The task's label column, else one that says it is the label; the only column of a table is not taken for one."""
    if reading.label in frame.columns and reading.label not in reading.inputs:
        return reading.label
    called_so = [name for name in frame.columns if name.lower() in LABEL_NAMES]
    found = [name for name in list(frame.names) or called_so if name not in reading.inputs]
    return found[0] if len(found) == 1 else None


def _labels_if_any(
    frames: list[Frame], label: str | None, where: str
) -> tuple[np.ndarray, tuple[str, ...], str | None]:
    """(labels of all rows, classes, column), or zeros of no column where a split has none or they make no sense."""
    if label is not None and all(_has_labels(frame, label) for frame in frames):
        try:
            y, classes = encode_labels(
                [frame.columns[label] for frame in frames], frames[0].names.get(label), label, where
            )
            return np.concatenate(y), classes, label
        except FedstillError:
            pass  # a column that is called so and holds something else
    return np.zeros(sum(frame.rows for frame in frames), np.int64), ("unlabeled",), None


def split_role(name: str) -> str | None:
    """'train', 'test' or 'validation' for a split's name such as train_subset or val; None for any other."""
    roles = {"train": "train", "test": "test", "val": "validation", "dev": "validation"}
    for word in re.split(r"[-_. ]", name.lower()):
        for start, role in roles.items():
            if word.startswith(start):
                return role
    return None


def choose_splits(names: Iterable[str]) -> tuple[str, str | None, tuple[str, ...]]:
    """(train, test or None, notes): the plainest name of each role; validation stands in for a missing test."""
    splits = list(names)
    by_role: dict[str | None, list[str]] = {}
    for split in sorted(splits, key=len):
        by_role.setdefault(split_role(split), []).append(split)
    train = by_role.get("train", splits if len(splits) == 1 else [])
    if not train:
        raise FedstillError(f"data.source: no train split among {', '.join(sorted(splits))}; name one of them 'train'")
    test = next(iter(by_role.get("test", []) + by_role.get("validation", [])), None)
    notes = []
    if test is not None and split_role(test) == "validation":
        notes.append(f"no test split: '{test}' takes its place")
    unused = [split for split in splits if split not in (train[0], test)]
    if unused:
        notes.append(f"splits left out: {', '.join(unused)}")
    return train[0], test, tuple(notes)


def find_label(frame: Frame, reading: Reading, where: str) -> str:
    """The label column: as told, else the one with class names, else the one called label, target, class or y."""
    candidates = [name for name, column in frame.columns.items() if _is_plain(column)]
    if reading.label is not None:
        if reading.label not in candidates:
            raise FedstillError(
                f"data.label: {where} has no label column '{reading.label}'; {suggest(reading.label, candidates)}"
            )
        return reading.label
    called_so = [name for name in candidates if name.lower() in LABEL_NAMES]
    for found in (list(frame.names), called_so, candidates if len(candidates) == 1 else []):
        if len(found) == 1:
            return found[0]
    told = ", ".join(candidates) or "none"
    raise FedstillError(f"data.label: which column of {where} is the label? Set data.label; candidates: {told}")


def find_inputs(frame: Frame, reading: Reading, label: str | None, where: str) -> list[str]:
    """The one image column, else the one array column, else every column of numbers or words."""
    if reading.text:
        free = {n: c for n, c in frame.columns.items() if n != label and n not in reading.keys}
        return [find_text(free, reading, ids=[n for n in free if is_id(n, reading)], where=where)]
    unknown = [name for name in reading.inputs if name not in frame.columns]
    if unknown:
        raise FedstillError(f"data.inputs: {where} has no column '{unknown[0]}'; {suggest(unknown[0], frame.columns)}")
    names = list(reading.inputs) or [n for n in frame.columns if n != label and n not in reading.keys]
    if reading.like:
        return names
    pictures = [n for n in names if _dimensions(frame.columns[n]) == 0]
    pictures = pictures or [n for n in names if _dimensions(frame.columns[n]) > 2]
    if len(pictures) > 1:
        raise FedstillError(
            f"data.inputs: {where} has several image columns ({', '.join(pictures)}); set data.inputs to one of them"
        )
    if not (pictures or names):
        raise FedstillError(f"data.inputs: {where} has no column besides the label")
    if reading.fit is not None and not pictures:
        raise FedstillError(f"data.inputs: {where} holds no images, but the task's inputs are images")
    return pictures or names


def find_keys(frame: Frame, reading: Reading, *, label: str, inputs: list[str], name: str) -> dict[str, np.ndarray]:
    """Columns to partition by: those asked for; beside images also every other column of integers or short words."""
    for key in reading.keys:
        if not _is_plain(frame.columns.get(key, [])):
            known = [n for n, column in frame.columns.items() if _is_plain(column)]
            raise FedstillError(f"data.keys: {name} has no key column '{key}'; {suggest(key, known)}")
        check_owned(np.asarray(frame.columns[key]), key, name)
    told = set(reading.keys)
    table = all(_dimensions(frame.columns[n]) in (1, 2) for n in inputs)
    free = [] if table else [n for n in frame.columns if n != label and n not in inputs]
    keys = {}
    for key in dict.fromkeys((*reading.keys, *free)):
        column = frame.columns[key]
        if not isinstance(column, np.ndarray) or not _is_plain(column):
            continue
        if column.dtype == object:
            column = column.astype(np.str_)
        elif column.dtype.kind == "f" and key not in told:
            continue
        if column.dtype.kind != "U" or key in told or column.dtype.itemsize <= 4 * MAX_KEY_LENGTH:
            keys[key] = column
    return keys


def encode_inputs(frames: Sequence[Frame], inputs: list[str], reading: Reading, where: str) -> Inputs:
    """Images as uint8 (n, channels, h, w), tables as float32 (n, features); all splits alike."""
    for name in inputs:
        if any(name not in frame.columns for frame in frames):
            raise FedstillError(f"data.source: column '{name}' of {where} is missing in one of its splits")
    columns = {name: [frame.columns[name] for frame in frames] for name in inputs}
    if reading.text:
        rows, texts = as_rows(columns[inputs[0]], inputs[0], where)
        return Inputs(rows, (InputColumn(inputs[0], 1),), texts=texts)
    shape = reading.fit or (None if reading.size is None else (reading.size, reading.size))
    first = columns[inputs[0]]
    if not isinstance(first[0], np.ndarray) and not reading.like:
        return _encode_images([list(column) for column in first], shape, reading, where)
    cuts = np.cumsum([frame.rows for frame in frames])[:-1]
    if _dimensions(first[0]) > 2 and not reading.like:
        whole = complete(join(first, inputs[0], where), inputs[0], where)
        x = finite(storage_form(whole), inputs[0], where)
        x = fit_images(as_tensor(x), *shape).numpy() if shape and x.ndim == 4 else x
        return Inputs(np.split(x, cuts))
    like = {column.name: column for column in reading.like}
    names = {name: frames[0].names.get(name) for name in inputs}
    parts = [table_column(columns[n], names[n], n, where, like=like.get(n)) for n in inputs]
    described = tuple(InputColumn(n, x.shape[1], words) for n, (x, words) in zip(inputs, parts, strict=True))
    return Inputs(np.split(np.concatenate([x for x, _ in parts], axis=1), cuts), described)


def _encode_images(
    splits: Sequence[list[bytes | Path]], shape: tuple[int, int] | None, reading: Reading, where: str
) -> Inputs:
    """One array a split; without labels what cannot be read is left out and all rows are in the first array."""
    blobs = [blob for split in splits for blob in split]
    decoded = decode_readable(blobs, where=where, shape=shape, skip=not reading.labelled)
    if not reading.labelled:
        return Inputs([decoded.images], unreadable=decoded.unreadable)
    return Inputs(np.split(decoded.images, np.cumsum([len(split) for split in splits])[:-1]))


def _has_labels(frame: Frame, label: str) -> bool:
    """False where the column is absent or all -1, the hub's mark of a hidden label."""
    column = frame.columns.get(label)
    return isinstance(column, np.ndarray) and not (column.dtype.kind == "i" and bool((column == -1).all()))


def _dimensions(column: Column) -> int:
    return column.ndim if isinstance(column, np.ndarray) else 0  # encoded images


def _is_plain(column: Column) -> bool:
    return isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biufO"
