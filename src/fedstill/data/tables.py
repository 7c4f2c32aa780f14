"""Tables to arrays: which column is the label, how inputs become numbers, what rows are called, which are the test."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Dataset
from fedstill.data.images import decode_readable, fit_images
from fedstill.data.source import (
    InputColumn,
    Reading,
    Source,
    as_tensor,
    check_owned,
    missing_rows,
    row_numbers,
    statistics,
    stratified_holdout,
)

Column = np.ndarray | list[bytes | Path]  # numbers, words (object array of str), or encoded images

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


def find_text(columns: Mapping[str, Column], reading: Reading, *, ids: Collection[str], where: str) -> str:
    """The one column of text among these; `ids` are columns that may name rows, and are text only as a last resort.

    In a source that is read as another one is (`reading.like`) the only column of text may have another name.
    """
    found = [n for n, c in columns.items() if isinstance(c, np.ndarray) and c.dtype == object and c.ndim == 1]
    plain = [name for name in found if name not in ids] or found
    if reading.inputs:
        (name, *more) = reading.inputs
        if more:
            told = ", ".join(reading.inputs)
            raise FedstillError(f"data.inputs: data.tokens reads one column of text of {where}, not {told}; give one")
        if name in found:
            return name
        if not (reading.like and len(plain) == 1):
            known = suggest(name, found) if found else f"it has {', '.join(columns) or 'no columns'}, none of them text"
            raise FedstillError(f"data.inputs: {where} has no column of text '{name}'; {known}")
    if len(plain) > 1:
        raise FedstillError(
            f"data.inputs: {where} has several columns of text ({', '.join(plain)}); set data.inputs to one of them"
        )
    if not plain:
        told = ", ".join(columns) or "none"
        raise FedstillError(f"data.tokens: {where} has no column of text beside the label; its other columns: {told}")
    return plain[0]


def as_rows(columns: Sequence[Column], name: str, where: str) -> tuple[list[np.ndarray], np.ndarray]:
    """(x (n, 1) of each split, texts): sample i of all splits is text i."""
    texts = complete(np.concatenate([np.asarray(column, object) for column in columns]), name, where)
    cuts = np.cumsum([len(column) for column in columns])[:-1]
    return np.split(np.arange(len(texts), dtype=np.int64)[:, None], cuts), texts


MAX_WORDS = 100  # different words in a column that is still one-hot encoded


def encode_labels(
    columns: Sequence[Column], names: tuple[str, ...] | None, label: str, where: str
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Labels as 0..K-1: as stated by class names, else the distinct values in order (numbers by size)."""
    arrays = [complete(np.asarray(column), label, where) for column in columns]
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


def join(columns: Sequence[Column], name: str, where: str) -> np.ndarray:
    arrays = [np.asarray(column) for column in columns]
    if len({array.shape[1:] for array in arrays}) > 1:
        raise FedstillError(f"data.source: column '{name}' of {where} has another shape in each split")
    return np.concatenate(arrays)


def table_column(
    columns: Sequence[Column], names: tuple[str, ...] | None, name: str, where: str, *, like: InputColumn | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(features, words): float32 (n, 1) of a column of numbers, (n, d) of vectors, one-hot (n, words) of words.

    `like` is the same column of another source: its words in its order, or as many numbers.
    """
    if like is not None and not all(isinstance(column, np.ndarray) for column in columns):
        raise FedstillError(f"data.inputs: column '{name}' of {where} holds images, the task's does not")
    joined = join(columns, name, where)
    if names is not None:
        stated = (joined >= 0) & (joined < len(names))
        joined = np.array([*names, ""], dtype=object)[np.where(stated, joined, len(names)).astype(np.int64)]
    joined = complete(joined, name, where)
    if like is not None:
        return (_known_words if like.words else _known_numbers)(joined, like, where), like.words
    if joined.dtype != object:
        return finite(storage_form(joined), name, where), ()
    words, codes = distinct_words(joined)
    if names is None:
        check_numbers(words, codes, name, where)
    if len(words) > MAX_WORDS:
        raise FedstillError(
            f"data.inputs: column '{name}' of {where} holds {len(words)} different words, more than {MAX_WORDS}: "
            "to read it as text set data.tokens, else leave it out with data.inputs, or partition by it with data.keys"
        )
    return np.eye(len(words), dtype=np.float32)[codes], tuple(words.tolist())


def _known_words(column: np.ndarray, like: InputColumn, where: str) -> np.ndarray:
    values = np.array([str(value) for value in column.tolist()], np.str_)
    known = np.array(like.words, np.str_)
    codes = np.searchsorted(known, values).clip(max=len(known) - 1)
    strange = np.flatnonzero(known[codes] != values)
    if len(strange):
        told = f"'{values[strange[0]]}' in {row_numbers(strange)}"
        raise FedstillError(
            f"data.inputs: column '{like.name}' of {where} holds {told}, a word that is not among the task's: "
            + ", ".join(like.words[:20])
        )
    one_hot: np.ndarray = np.eye(len(known), dtype=np.float32)[codes]
    return one_hot


def _known_numbers(column: np.ndarray, like: InputColumn, where: str) -> np.ndarray:
    if column.dtype == object:
        raise FedstillError(
            f"data.inputs: column '{like.name}' of {where} must hold numbers, as the task's does: {tell_words(column)}"
        )
    numbers = finite(storage_form(column), like.name, where)
    if numbers.ndim != 2 or numbers.shape[1] != like.width:
        raise FedstillError(
            f"data.inputs: column '{like.name}' of {where} holds samples of shape {numbers.shape[1:]}, "
            f"the task's of {(like.width,)}"
        )
    return numbers


def finite(numbers: np.ndarray, name: str, where: str) -> np.ndarray:
    """The numbers themselves, if all of them fit in a float32."""
    if numbers.dtype == np.uint8:
        return numbers
    infinite = np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(1))
    if len(infinite):
        raise FedstillError(f"data.source: column '{name}' of {where} is not finite in {row_numbers(infinite)}")
    return numbers


def complete(column: np.ndarray, name: str, where: str) -> np.ndarray:
    """The column itself, if no value is missing; spaces are none, from whichever kind of file."""
    missing = missing_rows(column)
    if len(missing):
        told = row_numbers(missing)
        raise FedstillError(f"data.source: column '{name}' of {where} has no value in {told}; fill or drop them")
    return column


MIN_NUMBERS = 10  # so few cells tell nothing about the others
MAX_ODD_SHARE = 0.1  # words among numbers: with more of them it is a column of words
MAX_CODES = 20  # different numbers in a column that may hold codes


class OddCells(NamedTuple):
    """The cells of a column of numbers that are none."""

    rows: np.ndarray
    told: str  # the first of them, and how many more there are
    numbers: int  # the other cells
    codes: bool  # they may be meant: '1', '2', '3' and 'A' are codes


def check_numbers(words: np.ndarray, codes: np.ndarray, name: str, where: str) -> None:
    """Refuse a column of numbers with a few other cells, given as its different words and which of them each row has.

    One cell that is mistyped would turn a column of numbers into as many features as it has different values.
    """
    odd = find_odd(words, codes)
    if odd is not None and not odd.codes:
        raise FedstillError(
            f"data.source: column '{name}' of {where} holds {odd.numbers} numbers, but {odd.told}; correct such "
            "cells or drop their rows, or leave the column out with data.inputs; if it holds codes, write each as a "
            "word (c5 for 5)"
        )


def code_notes(splits: Sequence[Mapping[str, Any]], words: Mapping[str, Sequence[str]], where: str) -> tuple[str, ...]:
    """A note on each column of these words that is nearly all numbers and was taken for codes."""
    notes = []
    for name, found in words.items():
        if len({_is_number(word) for word in found}) < 2:
            continue
        odd = find_odd(*distinct_words(np.concatenate([columns[name] for columns in splits])))
        if odd is not None:
            notes.append(f"column '{name}' of {where} is read as words (one-hot): {odd.told}, it seems to hold codes")
    return tuple(notes)


def distinct_words(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the different words in order, which of them each row has)."""
    words, codes = np.unique(column.astype(np.str_), return_inverse=True)
    return words, codes


def find_odd(words: np.ndarray, codes: np.ndarray) -> OddCells | None:
    """The words among numbers, in a column that is nearly all numbers; None in any other."""
    is_odd = np.array([not _is_number(word) for word in words.tolist()], bool)
    rows = np.flatnonzero(is_odd[codes])
    numbers = len(codes) - len(rows)
    if not len(rows) or numbers < MIN_NUMBERS or len(rows) > MAX_ODD_SHARE * len(codes):
        return None
    counts = np.bincount(codes, minlength=len(words))
    return OddCells(rows, _tell(words, codes, rows), numbers, _are_codes(words, is_odd, counts))


def tell_words(column: np.ndarray) -> str:
    """What is wrong with words in the place of numbers."""
    words, codes = distinct_words(column)
    is_odd = np.array([not _is_number(word) for word in words.tolist()], bool)
    rows = np.flatnonzero(is_odd[codes])
    if len(rows):
        return f"{_tell(words, codes, rows)}; correct such cells or drop their rows"
    return f"they are stored as words ('{column[0]}'); store them as numbers"


def _tell(words: np.ndarray, codes: np.ndarray, rows: np.ndarray) -> str:
    first = textwrap.shorten(str(words[codes[rows[0]]]), 60, placeholder="...")
    others = {1: "is no number", 2: "and 1 more cell are no numbers"}
    what = others.get(len(rows), f"and {len(rows) - 1} more cells are no numbers")
    return f"'{first}' in {row_numbers(rows[:1])} {what}"


def _are_codes(words: np.ndarray, is_odd: np.ndarray, counts: np.ndarray) -> bool:
    """Few whole numbers, and every word beside them recurs and has a letter or digit: a '?' is no code."""
    numbers = [float(word) for word in words[~is_odd].tolist()]
    few = len(numbers) <= MAX_CODES and all(number.is_integer() for number in numbers)
    meant = all(any(letter.isalnum() for letter in word) for word in words[is_odd].tolist())
    return few and meant and bool(counts[is_odd].min() > 1)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


ID_NAMES = ("id", "file", "file_name", "filename", "path", "name")  # columns that may name rows, the best first
# patient_id, PATIENT-ID, id_patient, patientId, PatientID, idPatient; never acid, COVID, IDH1
ID_OF_SOMETHING = re.compile(r"(?i:.*[-_. ]id|id[-_. ].*)|.*[a-z0-9]I[dD]|[iI]d[A-Z].*", re.DOTALL)


def called_id(name: str) -> bool:
    """Whether a column is called as one that may name its rows."""
    return name.lower() in ID_NAMES or ID_OF_SOMETHING.fullmatch(name) is not None


def rank(name: str) -> int:
    """The smaller the better a column of this name names rows; ids of something are the last."""
    return ID_NAMES.index(name.lower()) if name.lower() in ID_NAMES else len(ID_NAMES)


def may_hold_ids(name: str, column: np.ndarray) -> bool:
    """False for fractions in a column that is called the id of something: they are measured."""
    return name.lower() in ID_NAMES or column.dtype.kind != "f" or np.array_equal(column, np.round(column))


def names_groups(name: str, ids: list[str]) -> bool:
    """An id of something that most rows share, such as clinic_id: nobody expects it to name rows."""
    return name.lower() not in ID_NAMES and 2 * len(set(ids)) <= len(ids)


def fault(ids: list[str]) -> str:
    """Why these are no names of rows; '' if they are."""
    if not ids:
        return "it does not hold words or whole numbers in every split"
    empty = [row for row, name in enumerate(ids) if not name.strip()]
    if empty:
        return f"it has no value in {row_numbers(np.array(empty))}"
    first: dict[str, int] = {}
    for row, name in enumerate(ids):
        if first.setdefault(name, row) != row:
            return f"'{name}' is in {row_numbers(np.array([first[name], row]))}"
    return ""


def order(ids: list[str]) -> np.ndarray:
    """Rows in the order of their names; whole numbers by size, whatever their length."""
    if all(name.isascii() and name.isdigit() for name in ids):
        return np.array(sorted(range(len(ids)), key=lambda row: (len(ids[row]), ids[row])))
    return np.array(sorted(range(len(ids)), key=ids.__getitem__))
