"""From columns to a Source: which column is the label, how inputs become numbers, which rows are the test split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Dataset
from fedstill.data.images import centre_square, decode_images
from fedstill.data.source import Reading, Source, as_tensor, statistics, stratified_holdout

LABEL_NAMES = frozenset({"label", "labels", "target", "class", "y"})
MAX_WORDS = 100  # different words in a column that is still one-hot encoded
MAX_KEY_LENGTH = 64  # characters; longer words are text, not the name of an owner

Column = np.ndarray | list[bytes | Path]  # numbers, words (object array of str), or encoded images


class Frame(NamedTuple):
    """One split before decoding; "" and NaN stand for a missing value."""

    columns: Mapping[str, Column]
    names: Mapping[str, tuple[str, ...]] = {}  # class names of integer columns, where the file states them

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))


class Encoded(NamedTuple):
    """Splits as arrays, in the order of the frames."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    classes: tuple[str, ...]


def assemble(
    frames: Mapping[str, Frame], reading: Reading, *, name: str, origin: str, notes: Iterable[str] = ()
) -> Source:
    """Turn the splits of a source into train and test, which never share a row."""
    if not reading.labelled:
        return _without_labels(list(frames.values()), reading, name=name, origin=origin, notes=tuple(notes))
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
    encoded = Encoded(encode_inputs(used, inputs, reading, name), y, classes)
    keys = find_keys(train, reading, label=label, inputs=inputs, name=name)
    return _to_source(encoded, keys, reading, name=name, origin=origin, notes=(*notes, *said))


def _to_source(
    encoded: Encoded, keys: dict[str, np.ndarray], reading: Reading, *, name: str, origin: str, notes: tuple[str, ...]
) -> Source:
    x, y = encoded.x, encoded.y
    if len(x) == 1:
        kept, held_out = stratified_holdout(y[0], reading.held_out, seed=reading.seed)
        x, y = [x[0][kept], x[0][held_out]], [y[0][kept], y[0][held_out]]
        keys = {key: values[kept] for key, values in keys.items()}
        held = f"{len(held_out)} of {len(y[0]) + len(y[1])} rows are held out (stratified, seed {reading.seed})"
        notes = (*notes, f"{name} has no labelled test split: {held}")
    mean, std = statistics(x[0], name)
    train, test = (
        Dataset(name, as_tensor(x[i]), as_tensor(y[i]), encoded.classes, mean=mean, std=std) for i in range(2)
    )
    return Source(train, test, keys, notes, origin)


def _without_labels(frames: list[Frame], reading: Reading, *, name: str, origin: str, notes: tuple[str, ...]) -> Source:
    """All rows of all splits as the train split; the test split is empty, every label is 0."""
    try:
        label: str | None = find_label(frames[0], reading, name)
    except FedstillError:
        label = None
    inputs = find_inputs(frames[0], reading, label, name)
    x = np.concatenate(encode_inputs(frames, inputs, reading, name))
    encoded = Encoded([x, x[:0]], [np.zeros(len(x), np.int64), np.zeros(0, np.int64)], ("unlabeled",))
    return _to_source(encoded, {}, reading, name=name, origin=origin, notes=notes)


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
    unknown = [name for name in reading.inputs if name not in frame.columns]
    if unknown:
        raise FedstillError(f"data.inputs: {where} has no column '{unknown[0]}'; {suggest(unknown[0], frame.columns)}")
    names = list(reading.inputs) or [n for n in frame.columns if n != label and n not in reading.keys]
    pictures = [n for n in names if _dimensions(frame.columns[n]) == 0]
    pictures = pictures or [n for n in names if _dimensions(frame.columns[n]) > 2]
    if len(pictures) > 1:
        raise FedstillError(
            f"data.inputs: {where} has several image columns ({', '.join(pictures)}); set data.inputs to one of them"
        )
    if not (pictures or names):
        raise FedstillError(f"data.inputs: {where} has no column besides the label")
    return pictures or names


def find_keys(frame: Frame, reading: Reading, *, label: str, inputs: list[str], name: str) -> dict[str, np.ndarray]:
    """Columns to partition by: those asked for; beside images also every other column of integers or short words."""
    for key in reading.keys:
        if not _is_plain(frame.columns.get(key, [])):
            known = [n for n, column in frame.columns.items() if _is_plain(column)]
            raise FedstillError(f"data.keys: {name} has no key column '{key}'; {suggest(key, known)}")
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


def encode_labels(
    columns: Sequence[Column], names: tuple[str, ...] | None, label: str, where: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels as 0..K-1: as stated by class names, else the distinct values in order (numbers by size)."""
    arrays = [_complete(np.asarray(column), label, where) for column in columns]
    if any(array.dtype.kind in "OU" for array in arrays):
        values = np.concatenate([array.astype(object) for array in arrays]).astype(np.str_)
        if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", word) for word in np.unique(values)):
            values = values.astype(np.int64)
    else:
        values = np.concatenate(arrays)
    if values.dtype.kind == "f":
        if not np.array_equal(values, np.round(values)):
            raise FedstillError(f"data.label: column '{label}' of {where} holds fractions; a label is a class")
        values = values.astype(np.int64)
    if names is not None:
        codes, classes = values.astype(np.int64), names
        outside = codes[(codes < 0) | (codes >= len(names))]
        if len(outside):
            raise FedstillError(f"data.label: label {outside[0]} of {where} is outside 0..{len(names) - 1}")
    else:
        distinct, codes = np.unique(values, return_inverse=True)
        if len(distinct) == len(values) > 20:
            raise FedstillError(f"data.label: column '{label}' of {where} differs in every row; a label is a class")
        classes = tuple(str(value) for value in distinct)
    cuts = np.cumsum([len(array) for array in arrays])[:-1]
    return np.split(codes.astype(np.int64), cuts), classes


def encode_inputs(frames: Sequence[Frame], inputs: list[str], reading: Reading, where: str) -> list[np.ndarray]:
    """Images as uint8 (n, channels, h, w), tables as float32 (n, features); all splits alike."""
    for name in inputs:
        if any(name not in frame.columns for frame in frames):
            raise FedstillError(f"data.source: column '{name}' of {where} is missing in one of its splits")
    columns = {name: [frame.columns[name] for frame in frames] for name in inputs}
    cuts = np.cumsum([frame.rows for frame in frames])[:-1]
    first = columns[inputs[0]]
    if not isinstance(first[0], np.ndarray):
        blobs = [blob for column in first for blob in column]
        x = decode_images(blobs, where=where, size=reading.size, mixed_size=reading.mixed_size)
    elif first[0].ndim > 2:
        whole = _complete(_join(first, inputs[0], where), inputs[0], where)
        x = _finite(storage_form(whole), inputs[0], where)
        x = centre_square(x, reading.size) if reading.size and x.ndim == 4 else x
    else:
        names = {name: frames[0].names.get(name) for name in inputs}
        x = np.concatenate([_table_columns(columns[n], names[n], n, where) for n in inputs], axis=1)
    return np.split(x, cuts)


def storage_form(x: np.ndarray) -> np.ndarray:
    """Arrays given as such: 3-d is grey images, 4-d images with channels first or last; bytes stay bytes."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim > 2 and x.dtype.kind in "iu" and x.min(initial=0) >= 0 and x.max(initial=0) <= 255:
        return np.ascontiguousarray(x, dtype=np.uint8)
    with np.errstate(over="ignore"):  # reported as not finite
        return np.ascontiguousarray(x.reshape(len(x), -1) if x.ndim == 1 else x, dtype=np.float32)


def _join(columns: Sequence[Column], name: str, where: str) -> np.ndarray:
    arrays = [np.asarray(column) for column in columns]
    if len({array.shape[1:] for array in arrays}) > 1:
        raise FedstillError(f"data.source: column '{name}' of {where} has another shape in each split")
    return np.concatenate(arrays)


def _table_columns(columns: Sequence[Column], names: tuple[str, ...] | None, name: str, where: str) -> np.ndarray:
    """float32 (n, 1) of a column of numbers, (n, d) of vectors, one-hot (n, words) of words."""
    joined = _join(columns, name, where)
    if names is not None:
        stated = (joined >= 0) & (joined < len(names))
        joined = np.array([*names, ""], dtype=object)[np.where(stated, joined, len(names)).astype(np.int64)]
    joined = _complete(joined, name, where)
    if joined.dtype == object:
        words, codes = np.unique(joined.astype(np.str_), return_inverse=True)
        if len(words) > MAX_WORDS:
            raise FedstillError(
                f"data.inputs: column '{name}' of {where} holds {len(words)} different words, more than {MAX_WORDS} "
                "(free text is not read); leave it out with data.inputs, or partition by it with data.keys"
            )
        return np.eye(len(words), dtype=np.float32)[codes]
    return _finite(storage_form(joined), name, where)


def _finite(numbers: np.ndarray, name: str, where: str) -> np.ndarray:
    """The numbers themselves, if all of them fit in a float32."""
    if numbers.dtype == np.uint8:
        return numbers
    infinite = np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(1))
    if len(infinite):
        raise FedstillError(f"data.source: column '{name}' of {where} is not finite in {_rows(infinite)}")
    return numbers


def _complete(column: np.ndarray, name: str, where: str) -> np.ndarray:
    """The column itself, if no value is missing."""
    missing = column == "" if column.dtype == object else np.zeros(len(column), bool)
    if column.dtype.kind == "f":
        missing = np.isnan(column).reshape(len(column), -1).any(1)
    if missing.any():
        told = _rows(np.flatnonzero(missing))
        raise FedstillError(f"data.source: column '{name}' of {where} has no value in {told}; fill or drop them")
    return column


def _rows(index: np.ndarray) -> str:
    shown = ", ".join(str(row + 1) for row in index[:5])
    more = f" and {len(index) - 5} more" if len(index) > 5 else ""
    return f"row {shown}{more} (counted from 1)"


def _has_labels(frame: Frame, label: str) -> bool:
    """False where the column is absent or all -1, the hub's mark of a hidden label."""
    column = frame.columns.get(label)
    return isinstance(column, np.ndarray) and not (column.dtype.kind == "i" and bool((column == -1).all()))


def _dimensions(column: Column) -> int:
    return column.ndim if isinstance(column, np.ndarray) else 0  # encoded images


def _is_plain(column: Column) -> bool:
    return isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biufO"
