"""Whole texts before they are tokens: which column holds them, and samples as rows of one list of texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedstill.core.errors import FedstillError, suggest
from fedstill.data.columns import Column, complete
from fedstill.data.source import Reading, Source, first_line


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


def read_lines(file: Path) -> list[str]:
    """Lines of a text file that hold something, with single spaces."""
    try:
        lines = [" ".join(line.split()) for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise FedstillError(f"data.source: '{file}' is not UTF-8 text ({first_line(error)})") from error
    found = [line for line in lines if line]
    if not found:
        raise FedstillError(f"data.source: '{file}' holds no text")
    return found


def in_one_list(source: Source, other: Source) -> tuple[Source, Source]:
    """Both with the texts of both; sources that hold no texts come back as they are."""
    if source.texts is None or other.texts is None:
        return source, other
    texts, first = np.concatenate([source.texts, other.texts]), len(source.texts)
    moved = (replace(part, x=part.x + first) for part in (other.train, other.test))
    return source._replace(texts=texts), other._replace(train=next(moved), test=next(moved), texts=texts)


def pack(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, where each text ends): a form that can be stored without pickle."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts.tolist()]
    ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), ends


def unpack(blob: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """What `pack` was given."""
    whole, stops = blob.tobytes(), ends.tolist()
    texts = np.empty(len(stops), object)
    for row, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        texts[row] = whole[start:stop].decode("utf-8", "surrogatepass")
    return texts
