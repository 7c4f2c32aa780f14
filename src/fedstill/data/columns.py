"""Columns as arrays: labels as 0..K-1, numbers and words as features, and complaints about values that are missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.data.cells import check_numbers, distinct_words, missing_rows, row_numbers, tell_words
from fedstill.data.source import InputColumn

MAX_WORDS = 100  # different words in a column that is still one-hot encoded

Column = np.ndarray | list[bytes | Path]  # numbers, words (object array of str), or encoded images


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
