"""Single cells of a table: which hold nothing, which are words among numbers, and how people are told of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedstill.core.errors import FedstillError

MIN_NUMBERS = 10  # so few cells tell nothing about the others
MAX_ODD_SHARE = 0.1  # words among numbers: with more of them it is a column of words
MAX_CODES = 20  # different numbers in a column that may hold codes


class OddCells(NamedTuple):
    """The cells of a column of numbers that are none."""

    rows: np.ndarray
    told: str  # the first of them, and how many more there are
    numbers: int  # the other cells
    codes: bool  # they may be meant: '1', '2', '3' and 'A' are codes


def missing_rows(column: np.ndarray) -> np.ndarray:
    """Rows without a value: NaN, or nothing but spaces."""
    if column.dtype.kind in "OU":
        return np.flatnonzero([isinstance(value, str) and not value.strip() for value in column.tolist()])
    if column.dtype.kind == "f":
        return np.flatnonzero(np.isnan(column).reshape(len(column), -1).any(1))
    return np.zeros(0, np.int64)


def check_owned(column: np.ndarray, key: str, where: str, *, rows: np.ndarray | None = None) -> None:
    """Refuse rows without an owner, which would all become one client; `rows` are their numbers in the file."""
    missing = missing_rows(column)
    if len(missing):
        told = row_numbers(missing if rows is None else rows[missing])
        raise FedstillError(
            f"data.keys: key column '{key}' of {where} has no value in {told}: nobody owns these rows; "
            "fill in their owner or drop them"
        )


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


def row_numbers(index: np.ndarray) -> str:
    """Some rows for people, who count from 1."""
    shown = ", ".join(str(row + 1) for row in index[:5])
    more = f" and {len(index) - 5} more" if len(index) > 5 else ""
    return f"row {shown}{more} (counted from 1)"


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
