"""Read data that somebody holds in Python: a DataFrame, an array, a tensor, a list of texts, a torch Dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from fedstill.core.data import InputColumn
from fedstill.core.errors import FedstillError
from fedstill.data.files import frame_from_arrow
from fedstill.data.load import Options
from fedstill.data.source import Reading, Source, Unlabeled, as_array, first_line, require_extra, row_ids
from fedstill.data.split import match_storage, reading_like
from fedstill.data.tables import Frame, assemble, objects, storage_form
from fedstill.data.text import text_source
from fedstill.data.tokens import as_tokens

Test = tuple[Any, Any] | float | None


def from_data(
    x: Any,
    y: Any = None,
    *,
    groups: Any = None,
    test: Test = 0.2,
    classes: Sequence[str] | None = None,
    name: str = "data",
    **options: Unpack[Options],
) -> Source:
    """Make a Source of a DataFrame (numbers and words), an array, a tensor, a list of texts or a torch Dataset.

    y: the labels, or the name of a column of x. A torch Dataset of (sample, label) pairs has its own.
    groups: the owner of each row, or the name of a column of x. It becomes a key column, and is never an input.
    test: a pair (x, y), the share of the rows that is held out (stratified), or None: no row is held out, and the
        train rows are the test rows, too.
    classes: names of the classes 0..K-1; by default the classes are the distinct labels in order.
    options: those of `load`.
    """
    gaps = options.get("missing", "refuse") != "refuse"
    table, label, owner = _labelled_frame(x, y, groups, gaps=gaps)
    frames = {"train": table if classes is None else Frame(table.columns, {label: tuple(classes)})}
    keys = dict.fromkeys((*options.get("keys", ()), *([owner] if owner else [])))
    reading = replace(Reading(**options), label=label, keys=tuple(keys))
    if isinstance(test, tuple):
        frames["test"] = _labelled_frame(*test, None, label=label, gaps=gaps)[0]
    elif test is None:
        frames["test"] = Frame({column: values[:1] for column, values in table.columns.items()})
    else:
        reading = replace(reading, held_out=float(test))
    source = (assemble if reading.window is None else text_source)(frames, reading, name=name, origin="")
    return source._replace(test=source.train) if test is None else source


def is_frame(x: object) -> bool:
    """Return whether a value is a DataFrame, of pandas or of another package."""
    return hasattr(x, "columns") and hasattr(x, "dtypes")


def owner_name(x: Any, groups: Any) -> str:
    """Return the name of the key column that `from_data` makes of the owners; empty where there are none."""
    if groups is None or isinstance(groups, str):
        return groups or ""
    return _free_name(getattr(groups, "name", None), "owner", x)


def _free_name(wanted: object, otherwise: str, x: Any) -> str:
    """Return a name for a column beside those of x: the wanted one, if it is a text and x has no such column."""
    taken = set(map(str, x.columns)) if is_frame(x) else {"x", "text"}
    name = wanted if isinstance(wanted, str) and wanted else otherwise
    while name in taken:
        name += "_"
    return name


def _labelled_frame(x: Any, y: Any, groups: Any, *, label: str = "", gaps: bool = False) -> tuple[Frame, str, str]:
    """Return (columns of x, y and groups; the name of the label column; the name of the owner column)."""
    if isinstance(x, torch.utils.data.Dataset) and y is not None:
        raise FedstillError(
            "data: a torch Dataset has its own labels: give it alone, or with the owner of each row "
            "fedstill.from_data(dataset, groups=owners)"
        )
    if y is None and not is_frame(x):
        x, y = _pairs(x)
    if y is None:
        raise FedstillError("data: there are no labels: give (x, y), where y may be the name of a column of x")
    table = _frame(x, gaps=gaps)
    label = y if isinstance(y, str) else label or _free_name(getattr(y, "name", None), "y", x)
    owner, columns = owner_name(x, groups), dict(table.columns)
    for name, values, argument in ((label, y, "y"), (owner, groups, "groups")):
        if isinstance(values, str) and values not in columns:
            raise FedstillError(f"data: {argument} = '{values}' names no column of x: give a column or one value a row")
        if values is not None and not isinstance(values, str):
            columns[name] = _one_a_row(values, table.rows, argument)
            _check_order(x, values, argument)
    return Frame(columns), label, owner


def _check_order(x: Any, values: Any, name: str) -> None:
    """Refuse a Series whose index has the row names of x in another order, because values are taken by their places."""
    ours: Any
    theirs: Any
    ours, theirs = getattr(x, "index", None), getattr(values, "index", None)  # a list has a method of this name
    if not hasattr(ours, "isin") or not hasattr(theirs, "isin") or ours.equals(theirs):
        return
    if ours.isin(theirs).all():
        raise FedstillError(
            f"data: the index of {name} has the rows of x in another order, and values are taken by their places: "
            f"give {name}.loc[x.index], or {name}.to_numpy() if the places are right"
        )


def _one_a_row(values: Any, rows: int, name: str) -> np.ndarray:
    array = as_array(values)
    if array.shape != (rows,):
        raise FedstillError(f"data: {name} has the shape {array.shape}, and x has {rows} rows: give one value a row")
    if array.dtype.kind in "OU":
        return objects(["" if value is None or value != value else str(value) for value in array.tolist()])
    return array


def _pairs(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return all samples and all labels of a torch Dataset as two arrays."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise FedstillError("data: a DataLoader is a way to read a Dataset: give loader.dataset")
    if isinstance(dataset, str | Path):
        raise FedstillError(f"data: '{dataset}' is a text: a file or folder is data.source of the experiment")
    if not isinstance(dataset, torch.utils.data.Dataset):
        raise FedstillError(f"data: {type(dataset).__name__} has no labels: give the tuple (x, y) or (x, y, owners)")
    try:
        samples, labels = zip(*(dataset[row][:2] for row in range(len(dataset))), strict=True)  # type: ignore[arg-type]
        return np.stack([as_array(sample) for sample in samples]), np.array([int(label) for label in labels])
    except Exception as error:  # whatever a user's Dataset raises
        raise FedstillError(
            f"data: cannot read {type(dataset).__name__} as (sample, class number) pairs of one shape "
            f"({first_line(error)})"
        ) from error


def _frame(x: Any, like: tuple[InputColumn, ...] = (), *, gaps: bool = False) -> Frame:
    """Return inputs as columns: those of a DataFrame, 'text' for a list of texts, 'x' for anything else.

    like: the task's columns. An array has them by their places, and so has a DataFrame for a task of one array.
    gaps: an array of floats (rows, features) becomes the columns x0, x1, ..., because gaps are filled by column.
    """
    if is_frame(x):
        if [column.name for column in like] != ["x"] or "x" in map(str, x.columns):
            return _frame_of_table(x)
        x = x.to_numpy()
    if isinstance(x, torch.utils.data.Dataset):
        raise FedstillError("data: a torch Dataset holds labels too: give its samples as one tensor or array")
    array = as_array(x)
    if array.ndim == 1 and array.dtype.kind in "OUT":
        return Frame({like[0].name if like else "text": objects([str(value) for value in array.tolist()])})
    if array.dtype.kind == "O":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise FedstillError("data: x holds objects that are no numbers: give words in a DataFrame") from None
    if array.dtype.kind not in "biuf" or array.ndim < 1 or not array.size:
        raise FedstillError(f"data: x must hold numbers, one row a sample; it is {array.dtype} of shape {array.shape}")
    by_column = gaps and array.ndim == 2 and array.dtype.kind == "f"
    names = [column.name for column in like] or ([f"x{place}" for place in range(array.shape[1])] if by_column else [])
    if names not in ([], ["x"]) and (array.ndim == 2 or len(names) > 1):
        if array.shape[1:] != (len(names),):
            raise FedstillError(
                f"data: the run learnt from {len(names)} columns, '{names[0]}' to '{names[-1]}', and the array has the "
                f"shape {array.shape}: give one column for each, or a DataFrame with their names"
            )
        return Frame({name: array[:, place] for place, name in enumerate(names)})
    return Frame({"x": storage_form(array)})


def _frame_of_table(table: Any) -> Frame:
    """Return the columns of a DataFrame as if a parquet file held them."""
    arrow, pandas = require_extra("pyarrow"), require_extra("pandas")
    frame = table if isinstance(table, pandas.DataFrame) else table.to_pandas()
    if not frame.columns.is_unique:
        raise FedstillError("data: two columns of the DataFrame have one name: rename one of them")
    columns: dict[str, np.ndarray] = {}
    for name, column in frame.items():
        if isinstance(column.dtype, pandas.CategoricalDtype):
            column = column.astype(column.cat.categories.dtype if not column.isna().any() else object)
        try:
            arrays = frame_from_arrow(arrow.table({str(name): arrow.Array.from_pandas(column)}), {}, Reading()).columns
        except (arrow.ArrowException, ValueError, TypeError) as error:
            raise FedstillError(f"data: column '{name}' mixes kinds of values ({first_line(error)})") from error
        if not arrays:
            raise FedstillError(
                f"data: column '{name}' holds {column.dtype}, which is neither numbers nor words: convert or drop it"
            )
        columns |= arrays
    return Frame(columns)


def read_given(x: Any, task: Source) -> Unlabeled:
    """Read a DataFrame, an array or texts in the form of the task's `source`; rows keep their order and their index."""
    reading = reading_like(task, labelled=False)
    frame = _frame(x, reading.like)
    columns = {name: values for name, values in frame.columns.items() if name in reading.inputs}
    lacking = [name for name in reading.inputs if name not in columns]
    if lacking and is_frame(x):
        raise FedstillError(f"data: the run learnt from column '{lacking[0]}', and the DataFrame has none of that name")
    other = assemble({"train": Frame(columns or frame.columns)}, reading, name="the given data", origin="")
    other = other if task.train.tokenizer is None else as_tokens(other, task.train.tokenizer)
    samples = match_storage(other.train.x, task.train.x, where="the given data", key="data")
    names = [int(row) for row in row_ids(other, "train")]
    index = list(x.index) if is_frame(x) and hasattr(x, "index") else range(len(x))
    return Unlabeled(samples, tuple(str(index[row]) for row in names), skipped=other.skipped, notes=other.notes)
