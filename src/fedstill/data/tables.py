"""Turn tables into arrays: find label and inputs, encode them as numbers, name the rows, choose the test rows."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstill.core.data import InputColumn
from fedstill.core.errors import FedstillError, noting, suggest
from fedstill.core.types import Dataset
from fedstill.data.images import decode_images, fit_images
from fedstill.data.source import (
    Reading,
    Source,
    as_tensor,
    check_owned,
    missing_rows,
    row_numbers,
    statistics,
    stratified_holdout,
)

LABEL_NAMES = frozenset({"label", "labels", "target", "class", "y"})
ID_NAMES = ("id", "file", "file_name", "filename", "path", "name")
ID_OF_SOMETHING = re.compile(r"(?i:.*[-_. ]id|id[-_. ].*)|.*[a-z0-9]I[dD]")  # patient_id, patientId; never acid
TEXT_FILE = "text file"  # the column of texts that are whole files
MAX_KEY_LENGTH = 64  # characters; longer words are text, not the name of an owner
LONGEST_NAME = 1000  # letters of the name of an owner or a row
MISSING_WORD = "(missing)"  # the word of a cell without one, with data.missing = "mean"
LARGEST_LABEL = 2**53  # of a label that is written as a float: beyond, two labels can be one number
SHOWN = 5  # columns in one line
MAX_WORDS = 100  # different words in a column that is still one-hot encoded
MAX_ODD_SHARE = 0.1  # a smaller share of cells that are no numbers is a mistake, a larger one makes a column of words


class Frame(NamedTuple):
    """One split before decoding: numbers, words or encoded images by column; "" and NaN stand for a missing value."""

    columns: Mapping[str, np.ndarray]  # words are object arrays of str, images are object arrays of bytes or Path
    names: Mapping[str, tuple[str, ...]] = {}  # class names of integer columns, where the file states them

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, rows: np.ndarray) -> Frame:
        """Return the frame with these rows only."""
        if len(rows) == self.rows:
            return self
        return Frame({name: column[rows] for name, column in self.columns.items()}, self.names)


class Inputs(NamedTuple):
    """Encoded inputs of all rows of a table."""

    x: np.ndarray
    columns: tuple[InputColumn, ...] = ()  # of a table; none for images
    unreadable: tuple[int, ...] = ()  # rows whose image cannot be read
    texts: np.ndarray | None = None  # of which x are rows
    cells_by_rule: Mapping[str, Mapping[str, int]] = {}  # "missing", "unknown": cells that a rule decided, by column


class Encoded(NamedTuple):
    """The features of one column, and how many of its cells a rule decided."""

    x: np.ndarray
    column: InputColumn
    filled: int = 0  # cells without a value
    unknown: int = 0  # words that the task does not have


def objects(values: Sequence[object]) -> np.ndarray:
    """Return values as an object array."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def kind_of(column: np.ndarray) -> str:
    """Return the kind of a column: 'images' (encoded), 'words', 'numbers', or 'arrays' of more dimensions."""
    if column.dtype == object:
        return "images" if len(column) and isinstance(column[0], bytes | Path) else "words"
    return "numbers" if column.ndim == 1 else "arrays"


def stack(frames: Sequence[Frame], names: Iterable[str], where: str) -> Frame:
    """Return one frame with the rows of all frames below each other, in these columns."""
    columns = {}
    for name in names:
        parts = [frame.columns[name] for frame in frames if name in frame.columns]
        if len(parts) < len(frames):
            raise FedstillError(f"data.source: column '{name}' of {where} is missing in one of its files or splits")
        if len({part.shape[1:] for part in parts}) > 1:
            raise FedstillError(f"data.source: column '{name}' of {where} has another shape in each split")
        if len({part.dtype == object for part in parts}) > 1:  # words in one file are words in all
            parts = [part if part.dtype == object else _spelt(part) for part in parts]
        columns[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return Frame(columns, frames[0].names)


def _spelt(numbers: np.ndarray) -> np.ndarray:
    """Return numbers as words; NaN is no value."""
    return objects(["" if number != number else str(number).removesuffix(".0") for number in numbers.tolist()])


def without_columns(frames: dict[str, Frame], reading: Reading, where: str) -> dict[str, Frame]:
    """Return the splits without the columns of data.drop, each of which must be in one of them."""
    if not reading.drop:
        return frames
    known = {name for frame in frames.values() for name in frame.columns}
    mistakes = [f"data.drop: {where} has no column '{n}'; {suggest(n, known)}" for n in reading.drop if n not in known]
    uses = {"inputs": reading.inputs, "keys": reading.keys, "label": [reading.label]}
    mistakes += [
        f"data.drop and data.{use} both name the column '{name}': remove it from one of them"
        for use, names in uses.items()
        for name in reading.drop
        if name in names
    ]
    if mistakes:
        raise FedstillError(*mistakes)
    return {
        split: Frame({name: column for name, column in frame.columns.items() if name not in reading.drop}, frame.names)
        for split, frame in frames.items()
    }


def assemble(
    frames: Mapping[str, Frame], reading: Reading, *, name: str, origin: str, notes: Iterable[str] = ()
) -> Source:
    """Turn the splits of a source into train and test, which never share a row."""
    frames = without_columns(with_rows(frames, name), reading, name)
    if not reading.labelled:
        return _without_labels(frames, reading, name, origin, notes)
    train_name, test_name, new_notes = choose_splits(frames)
    train = frames[train_name]
    label = find_label(train, reading, name)
    inputs = find_inputs(train, reading, label, name)
    used = [train]
    if test_name is not None and _has_labels(frames[test_name], label):
        used.append(frames[test_name])
    elif test_name is not None:
        new_notes.append(f"split '{test_name}' has no labels and is left out")
    kept = [np.arange(frame.rows) for frame in used]
    if reading.missing != "refuse":
        owned = [(label, *reading.keys), (label,)]
        filled_in = reading.missing == "mean" and not reading.text
        kept = [complete_rows(f, (*n, *(() if filled_in else inputs))) for f, n in zip(used, owned, strict=False)]
    table = stack([frame.take(rows) for frame, rows in zip(used, kept, strict=True)], {label, *inputs}, name)
    decoded = decode_inputs(table, inputs, reading, name)
    if decoded is not None and decoded.unreadable:
        readable = np.setdiff1d(np.arange(table.rows), decoded.unreadable)
        table, decoded = table.take(readable), decoded._replace(x=decoded.x[readable])
        first = len(kept[0])
        kept = [
            k[r] for k, r in zip(kept, (readable[readable < first], readable[readable >= first] - first), strict=False)
        ]
    lost = sum(frame.rows for frame in used) - sum(map(len, kept))
    if lost:
        lack = (
            "a readable image" if decoded is not None and not reading.text else "a value in every column that they need"
        )
        new_notes.append(f"{lost} of {lost + table.rows} rows are left out, because they do not have {lack}")
    if not all(map(len, kept)):
        raise FedstillError(f"data.missing: no row of a split of {name} has a value in every column that it needs")
    y, classes = encode_labels(table.columns[label], table.names.get(label), label, name)
    if reading.like_classes:
        y, classes = in_these_classes(y, classes, reading.like_classes, label, name), tuple(reading.like_classes)
    keys = find_keys(train.take(kept[0]), reading, label=label, inputs=inputs, name=name)
    new_notes += [
        f"learnt from column '{n}', which differs in every row of {name}: leave it out with data.drop"
        for n in inputs
        if may_name_rows(n, reading)
        and kind_of(train.columns[n]) in ("numbers", "words")
        and train.columns[n].dtype.kind in "iuO"
        and len(set(train.columns[n].tolist())) == train.rows > 1
    ]
    parts: tuple[slice | np.ndarray, ...] = (slice(None, len(kept[0])), slice(len(kept[0]), None))
    rows = dict(zip(("train", "test"), kept, strict=True)) if lost and len(kept) == 2 else {}
    if len(used) == 1 and reading.held_out:
        trained, held_out = parts = stratified_holdout(y, reading.held_out, seed=reading.seed)
        rows = {"train": kept[0][trained], "test": kept[0][held_out]}
        keys = {key: values[trained] for key, values in keys.items()}
        held = f"{len(held_out)} of {len(y)} rows are held out (stratified, seed {reading.seed})"
        new_notes.append(f"{name} has no labelled test split: {held}")
    encoded = (
        encode_columns(table, inputs, reading, name, train=np.arange(table.rows)[parts[0]])
        if decoded is None
        else decoded
    )
    mean, std = statistics(encoded.x[parts[0]], name)
    train_set, test_set = (
        Dataset(
            name,
            as_tensor(encoded.x[part]),
            as_tensor(y[part]),
            classes,
            mean=mean,
            std=std,
            columns=encoded.columns,
            label=label,
        )
        for part in parts
    )
    all_notes = (*notes, *new_notes, *rule_notes(encoded.cells_by_rule, table.rows))
    return Source(train_set, test_set, keys, all_notes, origin, rows=rows, texts=encoded.texts)


def _without_labels(
    frames: Mapping[str, Frame], reading: Reading, name: str, origin: str, notes: Iterable[str]
) -> Source:
    """Return a source whose train split has all rows of all splits, each with a name, in the order of the names.

    Labels in the table are kept, because a simulation may look at them. The test split is empty.
    """
    splits = list(frames.values())
    label = find_label(splits[0], reading, name)
    inputs = find_inputs(splits[0], reading, label, name)
    table = stack(splits, inputs, name)
    whole = complete_rows(table, inputs) if reading.missing == "skip" else np.arange(table.rows)
    if not len(whole):
        raise FedstillError(f"data.inputs: no row of {name} has a value in every column")
    table = table.take(whole)
    decoded = decode_inputs(table, inputs, reading, name)
    encoded = encode_columns(table, inputs, reading, name) if decoded is None else decoded
    names, order, new_notes = name_rows(frames, reading, used={*inputs, label})
    y, classes, truth = np.zeros(len(names), np.int64), tuple[str, ...](["unlabeled"]), ""
    if all(_has_labels(frame, label) for frame in splits):
        labels = stack(splits, [label], name)
        with contextlib.suppress(FedstillError):  # a column may be called so and hold something else
            y, classes = encode_labels(labels.columns[label], labels.names.get(label), label, name)
            truth = label
    readable = set(np.delete(whole, list(encoded.unreadable)).tolist())
    kept = np.array([row for row in order if row in readable], np.int64)
    train, test = (
        Dataset(
            name,
            as_tensor(encoded.x[np.searchsorted(whole, rows)]),
            as_tensor(y[rows]),
            classes,
            columns=encoded.columns,
            label=truth,
        )
        for rows in (kept, kept[:0])
    )
    return Source(
        train,
        test,
        notes=(*notes, *new_notes, *rule_notes(encoded.cells_by_rule, table.rows)),
        cells_by_rule=encoded.cells_by_rule,
        origin=origin,
        rows={"train": np.array([names[row] for row in kept], np.str_)},
        skipped=tuple(names[row] for row in order if row not in readable),
        texts=encoded.texts,
    )


def complete_rows(frame: Frame, names: Iterable[str]) -> np.ndarray:
    """Return the rows that have a value in each of these columns, as far as the frame has them."""
    complete = np.ones(frame.rows, bool)
    for name in names:
        if name in frame.columns:
            complete[missing_rows(frame.columns[name])] = False
    return np.flatnonzero(complete)


def may_name_rows(name: str, reading: Reading) -> bool:
    """Return whether a column's name is that of an id, and the column is neither input nor label by the options."""
    called_so = name.lower() in ID_NAMES or ID_OF_SOMETHING.fullmatch(name) is not None
    return called_so and name not in (*reading.inputs, reading.label)


def name_rows(
    frames: Mapping[str, Frame], reading: Reading, *, used: Collection[str]
) -> tuple[list[str], list[int], list[str]]:
    """Return (names of all rows, rows in the order of their names, notes).

    An id column whose values all differ names the rows, as it is written; 'id' comes before 'name' and 'patient_id'.
    Without an id column the rows are numbered. If an id column does not do, the numbers are written 'row/17', because
    '17' would look like an id.
    """
    columns = next(iter(frames.values())).columns
    candidates = [name for name in columns if may_name_rows(name, reading) and name not in used]
    rank = {name: place for place, name in enumerate(ID_NAMES)}
    notes = []
    for name in sorted(candidates, key=lambda name: rank.get(name.lower(), len(rank))):
        parts = [frame.columns.get(name) for frame in frames.values()]
        ids = [str(value) for part in parts if part is not None and part.dtype.kind in "iuO" for value in part.tolist()]
        empty = np.array([row for row, value in enumerate(ids) if not value.strip()], np.int64)
        if len(ids) < sum(frame.rows for frame in frames.values()):
            why_not = "it does not hold words or whole numbers in every split"
        elif len(empty):
            why_not = f"it has no value in {row_numbers(empty)}"
        elif max(map(len, ids)) > LONGEST_NAME:
            why_not = f"it holds a name of more than {LONGEST_NAME:,} letters"
        elif len(set(ids)) < len(ids):
            twice = min(word for word, count in Counter(ids).items() if count > 1)
            why_not = f"'{twice}' is in {row_numbers(np.flatnonzero(np.array(ids) == twice))}"
        else:
            order = sorted(range(len(ids)), key=ids.__getitem__)
            if all(value.isascii() and value.isdigit() for value in ids):  # whole numbers by size
                order.sort(key=lambda row: len(ids[row]))
            return ids, order, []
        notes.append(f"column '{name}' cannot name the rows: {why_not}")
    prefix = "row/" if notes else ""
    names = [
        f"{prefix if len(frames) == 1 else split + '/'}{row}"
        for split, frame in frames.items()
        for row in range(frame.rows)
    ]
    return names, list(range(len(names))), [f"{note}; they are called {names[0]} and so on" for note in notes]


def with_rows(frames: Mapping[str, Frame], where: str) -> dict[str, Frame]:
    """Return the splits that hold rows; at least one must. All columns of a split must have as many of them."""
    for split, frame in frames.items():
        rows = {name: len(column) for name, column in frame.columns.items()}
        if len(set(rows.values())) > 1:
            shown = ", ".join(f"{count:,} of '{name}'" for name, count in list(rows.items())[:SHOWN])
            raise FedstillError(f"data.source: the columns of {where} differ in their rows in '{split}': {shown}")
    filled = {split: frame for split, frame in frames.items() if frame.rows}
    if not filled:
        has_columns = any(frame.columns for frame in frames.values())
        lacking = "rows" if has_columns else "column of numbers, words or images"
        raise FedstillError(f"data.source: {where} has no {lacking}")
    return filled


def split_role(name: str) -> str | None:
    """Return 'train', 'test' or 'validation' for a split's name such as train_subset or val; None for other names."""
    roles = {"train": "train", "test": "test", "val": "validation", "dev": "validation"}
    for word in re.split(r"[-_. ]", name.lower()):
        for start, role in roles.items():
            if word.startswith(start):
                return role
    return None


def choose_splits(names: Iterable[str]) -> tuple[str, str | None, list[str]]:
    """Choose the shortest name of each role, validation in place of a missing test; return (train, test, notes)."""
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
    return train[0], test, notes


def find_label(frame: Frame, reading: Reading, where: str) -> str:
    """Return the label column: data.label, else the one with class names, else one called label, target, class or y.

    Without `reading.labelled` a table may have no label column; then the result is "".
    """
    plain = [name for name, column in frame.columns.items() if kind_of(column) in ("numbers", "words")]
    candidates = [name for name in plain if reading.labelled or name not in reading.inputs]
    if reading.label in candidates:
        return str(reading.label)
    if reading.labelled and reading.label is not None:
        raise FedstillError(
            f"data.label: {where} has no label column '{reading.label}'; {suggest(reading.label, candidates)}"
        )
    stated = [name for name in candidates if name in frame.names]
    called_so = [name for name in candidates if name.lower() in LABEL_NAMES]
    for names in (stated, called_so if reading.labelled or not stated else [], candidates if reading.labelled else []):
        if len(names) == 1:
            return names[0]
    if not reading.labelled:
        return ""
    listed = ", ".join(candidates) or "none"
    raise FedstillError(f"data.label: which column of {where} is the label? Set data.label; candidates: {listed}")


def _has_labels(frame: Frame, label: str) -> bool:
    """Return whether a split has labels: not if the column is absent or all -1, the hub's mark of a hidden label."""
    column = frame.columns.get(label)
    return column is not None and not (column.dtype.kind == "i" and bool((column == -1).all()))


def find_inputs(frame: Frame, reading: Reading, label: str, where: str) -> list[str]:
    """Return the input columns: the one image column, else the one array column, else all numbers and words."""
    if reading.text:
        return [find_text(frame, reading, label, where)]
    unknown = [name for name in reading.inputs if name not in frame.columns]
    if unknown:
        raise FedstillError(f"data.inputs: {where} has no column '{unknown[0]}'; {suggest(unknown[0], frame.columns)}")
    names = list(reading.inputs) or [n for n in frame.columns if n != label and n not in reading.keys]
    if reading.like:
        return names
    encoded = [name for name in names if kind_of(frame.columns[name]) == "images"]
    pictures = encoded or [name for name in names if frame.columns[name].ndim > 2]
    if len(pictures) > 1:
        raise FedstillError(
            f"data.inputs: {where} has several image columns ({', '.join(pictures)}); set data.inputs to one of them"
        )
    if not names:
        raise FedstillError(f"data.inputs: {where} has no column besides the label")
    if reading.fit is not None and not pictures:
        raise FedstillError(f"data.inputs: {where} holds no images, but the task's inputs are images")
    return pictures or names


def find_text(frame: Frame, reading: Reading, label: str, where: str) -> str:
    """Return the one column of text; a column that may name rows counts as text only where there is no other.

    Where another source gives the form (`reading.like`), the only column of text may have another name.
    """
    words = [name for name, column in frame.columns.items() if kind_of(column) == "words"]
    free = [name for name in words if name != label and name not in reading.keys]
    texts = [name for name in free if not may_name_rows(name, reading)] or free
    if TEXT_FILE in free:  # beside it stand names of folders
        texts = [TEXT_FILE]
    if len(reading.inputs) == 1 and reading.inputs[0] in free:
        return reading.inputs[0]
    if len(texts) == 1 and (reading.like or not reading.inputs):
        return texts[0]
    wrong = f", not {' and '.join(reading.inputs)}" if reading.inputs else ""
    hint = suggest(reading.inputs[0], free) if len(reading.inputs) == 1 and free else "set data.inputs to one of them"
    listed = f"{', '.join(texts)}; {hint}" if texts else f"none among {', '.join(frame.columns)}"
    raise FedstillError(f"data.inputs: fedstill reads one column of text of {where}{wrong}; it has {listed}")


def find_keys(frame: Frame, reading: Reading, *, label: str, inputs: list[str], name: str) -> dict[str, np.ndarray]:
    """Return the columns to partition by: data.keys, and beside images all other integers and short words."""
    plain = {n: column for n, column in frame.columns.items() if kind_of(column) in ("numbers", "words")}
    keys = {}
    for key in reading.keys:
        if key not in plain:
            raise FedstillError(f"data.keys: {name} has no key column '{key}'; {suggest(key, plain)}")
        check_owned(plain[key], key, name)
        if _longest(plain[key]) > LONGEST_NAME:
            raise FedstillError(f"data.keys: column '{key}' of {name} has a cell of more than {LONGEST_NAME:,} letters")
        keys[key] = plain[key].astype(np.str_) if plain[key].dtype == object else plain[key]
    first = frame.columns[inputs[0]]
    if kind_of(first) != "images" and first.ndim <= 2:
        return keys
    for key, column in plain.items():
        if key in (label, *inputs, *keys) or column.dtype.kind == "f":
            continue
        if _longest(column) <= MAX_KEY_LENGTH:
            keys[key] = column.astype(np.str_) if column.dtype == object else column
    return keys


def _longest(column: np.ndarray) -> int:
    """Return the letters of the longest word; as an array of numpy, every word takes as much room as the longest."""
    return max(map(len, set(column.tolist())), default=0) if column.dtype == object else 0


def decode_inputs(table: Frame, inputs: list[str], reading: Reading, where: str) -> Inputs | None:
    """Return images as uint8 (n, channels, h, w) and texts as row numbers; None where inputs are columns of a table."""
    name, first = inputs[0], table.columns[inputs[0]]
    if reading.text:
        texts, column = complete(first, name, where), InputColumn(name, 1, missing=reading.missing)
        return Inputs(np.arange(len(texts), dtype=np.int64)[:, None], (column,), texts=texts)
    shape = reading.fit or (None if reading.size is None else (reading.size, reading.size))
    if kind_of(first) == "images" and not reading.like:
        skip = not reading.labelled or reading.missing == "skip"
        images, unreadable = decode_images(first, where=where, shape=shape, skip=skip)
        return Inputs(images, unreadable=unreadable)
    if first.ndim > 2 and not reading.like:
        x = finite(storage_form(complete(first, name, where)), name, where)
        return Inputs(fit_images(as_tensor(x), *shape).numpy() if shape and x.ndim == 4 else x)
    return None


def encode_columns(
    table: Frame, inputs: list[str], reading: Reading, where: str, *, train: np.ndarray | None = None
) -> Inputs:
    """Return the columns of a table as float32 (n, features); the mistakes of all columns are reported together.

    train: the rows whose means fill cells without a value. Columns in `reading.like` are encoded as they were before.
    """
    like = {column.name: column for column in reading.like}
    parts: list[Encoded] = []
    mistakes: list[str] = []
    for name in inputs:
        with noting(mistakes):
            column, classes = table.columns[name], table.names.get(name)
            rules = like.get(name) or InputColumn(name, 0, missing=reading.missing, unknown=reading.unknown)
            parts.append(encode_column(column, classes, rules, where, train=train))
    if mistakes:
        raise FedstillError(*mistakes)
    counts = {
        "missing": {part.column.name: part.filled for part in parts if part.filled},
        "unknown": {part.column.name: part.unknown for part in parts if part.unknown},
    }
    columns = tuple(part.column for part in parts)
    x, first = np.empty((table.rows, sum(column.width for column in columns)), np.float32), 0
    while parts:  # each column is forgotten once it is copied, because a large table hardly fits into memory twice
        features = parts.pop(0).x
        x[:, first : first + features.shape[1]] = features
        first += features.shape[1]
    return Inputs(x, columns, cells_by_rule=counts)


def rule_notes(cells_by_rule: Mapping[str, Mapping[str, int]], rows: int) -> list[str]:
    """Say how many cells a rule decided, and in which columns of so many rows, a line for each rule."""
    actions = {
        "missing": "cells without a value are filled in (data.missing = 'mean')",
        "unknown": "cells hold a word that the train rows do not have and count as none (data.unknown = 'zeros')",
    }
    notes = []
    for rule, cells in cells_by_rule.items():
        if cells:
            shown = ", ".join(f"{name} {number}" for name, number in list(cells.items())[:SHOWN])
            more = f" and {len(cells) - SHOWN} more columns" if len(cells) > SHOWN else ""
            notes.append(f"{sum(cells.values())} {actions[rule]}: {shown}{more}")
            if whole := [name for name, number in cells.items() if number == rows > 1]:
                notes.append(f"no cell of column '{whole[0]}' could be used: is it written as in the train rows?")
    return notes


def encode_labels(
    column: np.ndarray, names: tuple[str, ...] | None, label: str, where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels as 0..K-1, and the classes: as the file names them, else the distinct values in order."""
    values = complete(column, label, where)
    if values.dtype.kind in "OU":
        words, codes = distinct_words(values)
        whole = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", word) for word in words)
        if not whole:
            return _checked_classes(words, codes, names, label, where)
        values = np.array(words, np.int64)[codes]
    if values.dtype.kind == "f":
        values = values.astype(np.float64)  # the limit does not fit into 16 bits
        if not np.array_equal(values, np.round(values)):
            raise FedstillError(f"data.label: column '{label}' of {where} holds fractions; a label is a class")
        if not (np.abs(values) < LARGEST_LABEL).all():
            raise FedstillError(f"data.label: column '{label}' of {where} holds numbers too large for a class")
        values = values.astype(np.int64)
    if names is not None:
        codes = values.astype(np.int64)
        outside = codes[(codes < 0) | (codes >= len(names))]
        if len(outside):
            raise FedstillError(f"data.label: label {outside[0]} of {where} is outside 0..{len(names) - 1}")
        return codes, names
    distinct, codes = np.unique(values, return_inverse=True)
    return _checked_classes([str(value) for value in distinct], codes.astype(np.int64), None, label, where)


def _checked_classes(
    words: list[str], codes: np.ndarray, names: tuple[str, ...] | None, label: str, where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    if names is not None:
        raise FedstillError(f"data.label: column '{label}' of {where} holds words; its class names belong to numbers")
    if len(words) == len(codes) > 20:
        raise FedstillError(f"data.label: column '{label}' of {where} differs in every row; a label is a class")
    return codes, tuple(words)


def in_these_classes(
    y: np.ndarray, classes: Sequence[str], agreed: Sequence[str], label: str, where: str
) -> np.ndarray:
    """Return labels y of some classes as numbers of the agreed classes; a class that is none of them is refused."""
    places = {name: place for place, name in enumerate(agreed)}
    present = np.unique(y)
    if strange := [classes[number] for number in present if classes[number] not in places]:
        rows = np.flatnonzero(np.isin(y, [number for number in present if classes[number] in strange]))
        shown = ", ".join(f"'{name}'" for name in strange[:SHOWN]) + (" and more" if len(strange) > SHOWN else "")
        raise FedstillError(
            f"data.classes: column '{label}' of {where} holds {shown} in {row_numbers(rows)}, and the agreed classes "
            f"are {', '.join(agreed[:20])}"
        )
    numbers: np.ndarray = np.array([places.get(name, -1) for name in classes], np.int64)[y]
    return numbers


def distinct_words(column: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the different words in order, and for each cell the place of its word."""
    cells = column.tolist()
    words = sorted(set(cells))
    places = {word: place for place, word in enumerate(words)}
    return words, np.fromiter((places[cell] for cell in cells), np.int64, len(cells))


def storage_form(x: np.ndarray) -> np.ndarray:
    """Return an array in storage form: 3-d is grey images, 4-d images with channels first or last; bytes stay bytes."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim > 2 and x.dtype.kind in "iu" and x.min(initial=0) >= 0 and x.max(initial=0) <= 255:
        return np.ascontiguousarray(x, dtype=np.uint8)
    with np.errstate(over="ignore"):  # reported as not finite
        return np.ascontiguousarray(x.reshape(len(x), -1) if x.ndim == 1 else x, dtype=np.float32)


def encode_column(
    column: np.ndarray,
    names: tuple[str, ...] | None,
    rules: InputColumn,
    where: str,
    *,
    train: np.ndarray | None = None,
) -> Encoded:
    """Return a column as float32 features: (n, 1) of numbers, (n, d) of vectors, one-hot (n, words) of words.

    rules: the rules for cells without a value and for new words; of width 0 if nothing is fitted yet, else the column
    as another source has it, which gives the words and their order, the fill value and the number of features.
    names: the words of a column of whole numbers. train: the rows that a fill value is fitted on.
    """
    name, fitted = rules.name, rules.width > 0
    if kind_of(column) == "images":
        raise FedstillError(f"data.inputs: column '{name}' of {where} holds images, the task's does not")
    if kind_of(column) != "numbers":
        names = None  # a file that says so of words or arrays is wrong
    if names is not None:
        stated = (column >= 0) & (column < len(names))
        column = np.array([*names, ""], dtype=object)[np.where(stated, column, len(names)).astype(np.int64)]
    gaps = missing_rows(column)
    if rules.missing != "mean" or column.ndim > 1:
        complete(column, name, where, hint="" if fitted else ", or set data.missing")
    if column.dtype == object and names is None and not rules.words:
        column = _numbers_if_meant(column, gaps, name, where, wanted=fitted)
    if column.dtype == object or rules.words:
        values = column.copy() if column.dtype == object else column.astype(np.str_).astype(object)
        values[gaps] = MISSING_WORD
        return _one_hot(values, rules, where)._replace(filled=len(gaps))
    if not fitted and rules.missing == "mean" and column.ndim == 1:
        rows = np.arange(len(column)) if train is None else train
        known = rows[~np.isin(rows, gaps)] if len(gaps) else rows
        with np.errstate(over="ignore", invalid="ignore"):  # such numbers are refused below
            fill = float(column[known].mean(dtype=np.float64)) if len(known) else 0.0
        rules = rules._replace(fill=fill, flag=len(known) < len(rows))
    numbers = storage_form(column)
    if len(gaps):
        numbers[gaps] = rules.fill
    numbers = finite(numbers, name, where)
    if fitted and numbers.shape[1:] != (rules.width - rules.flag,):
        raise FedstillError(
            f"data.inputs: column '{name}' of {where} holds samples of shape {numbers.shape[1:]}, "
            f"the task's of {(rules.width - rules.flag,)}"
        )
    if rules.flag:
        flags = np.zeros((len(numbers), 1), np.float32)
        flags[gaps] = 1.0
        numbers = np.concatenate([numbers, flags], axis=1)
    return Encoded(numbers, rules._replace(width=numbers.shape[1]), filled=len(gaps))


def _one_hot(values: np.ndarray, rules: InputColumn, where: str) -> Encoded:
    """Return one feature for each word; a word that the fitted column does not have follows its rule."""
    name, (words, codes) = rules.name, distinct_words(values)
    if not rules.words:
        if len(words) > MAX_WORDS:
            raise FedstillError(
                f"data.inputs: column '{name}' of {where} holds {len(words)} different words, more than {MAX_WORDS}: "
                "to read it as text set data.tokens, else leave it out with data.drop, or partition by it (data.keys)"
            )
        return Encoded(
            np.eye(len(words), dtype=np.float32)[codes], rules._replace(width=len(words), words=tuple(words))
        )
    places = {word: place for place, word in enumerate(rules.words)}
    fitted = np.array([places.get(word, -1) for word in words], np.int64)[codes]  # -1: a new word
    strange = np.flatnonzero(fitted < 0)
    if len(strange) and rules.unknown == "refuse":
        raise FedstillError(
            f"data.inputs: column '{name}' of {where} holds '{values[strange[0]]}' in {row_numbers(strange)}, "
            f"a word that is not among the task's: {', '.join(rules.words[:20])}"
        )
    x = np.eye(len(places), dtype=np.float32)[fitted]
    x[strange] = 0.0
    return Encoded(x, rules, unknown=len(strange))


def _numbers_if_meant(column: np.ndarray, gaps: np.ndarray, name: str, where: str, *, wanted: bool) -> np.ndarray:
    """Return words as they are, or as numbers where these are wanted.

    A few words among numbers are refused, because a mistyped cell would turn a column of numbers into one of words.
    """
    cells = column.tolist()
    no_numbers = {word for word in set(cells) if not is_number(word)}
    odd = np.setdiff1d(np.flatnonzero([word in no_numbers for word in cells]), gaps)
    if len(odd) and (wanted or len(odd) <= MAX_ODD_SHARE * (len(column) - len(gaps))):
        shown = textwrap.shorten(column[odd[0]], 60, placeholder="...")
        raise FedstillError(
            f"data.inputs: column '{name}' of {where} must hold numbers{', as the task does,' if wanted else ''} but "
            f"holds '{shown}' in {row_numbers(odd)}; correct such cells or drop their rows, or leave the column out "
            "with data.drop; if it holds codes, write each as a word (c5 for 5)"
        )
    if not wanted:
        return column
    column = column.copy()
    column[gaps] = "nan"
    return np.array([float(cell) for cell in column.tolist()], np.float64)


def is_number(word: str) -> bool:
    """Return whether a word is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def finite(numbers: np.ndarray, name: str, where: str) -> np.ndarray:
    """Return the numbers, and refuse numbers that do not fit in a float32."""
    if numbers.dtype == np.uint8:
        return numbers
    infinite = np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(1))
    if len(infinite):
        raise FedstillError(f"data.source: column '{name}' of {where} is not finite in {row_numbers(infinite)}")
    return numbers


def complete(column: np.ndarray, name: str, where: str, *, hint: str = "") -> np.ndarray:
    """Return the column, and refuse missing values; a cell of spaces is missing."""
    missing = missing_rows(column)
    if len(missing):
        raise FedstillError(
            f"data.source: column '{name}' of {where} has no value in {row_numbers(missing)}; fill or drop them{hint}"
        )
    return column
