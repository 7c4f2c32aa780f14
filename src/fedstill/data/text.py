"""Read text as windows of characters and the character that follows (LEAF's Shakespeare), or whole, as a list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset
from fedstill.data.bounds import check_lines
from fedstill.data.source import Reading, Source, as_tensor, first_line
from fedstill.data.tables import Frame, choose_splits, find_keys, find_text, with_rows, without_columns

# LEAF's 80 characters in its order (models/utils/language_utils.py); id 80 is any other character.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
CLASSES = ("newline", "space", *LETTERS[2:], "other")
_IDS = np.full(129, len(LETTERS), np.uint8)
_IDS[[ord(letter) for letter in LETTERS]] = range(len(LETTERS))


class Windows(NamedTuple):
    """Windows of texts, the character that follows each, and the text it is from."""

    x: np.ndarray  # (n, window) uint8 ids
    y: np.ndarray  # (n,) int64 id of the character that follows
    owner: np.ndarray  # (n,) int64 which text


def encode(text: str) -> np.ndarray:
    """Return the ids (characters,) of a text as uint8; white space of any kind and length is one space, as in LEAF.

    >>> encode("a  b\\né").tolist()
    [53, 1, 54, 1, 80]
    """
    points = np.frombuffer(re.sub(r"\s+", " ", text).strip().encode("utf-32-le", "replace"), np.uint32)
    return _IDS[np.minimum(points, 128)]


def cut_windows(texts: Sequence[np.ndarray], window: int, *, held_out: float) -> tuple[Windows, Windows]:
    """Cut every text into windows, one at each character, and return (train, test).

    The last share `held_out` of a text's windows is the test part, without its first window - 1, because these read
    characters that train windows read (LEAF's split by sample). A text of at most `window` characters gives no window.
    """
    train, test = [], []
    for owner, ids in enumerate(texts):
        if len(ids) <= window:
            continue
        views = np.lib.stride_tricks.sliding_window_view(ids, window + 1)
        kept = max(1, int((1.0 - held_out) * len(views) + 1e-9)) if held_out else len(views)
        train.append((owner, views[:kept]))
        test.append((owner, views[kept + window - 1 :]))
    return _joined(train, window), _joined(test, window)


def _joined(parts: list[tuple[int, np.ndarray]], window: int) -> Windows:
    none = np.zeros((0, window + 1), np.uint8)
    views = [view for _, view in parts] or [none]
    sizes = [len(view) for view in views]
    return Windows(
        np.concatenate([view[:, :-1] for view in views]),
        np.concatenate([view[:, -1] for view in views]).astype(np.int64),
        np.repeat(np.array([owner for owner, _ in parts] or [0], np.int64), sizes),
    )


def text_source(
    frames: Mapping[str, Frame], reading: Reading, *, name: str, origin: str, notes: Iterable[str] = ()
) -> Source:
    """Make a Source of windows from a table with a column of text; the texts of one owner (its keys) follow each other.

    Keys are numbers, in the order of their values, because a name for each of four million windows takes a gigabyte.
    """
    assert reading.window is not None
    frames = without_columns(with_rows(frames, name), reading, name)
    train_name, test_name, new_notes = choose_splits(frames)
    if reading.label is not None:
        raise FedstillError("data.label: with data.window the label is the next character; remove one of the two")
    column = find_text(frames[train_name], reading, "", name)
    texts, owners, keys = _texts(frames[train_name], column, reading, name)
    held_out = reading.held_out if test_name is None else 0.0
    train, test = cut_windows(texts, reading.window, held_out=held_out)
    if test_name is not None:
        test = cut_windows(_texts(frames[test_name], column, reading, name)[0], reading.window, held_out=0.0)[0]
    for part, use in ((train, "to train on"), (test, "to test on")):
        if not len(part.y):
            raise FedstillError(
                f"data.window = {reading.window}: no text of {name} is long enough for a window {use}; lower it"
            )
    short = owners - len(np.unique(train.owner))
    if short:
        new_notes.append(f"{short} of {owners} texts have no more than {reading.window} characters and are left out")
    if test_name is None:
        new_notes.append(f"{name} has no test split: the last windows of every text are held out ({len(test.y)})")
    data = [Dataset(name, as_tensor(part.x), as_tensor(part.y), CLASSES) for part in (train, test)]
    codes = {key: values[train.owner] for key, values in keys.items()}
    return Source(data[0], data[1], codes, (*notes, *new_notes), origin)


def _texts(
    frame: Frame, column: str, reading: Reading, name: str
) -> tuple[list[np.ndarray], int, dict[str, np.ndarray]]:
    """Return the text of each owner, the number of owners, and their keys; without keys every row is an owner."""
    if column not in frame.columns:
        raise FedstillError(f"data.source: column '{column}' of {name} is missing in one of its splits")
    named = find_keys(frame, reading, label=column, inputs=[column], name=name)
    codes = {key: np.unique(values, return_inverse=True)[1] for key, values in named.items()}
    table = np.stack(list(codes.values()), 1) if codes else np.arange(frame.rows)[:, None]
    distinct, owner = np.unique(table, axis=0, return_inverse=True)
    pieces: list[list[str]] = [[] for _ in distinct]
    for row, text in zip(owner.reshape(-1).tolist(), frame.columns[column], strict=True):
        pieces[row].append(str(text))
    keys = {key: distinct[:, i].astype(np.int32) for i, key in enumerate(codes)}
    return [encode(" ".join(piece)) for piece in pieces], len(distinct), keys


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file that are not empty, with single spaces."""
    check_lines(file)
    try:
        lines = [" ".join(line.split()) for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise FedstillError(f"data.source: '{file}' is not UTF-8 text ({first_line(error)})") from error
    texts = [line for line in lines if line]
    if not texts:
        raise FedstillError(f"data.source: '{file}' holds no text")
    return texts


def in_one_list(source: Source, other: Source) -> tuple[Source, Source]:
    """Return both sources with one common list of their texts; sources without texts come back as they are."""
    if source.texts is None or other.texts is None:
        return source, other
    texts, first = np.concatenate([source.texts, other.texts]), len(source.texts)
    moved = (replace(part, x=part.x + first) for part in (other.train, other.test))
    return source._replace(texts=texts), other._replace(train=next(moved), test=next(moved), texts=texts)


def pack(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes, end of each text), a form of texts that can be stored without pickle."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts.tolist()]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def unpack(blob: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the texts from the two arrays of `pack`."""
    whole, stops = blob.tobytes(), ends.tolist()
    texts = np.empty(len(stops), object)
    for row, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        texts[row] = whole[start:stop].decode("utf-8", "surrogatepass")
    return texts
