"""The contract of a run with its data: how inputs are read, which classes there are, and which rows it began with.

A run writes its contract before its first round. Later commands read new data by it and never fit anything again, so
the training files may change, move or vanish. `differences` names everything in which data are not as they were.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedstill.core.data import InputColumn, Tokenizer
from fedstill.core.errors import FedstillError
from fedstill.core.limits import SECTION, Count, Number, Positive
from fedstill.core.types import Dataset, Federation
from fedstill.data.tokens import opened

FORMAT = 1  # raise it when a contract says something else in the same words
DIGEST_BYTES = 16
AT_ONCE = 4096  # rows
MIXER = np.uint64(0x9E3779B97F4A7C15)
DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32)}
SHOWN = 3  # names of a kind in one line
MOST = 2**24  # numbers in one sample, or clients: a file that asks for more was damaged, or is to fill the memory


@dataclass(frozen=True)
class Rows:
    """Fingerprints of some rows."""

    count: int
    inputs: str
    labels: str  # empty where they have none
    in_any_order: str  # of inputs and labels together, whatever the order of the rows
    classes: tuple[int, ...] = ()  # how many rows of each class


NO_ROWS = Rows(0, "", "", "")  # of rows about which nothing is said
OF_CLIENTS = ("train", "client_test")


@dataclass(frozen=True)
class Contract:
    """All that a run fixed about its data.

    data: how samples are read and what they mean, without any row.
    rows: fingerprints of the clients' rows ("train"), of "test", and of "validation", "client_test" and "unlabeled"
        where there are.
    owners: a fingerprint of which client holds which rows, and of the clients' names.
    """

    data: Dataset
    rows: Mapping[str, Rows]
    owners: str
    population: int

    def __repr__(self) -> str:
        counts = ", ".join(f"{rows.count} {part} rows" for part, rows in self.rows.items())
        return f"Contract('{self.data.name}': {counts} of {self.population} clients, {len(self.data.classes)} classes)"


def contract_of(federation: Federation, secret: bytes = b"") -> Contract:
    """The contract of a run that begins with this federation.

    secret: fingerprints of what clients hold are made with it, and nothing else is said of it, so that a reader cannot
    compare them with those of other data.
    """
    train, test = federation.train, federation.test
    rows = {"train": rows_of(train.x, train.y, train.classes), "test": rows_of(test.x, test.y, train.classes)}
    if federation.validation is not None:
        rows["validation"] = rows_of(*federation.validation, train.classes)
    split = [federation.indices.numpy(), federation.offsets.numpy()]
    if federation.names:
        split.append(np.array(federation.names))
    if federation.client_test is not None:
        held, offsets = federation.client_test
        rows["client_test"] = rows_of(train.x[held], train.y[held], train.classes)
        split.append(offsets.numpy())
    if federation.unlabeled is not None:
        rows["unlabeled"] = rows_of(federation.unlabeled)
    owners = _digest(*split)
    if secret:
        keyed = {part: replace(NO_ROWS, inputs=_keyed(secret, rows[part])) for part in OF_CLIENTS if part in rows}
        rows, owners = {**rows, **keyed}, _keyed(secret, owners)
    return Contract(without_rows(train), rows, owners, federation.population)


def _keyed(secret: bytes, content: object) -> str:
    return hashlib.blake2b(repr(content).encode(), key=secret, digest_size=DIGEST_BYTES).hexdigest()


def without_rows(data: Dataset) -> Dataset:
    """The same task with no sample."""
    return replace(data, x=data.x[:0].clone(), y=data.y[:0].clone())


def federation_without_rows(contract: Contract) -> Federation:
    """A federation of as many clients, none of which holds a row: networks and engines are built for it."""
    nobody = torch.zeros(contract.population + 1, dtype=torch.int64)
    return Federation(contract.data, contract.data, nobody[:0], nobody)


@dataclass(frozen=True)
class _Sample:
    """The form of one sample."""

    __pydantic_config__ = SECTION
    shape: tuple[Count, ...]
    dtype: str


@dataclass(frozen=True)
class _Written:
    """A contract as JSON holds it."""

    __pydantic_config__ = SECTION
    format: int
    name: str
    sample: _Sample
    classes: tuple[str, ...]
    label: str
    mean: tuple[Number, ...]
    std: tuple[Positive, ...]
    columns: tuple[InputColumn, ...]
    tokenizer: Tokenizer | None
    rows: dict[str, Rows]
    owners: str
    population: Count


@cache
def _written() -> TypeAdapter[_Written]:
    return TypeAdapter(_Written)


def rows_of(x: Tensor, y: Tensor | None = None, classes: tuple[str, ...] = ()) -> Rows:
    """The fingerprints of some rows, with or without labels."""
    inputs = x.cpu().numpy()
    labels = np.zeros(len(inputs), np.int64) if y is None else y.cpu().numpy()
    counts = () if y is None else tuple(np.bincount(labels, minlength=len(classes)).tolist())
    of_labels = "" if y is None else _digest(labels)
    return Rows(len(inputs), _digest(inputs), of_labels, _unordered(inputs, labels), counts)


def _unordered(inputs: np.ndarray, labels: np.ndarray) -> str:
    """A sum over rows of one mixed number a row, modulo 2^64."""
    total = np.zeros(1, np.uint64)
    for first in range(0, len(inputs), AT_ONCE):
        rows = np.ascontiguousarray(inputs[first : first + AT_ONCE]).reshape(len(inputs[first : first + AT_ONCE]), -1)
        codes = rows.view(np.uint8).astype(np.uint64)
        factors = np.random.Generator(np.random.PCG64(codes.shape[1])).integers(1, 2**63, codes.shape[1], np.uint64)
        mixed = codes @ (2 * factors + 1) + labels[first : first + AT_ONCE].astype(np.uint64) * MIXER
        mixed = (mixed ^ (mixed >> np.uint64(31))) * MIXER  # without it a sum of sums would not tell rows apart
        total += (mixed ^ (mixed >> np.uint64(29))).sum(dtype=np.uint64)
    return f"{int(total[0]):016x}"


def _digest(*arrays: np.ndarray) -> str:
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for array in arrays:
        hashed.update(f"{array.dtype} {array.shape} ".encode())
        hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()


def as_json(contract: Contract) -> dict[str, Any]:
    """The contract as JSON holds it. Python writes a float so that it reads the same bits again."""
    data = contract.data
    tokenizer = None if data.tokenizer is None else asdict(data.tokenizer)
    return {
        "format": FORMAT,
        "name": data.name,
        "sample": {"shape": list(data.x.shape[1:]), "dtype": str(data.x.dtype)},
        "classes": list(data.classes),
        "label": data.label,
        "mean": list(data.mean),
        "std": list(data.std),
        "columns": [column._asdict() for column in data.columns],
        "tokenizer": tokenizer,
        "rows": {part: asdict(rows) for part, rows in contract.rows.items()},
        "owners": contract.owners,
        "population": contract.population,
    }


def from_json(tree: Mapping[str, Any], *, where: str) -> Contract:
    """The contract that JSON holds; one of another version, and one that contradicts itself, is refused."""
    try:
        if tree["format"] != FORMAT:
            raise FedstillError(f"{where}: written by another version of fedstill: run the experiment again")
        written = _written().validate_json(json.dumps(tree), strict=True)
        if contradiction := next(_contradictions(written), None):
            raise FedstillError(f"{where}: this is no contract of a run ({contradiction})")
        data = Dataset(
            written.name,
            torch.zeros(0, *written.sample.shape, dtype=DTYPES[written.sample.dtype]),
            torch.zeros(0, dtype=torch.int64),
            written.classes,
            mean=written.mean,
            std=written.std,
            tokenizer=written.tokenizer,
            columns=written.columns,
            label=written.label,
        )
        return Contract(data, written.rows, written.owners, written.population)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise FedstillError(f"{where}: this is no contract of a run ({place}: {first['msg'].lower()})") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FedstillError(f"{where}: this is no contract of a run ({type(error).__name__}: {error})") from error


def _contradictions(written: _Written) -> Iterator[str]:
    """Say where parts of a contract, each of the right kind, cannot belong together."""
    shape, classes, columns, tokenizer = written.sample.shape, written.classes, written.columns, written.tokenizer
    if written.sample.dtype not in DTYPES:
        yield f"samples of {written.sample.dtype}"
        return
    dtype = DTYPES[written.sample.dtype]
    if not 1 <= len(shape) <= 3 or math.prod(shape) > MOST:
        yield f"samples of the shape {list(shape)[:4]}"
        return
    if not classes or len(set(classes)) < len(classes):
        yield "no class, or one class twice"
    if written.population > MOST:
        yield f"{written.population:,} clients"
    if len(written.mean) != len(written.std) or len(written.mean) not in (1, shape[0]):
        yield f"{len(written.mean)} means and {len(written.std)} deviations for samples of the shape {list(shape)}"
    scale = np.array([written.mean, written.std], np.float64) if len(written.mean) == len(written.std) else np.ones(2)
    with np.errstate(over="ignore", under="ignore"):
        stored = scale.astype(np.float32)
    if not np.isfinite(stored).all() or not (stored[1] > 0).all():
        yield "a mean or deviation that float32 cannot hold"
    names = [column.name for column in columns]
    if len(set(names)) < len(names) or written.label in names:
        yield "one column twice, or the label among the inputs"
    for column in columns:
        if reason := _wrong_column(column):
            yield f"column '{column.name}' {reason}"
    if tokenizer is not None:
        if dtype.is_floating_point or shape != (tokenizer.length,) or len(columns) != 1:
            yield "samples that are not the tokens of a text"
        elif opened(tokenizer.file, tokenizer.length) != tokenizer:
            yield "numbers of the tokenizer that its vocabulary does not have"
    elif columns and (dtype != torch.float32 or shape != (sum(column.width for column in columns),)):
        yield f"{sum(column.width for column in columns)} features of columns for samples of the shape {list(shape)}"


def _wrong_column(column: InputColumn) -> str:
    """Say what is wrong with a column of a table; empty: nothing."""
    words = np.array(column.words, np.str_)
    if column.missing not in ("refuse", "skip", "mean") or column.unknown not in ("refuse", "zeros"):
        return "has an unknown rule"
    if not abs(column.fill) <= float(np.finfo(np.float32).max):
        return "is filled with a number that float32 cannot hold"
    if column.width != len(words) if len(words) else column.width < 1 + column.flag:
        return f"has {column.width} features"
    if len(words) and (
        column.flag or np.unique(words).tolist() != list(column.words)
    ):  # new words are searched in them
        return "has words twice or out of order"
    return ""


def differences(then: Contract, now: Contract) -> list[str]:
    """Everything in which data are not as they were, a line each; the most telling first."""
    return [*task_differences(then.data, now.data), *_row_differences(then, now)]


def task_differences(then: Dataset, now: Dataset) -> Iterator[str]:
    """Everything in which samples are read otherwise or classes differ, whatever the rows are."""
    yield from _changed_names("class", then.classes, now.classes)
    if then.label != now.label:
        yield f"the label column was '{then.label}' and is '{now.label}'"
    names = [column.name for column in then.columns], [column.name for column in now.columns]
    yield from _changed_names("column", *names)
    present = {column.name: column for column in now.columns}
    for column in then.columns:
        other = present.get(column.name, column)
        if column.words != other.words:
            if column.words and other.words:
                yield from _changed_names("word", column.words, other.words, f"column '{column.name}': ")
            else:
                kinds = ["words" if rules.words else "numbers" for rules in (column, other)]
                yield f"column '{column.name}' held {kinds[0]} and holds {kinds[1]}"
        elif column.width != other.width:
            yield f"column '{column.name}' had {column.width} numbers in a cell and has {other.width}"
    if then.x.shape[1:] != now.x.shape[1:] and not then.columns:
        yield f"samples had the shape {tuple(then.x.shape[1:])} and have {tuple(now.x.shape[1:])}"
    if then.x.dtype != now.x.dtype:
        yield f"samples were {then.x.dtype} and are {now.x.dtype}"
    if then.tokenizer != now.tokenizer:
        yield "texts are cut into other tokens"
    if len(then.mean) == len(now.mean) and then.columns == now.columns:
        yield from _changed_scale(then, now)


def _changed_scale(then: Dataset, now: Dataset) -> Iterator[str]:
    """Features whose mean or deviation moved, by the columns that they belong to."""
    owners = [column.name for column in then.columns for _ in range(column.width)]
    scales = zip(then.mean, then.std, now.mean, now.std, strict=True)
    moved = [place for place, (mean, std, *others) in enumerate(scales) if [mean, std] != others]
    if moved:
        names = list(dict.fromkeys(owners[place] if owners else f"channel {place}" for place in moved))
        shown = ", ".join(f"'{name}'" for name in names[:SHOWN]) + (" and more" if len(names) > SHOWN else "")
        yield f"mean or deviation moved in {len(names)} of {len(dict.fromkeys(owners)) or len(then.mean)}: {shown}"


def _changed_names(kind: str, then: Sequence[str], now: Sequence[str], where: str = "") -> Iterator[str]:
    """What went, what came, and whether the order changed."""
    if list(then) == list(now):
        return
    gone, new = ([name for name in a if name not in set(b)] for a, b in ((then, now), (now, then)))
    if gone or new:
        many = "classes" if kind == "class" else f"{kind}s"
        yield f"{where}{many} differ: {_listed(gone, 'without')}{_listed(new, ' with new' if gone else 'with new')}"
    else:
        yield f"{where}the {kind} names are in another order"


def _listed(names: list[str], word: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{word} {', '.join(map(repr, names[:SHOWN]))}{more}"


def _row_differences(then: Contract, now: Contract) -> Iterator[str]:
    for part in dict.fromkeys((*then.rows, *now.rows)):
        old, new = then.rows.get(part), now.rows.get(part)
        if old == new:
            continue
        if old is None or new is None:
            yield f"there {'was no' if old is None else 'is no'} {part} set{' any more' if new is None else ''}"
        elif not (old.count and new.count) and old.labels == new.labels == "":
            yield f"{part}: its rows differ"
        elif old.count != new.count:
            yield f"{part} has {new.count:,} rows and had {old.count:,}"
        elif old.in_any_order == new.in_any_order:
            yield f"{part}: the same {old.count:,} rows stand in another order"
        elif old.inputs == new.inputs:
            moved = sum(abs(a - b) for a, b in zip(old.classes, new.classes, strict=False)) // 2
            counted = f", class sizes differ by {moved:,} rows" if moved else ""
            yield f"{part}: labels of the same {old.count:,} inputs differ{counted}"
        else:
            labels = " and labels" if old.labels != new.labels else ""
            yield f"{part}: inputs{labels} of its {old.count:,} rows differ"
    if then.population != now.population:
        yield f"there were {then.population} clients and are {now.population}"
    elif then.owners != now.owners and then.rows["train"].count == now.rows["train"].count:
        yield "the rows belong to other clients"
