"""Source, the dataset that every loader returns; Reading, the options of loaders; normalisation and held-out rows."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.core.data import InputColumn
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Dataset

# (mean, std) per channel of the full training splits, as the papers' code states them.
KNOWN_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashionmnist": ((0.2860,), (0.3530,)),
    "fashionmini": ((0.2860,), (0.3530,)),
}


STATISTICS_AT_ONCE = 8_000_000  # numbers whose variance is computed at once
LARGEST_SIDE = 7071  # of an image after data.size: an image of a file has no more pixels either (images.MOST_PIXELS)
RULES = {"missing": ("refuse", "mean", "skip"), "unknown": ("refuse", "zeros")}  # the values of these keys


class Unlabeled(NamedTuple):
    """Samples without labels that the server holds: rows in the task's storage form, each with a name."""

    x: Tensor  # (M, ...)
    ids: tuple[str, ...]  # M different names: a file, a row of a table, a row of train or test
    truth: Tensor | None = None  # (M,) labels, where somebody knows them; no method sees them
    skipped: tuple[str, ...] = ()  # names of files and rows that could not be read
    notes: tuple[str, ...] = ()  # decisions made while reading, for people


class Source(NamedTuple):
    """A dataset before it is shared out: disjoint train and test rows of one shape."""

    train: Dataset
    test: Dataset
    keys: Mapping[str, np.ndarray] = MappingProxyType({})  # columns of the train rows to partition by: user, play, ...
    notes: tuple[str, ...] = ()  # decisions made while reading, for people
    origin: str = ""  # where it came from: equal origins hold the same samples
    rows: Mapping[str, np.ndarray] = MappingProxyType({})  # split -> names or file numbers of its rows; else 0, 1, ..
    skipped: tuple[str, ...] = ()  # samples that could not be read; only of sources read without labels
    central: Unlabeled | None = None  # rows of neither the clients nor the test set (see split.central_pool)
    texts: np.ndarray | None = None  # of str: samples that are not tokens yet; x (n, 1) are rows of it
    scale: str = "train"  # the samples whose mean and deviation scale the inputs (see `scale_inputs`)
    built_from: str = ""  # the settings that it was read by, as JSON; empty: somebody made it in Python
    public_facts: tuple[str, ...] = ()  # facts about the clients' texts that a tokenizer gives away
    cells_by_rule: Mapping[str, Mapping[str, int]] = MappingProxyType({})  # "missing", "unknown": cells by column

    def __repr__(self) -> str:
        keys = f", keys {', '.join(self.keys)}" if self.keys else ""
        return f"Source({self.train!r}, {len(self.test.x):,} for the test{keys})"


@dataclass(frozen=True)
class Reading:
    """The options by which a source is read; they are a part of the name of its cache entry."""

    label: str | None = None  # label column; None: type and name decide
    inputs: Sequence[str] = ()  # input columns; (): every column that is neither label nor key
    keys: Sequence[str] = ()  # columns kept as keys and left out of the inputs
    size: int | None = None  # resize images to size x size
    held_out: float = 0.2  # share of the rows that become the test split where a source has none; 0: none
    seed: int = 0  # of that choice
    labelled: bool = True  # False: all rows of all splits, labels not asked for
    like: tuple[InputColumn, ...] = ()  # encode the columns of a table as another source's are
    like_classes: Sequence[str] = ()  # number the classes so, and refuse any other; (): the classes that are there
    fit: tuple[int, int] | None = None  # images only, brought to this height and width
    window: int | None = None  # characters of text from which the next one is predicted
    text: bool = False  # one column of text, each sample the whole text (see tokens.py)
    drop: Sequence[str] = ()  # columns to leave out, whatever they hold
    missing: str = "refuse"  # a cell without a value, a broken image: "refuse", "skip" its row, or fill in the "mean"
    unknown: str = (
        "refuse"  # a word that the train rows do not have: "refuse", or "zeros" in all features of its column
    )

    def __post_init__(self) -> None:
        for name in ("inputs", "keys", "drop", "like_classes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("size", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise FedstillError(f"data.{name} = {value} is too small; use 1 or more")
        if self.size is not None and self.size > LARGEST_SIDE:
            raise FedstillError(f"data.size = {self.size} is too large; use {LARGEST_SIDE:,} or less")
        for name, rules in RULES.items():
            if (rule := getattr(self, name)) not in rules:
                raise FedstillError(f"data.{name} = '{rule}' is unknown: {suggest(rule, rules)}")
        if self.window is not None and self.text:
            raise FedstillError("window and text both say how text is read: use one of them")


def owners(source: Source, *columns: str) -> np.ndarray:
    """Return the owner (n,) of each train row by one key column or several ('play / role', or a number)."""
    for column in columns:
        if column not in source.keys:
            hint = suggest(column, source.keys) if source.keys else "it has none; name it in data.keys"
            raise FedstillError(f"data.keys: {source.train.name} has no key column '{column}'; {hint}")
        check_owned(source.keys[column], column, source.train.name, rows=source.rows.get("train"))
    if len(columns) == 1:
        return source.keys[columns[0]]
    values = [source.keys[column] for column in columns]
    if all(column.dtype.kind in "iu" for column in values):
        numbers = np.zeros(len(values[0]), np.int64)  # numbers, because names would take far longer
        for key in values:
            distinct, codes = np.unique(key, return_inverse=True)
            numbers = np.unique(numbers * len(distinct) + codes, return_inverse=True)[1]
        return numbers
    return np.array([" / ".join(map(str, row)) for row in zip(*values, strict=True)])


def row_ids(source: Source, split: str) -> tuple[str, ...]:
    """Return a name for each row of 'train' or 'test' that no split changes: 'train/17' is row 17 of the train file."""
    known = source.rows.get(split)
    if known is not None and known.dtype.kind == "U":
        return tuple(known.tolist())
    count = len(source.train.y if split == "train" else source.test.y)
    return tuple(f"{split}/{row}" for row in (range(count) if known is None else known.tolist()))


def keep_rows(source: Source, split: str, rows: np.ndarray) -> Source:
    """Return the source with only these rows of 'train' or 'test', in this order."""
    dataset = source.train if split == "train" else source.test
    index = torch.from_numpy(rows)
    kept = replace(dataset, x=dataset.x[index], y=dataset.y[index])
    names = {**source.rows, split: source.rows[split][rows] if split in source.rows else rows}
    if split == "test":
        return source._replace(test=kept, rows=names)
    return source._replace(train=kept, rows=names, keys={key: values[rows] for key, values in source.keys.items()})


def require_extra(module: str, *, extra: str = "data") -> Any:
    """Import an optional package and return it; the error names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise FedstillError(f"{package} is not installed; run: pip install 'fedstill[{extra}]'") from error


def stratified_holdout(y: np.ndarray, fraction: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Hold out round(fraction * n) rows, each class within one row of its share; return sorted rows (kept, held out).

    Rows that rounding down leaves over are taken from the classes with the largest remainders, and from a class that
    would vanish only if no other is left.
    """
    count = len(y)
    if count < 2 or not 0.0 < fraction < 1.0:
        raise FedstillError(f"data: cannot hold out {fraction} of {count} rows; give a test split")
    wanted = min(max(1, round(fraction * count)), count - 1)
    shuffled = numpy_generator(seed_for(seed, "holdout")).permutation(count)
    by_class = shuffled[np.argsort(y[shuffled], kind="stable")]
    _, starts, sizes = np.unique(y[by_class], return_index=True, return_counts=True)
    quota = sizes * (wanted / count)
    take = np.floor(quota + 1e-9).astype(np.int64)
    order = np.lexsort((take - quota, take + 1 >= sizes))
    take[order[: wanted - take.sum()]] += 1
    held_out = np.arange(count) - np.repeat(starts, sizes) < np.repeat(take, sizes)
    return np.sort(by_class[~held_out]), np.sort(by_class[held_out])


def published_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return (mean, std) of a well-known set, however its name is written; None for other sets."""
    return KNOWN_STATISTICS.get(re.sub(r"[^a-z0-9]", "", name.lower()))


def statistics(x: np.ndarray, name: str = "") -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) per channel or feature, on the engine's scale (uint8 / 255); a constant feature has std 1."""
    known = published_statistics(name)
    if known and x.dtype == np.uint8 and x.shape[1] == len(known[0]):
        return known
    if x.dtype == np.uint8:
        counts, levels = np.zeros((x.shape[1], 256), np.int64), np.arange(256) / 255.0
        for start in range(0, len(x), 4096):  # in slices, because bincount makes an int64 copy
            for channel in range(x.shape[1]):
                counts[channel] += np.bincount(x[start : start + 4096, channel].reshape(-1), minlength=256)
        mean = counts @ levels / counts.sum(1)
        variance = (counts * (levels - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    else:
        others = tuple(axis for axis in range(x.ndim) if axis != 1)
        width = max(1, STATISTICS_AT_ONCE * x.shape[1] // max(1, x.size))  # `var` makes a float64 copy
        parts = [x[:, first : first + width] for first in range(0, max(1, x.shape[1]), width)]
        mean = np.concatenate([part.mean(axis=others, dtype=np.float64) for part in parts])
        variance = np.concatenate([part.var(axis=others, dtype=np.float64) for part in parts])
    spread = np.sqrt(variance)
    constant = spread <= 1e-7 * np.maximum(1.0, np.abs(mean))  # float32 rounding leaves a trace of variance
    return tuple(mean.tolist()), tuple(np.where(constant, 1.0, spread).tolist())


def as_array(values: Any) -> np.ndarray:
    """Return a tensor of any device, an array or a list as an array."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor that shares memory with a writable contiguous array; any other array is copied."""
    writeable = array if array.flags.writeable and array.flags.c_contiguous else array.copy(order="C")
    return torch.from_numpy(writeable)


def first_line(error: BaseException) -> str:
    """Return the message of an exception as one short line."""
    text = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def missing_rows(column: np.ndarray) -> np.ndarray:
    """Return the rows without a value: NaN, or nothing but spaces."""
    if column.dtype.kind in "OU":
        values = column.tolist()
        empty = {value for value in set(values) if isinstance(value, str) and not value.strip()}
        return np.flatnonzero([value in empty for value in values]) if empty else np.zeros(0, np.int64)
    if column.dtype.kind == "f":
        return np.flatnonzero(np.isnan(column).reshape(len(column), -1).any(1))
    return np.zeros(0, np.int64)


def check_owned(column: np.ndarray, key: str, where: str, *, rows: np.ndarray | None = None) -> None:
    """Refuse rows without an owner, because they would all become one client; `rows` are the file's row numbers."""
    missing = missing_rows(column)
    if len(missing):
        numbers = row_numbers(missing if rows is None else rows[missing])
        raise FedstillError(
            f"data.keys: key column '{key}' of {where} has no value in {numbers}: nobody owns these rows; "
            "fill in their owner or drop them"
        )


def row_numbers(index: np.ndarray) -> str:
    """Return some rows in words, counted from 1."""
    shown = ", ".join(str(row + 1) for row in index[:5])
    more = f" and {len(index) - 5} more" if len(index) > 5 else ""
    return f"row {shown}{more} (counted from 1)"
