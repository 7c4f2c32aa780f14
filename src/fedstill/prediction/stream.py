"""Read new samples in the form that a contract fixed: a table file in pieces, everything else at once."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.data import InputColumn
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Dataset
from fedstill.data import Source, files
from fedstill.data.bounds import readable
from fedstill.data.files import MISSING_WORDS, CsvFile, frame_from_arrow, paths_of
from fedstill.data.given import read_given
from fedstill.data.parquet import ParquetFile
from fedstill.data.source import missing_rows
from fedstill.data.split import match_classes, read_unlabeled, reading_like
from fedstill.data.tables import MISSING_WORD, Frame, assemble, may_name_rows, name_rows, rule_notes
from fedstill.prediction.answers import Samples

FAR = 10  # deviations from the mean of the training rows
LARGEST = float(np.finfo(np.float32).max)
_log = logging.getLogger("fedstill.run")


def new_samples(inputs: Any, task: Dataset) -> Iterator[Samples]:
    """Read samples in the task's form.

    A table in a file .csv, .tsv or .parquet comes in pieces, in its own order, whatever its size. Rows that cannot be
    read are left out, and `skipped` names them with the reason. Folders, texts and data in Python come at once.
    A warning names the columns of numbers that are far from those of the training rows.
    """
    far, rows = dict.fromkeys(_numbers(task), 0), 0
    for samples in _read(inputs, task):
        rows += len(samples.x)
        for name, place in _numbers(task).items():
            off = (samples.x[:, place] - task.mean[place]).abs() > FAR * task.std[place]
            far[name] += int(off.sum())
        yield samples
    if columns := [f"'{name}' in {count:,} of {rows:,} rows" for name, count in far.items() if 2 * count > rows]:
        _log.warning(
            "the inputs are far from the training rows, more than %d deviations from their mean: %s; compare the "
            "units, because the answers may be wrong and confident",
            FAR,
            ", ".join(columns),
        )


def _numbers(task: Dataset) -> dict[str, int]:
    """Return the place of the feature of each column of numbers; none where the inputs are not scaled."""
    places = accumulate((column.width for column in task.columns), initial=0)
    if set(task.mean) <= {0.0} and set(task.std) <= {1.0}:
        return {}
    return {
        column.name: place
        for column, place in zip(task.columns, places, strict=False)
        if not column.words and column.width == 1 + column.flag
    }


def _read(inputs: Any, task: Dataset) -> Iterator[Samples]:
    try:
        if not isinstance(inputs, str | Path):
            given = read_given(inputs, Source(task, task))
            yield Samples(given.x, given.ids, None, given.skipped)
            return
        file = Path(inputs).resolve()  # a full path, because a bare name may mean an embedded set
        if file.is_file() and file.suffix.lower() in (".csv", ".tsv", ".parquet") and task.columns and not task.text:
            yield from _TableFile(file, task).pieces()
            return
        samples = read_unlabeled(str(file), Source(task, task))
        yield Samples(samples.x, samples.ids, samples.truth, samples.skipped)
    except FedstillError as error:
        raise FedstillError(*(re.sub(r"^data(\.\w+)?:", "INPUTS:", line) for line in error.lines)) from error
    except OSError as error:
        raise FedstillError(f"INPUTS: cannot read '{inputs}' ({error.strerror or error})") from error


class _TableFile:
    """A table to be labeled, and the task by whose columns it is read."""

    def __init__(self, file: Path, task: Dataset) -> None:
        self.file, self.task = file, task
        self.reading = replace(reading_like(Source(task, task), labelled=False), label=task.label or None)
        self.table = ParquetFile(file) if file.suffix.lower() == ".parquet" else CsvFile(file)
        self.header = self.table.header

    def pieces(self) -> Iterator[Samples]:
        """Yield the rows that can be read, at most ROWS_AT_ONCE at a time."""
        inputs = [column.name for column in self.task.columns]
        if lacking := [name for name in inputs if name not in self.header]:
            hint = suggest(lacking[0], self.header)
            raise FedstillError(f"INPUTS: '{self.file}' has no column '{lacking[0]}'; {hint}")
        used = [*inputs, *({self.task.label} & set(self.header))]
        ids = [name for name in self.header if may_name_rows(name, self.reading) and name not in used]
        names, uneven = self._names(ids) if ids else [], self.table.uneven_rows()
        first, read, problem, notes, cells = 0, 0, "it has no row", dict[str, None](), dict[str, Counter[str]]()
        for frame in self._frames(used):
            row_names = names[first : first + frame.rows]
            if not names:
                row_names = [str(row) for row in range(first, first + frame.rows)]
            elif len(row_names) != frame.rows:
                raise FedstillError(f"INPUTS: '{self.file}' is damaged: its columns have different numbers of rows")
            problems: dict[int, str] = {}
            for column in self.task.columns:
                if column.name not in frame.names:
                    problems = _problems(frame.columns[column.name], column) | problems
            problems |= {row - first: uneven[row] for row in uneven if first <= row < first + frame.rows}
            skipped = tuple(f"{row_names[row]} ({problems[row]})" for row in sorted(problems))
            kept = np.setdiff1d(np.arange(frame.rows), np.fromiter(problems, np.int64))
            samples = Samples(self.task.x[:0], (), None, skipped)
            if len(kept):
                part = assemble({"": self._readable(frame, kept)}, self.reading, name=self.file.stem, origin="")
                notes |= dict.fromkeys(
                    note for note in part.notes if note not in rule_notes(part.cells_by_rule, len(kept))
                )
                for rule, counts in part.cells_by_rule.items():
                    cells.setdefault(rule, Counter()).update(counts)
                truth = match_classes(part.train, Source(self.task, self.task), some=True) if part.train.label else None
                samples = Samples(part.train.x, tuple(row_names[row] for row in kept.tolist()), truth, skipped)
            yield samples
            first, read, problem = first + frame.rows, read + len(kept), next(iter(skipped), problem)
        if not read:
            raise FedstillError(f"INPUTS: no row of '{self.file}' can be read: {problem}")
        for note in (*notes, *rule_notes(cells, read)):
            _log.warning("'%s': %s", self.file.name, note)

    def _readable(self, frame: Frame, rows: np.ndarray) -> Frame:
        """Return some rows, with all numbers as numbers."""
        columns = frame.take(rows).columns
        written = {column.name: columns[column.name] for column in self.task.columns if not column.words}
        numbers = {
            name: np.array([_number(text) for text in cells.tolist()], np.float64)
            for name, cells in written.items()
            if cells.dtype == object
        }
        return Frame({**columns, **numbers}, frame.names)

    def _names(self, ids: list[str]) -> list[str]:
        """Return a name for each row by the id columns; these are read first, because all values must differ."""
        parts = [frame.columns for frame in self._frames(ids)]
        whole = Frame({name: np.concatenate([part[name] for part in parts]) for name in ids if name in parts[0]})
        names, _, notes = name_rows({"": whole}, self.reading, used=())
        for note in notes:
            _log.warning("'%s': %s", self.file.name, note)
        return names

    def _frames(self, names: list[str]) -> Iterator[Frame]:
        """Yield the named columns in pieces; a column of a CSV file is numbers if all of its cells are."""
        if isinstance(self.table, CsvFile):
            numbers = {column.name for column in self.task.columns if not column.words}
            for piece in self.table.pieces(words=set(self.header) - numbers):
                yield Frame({name: piece[name] for name in names})
            return
        place = paths_of(self.file.parent, self.file.parent)
        for rows in self.table.pieces(names, files.ROWS_AT_ONCE):
            with readable(self.file, "readable parquet"):
                frame = frame_from_arrow(rows, self.table.features, self.reading, place)
            yield frame


def _problems(cells: np.ndarray, column: InputColumn) -> dict[int, str]:
    """Return the rows whose cell cannot be read by the rules of the task's column, each with the reason in words."""
    fills, takes_any = column.missing == "mean", column.unknown == "zeros"
    if cells.dtype == object:
        spelt = {cell: _word(cell) for cell in set(cells.tolist())}
        cells[:] = [spelt[cell] for cell in cells.tolist()]
    gaps = missing_rows(cells).tolist()
    problems = {} if fills else dict.fromkeys(gaps, "has no value")
    if column.words:
        texts = cells.copy() if cells.dtype == object else cells.astype(np.str_).astype(object)
        texts[gaps] = MISSING_WORD
        known = set(column.words)
        strange = [] if takes_any else [row for row, text in enumerate(texts.tolist()) if text not in known]
        problems = {row: f"holds '{texts[row]}', which is not among the task's words" for row in strange} | problems
    elif cells.dtype == object:
        wrong = [row for row, text in enumerate(cells.tolist()) if text and not abs(_number(text)) <= LARGEST]
        problems |= {row: f"holds '{cells[row]}', which is no finite number" for row in wrong}
    elif cells.dtype.kind == "f":
        infinite = (np.abs(cells) > LARGEST).reshape(len(cells), -1).any(axis=1)
        problems |= dict.fromkeys(np.flatnonzero(infinite).tolist(), "is not finite")
    return {row: f"column '{column.name}' {reason}" for row, reason in problems.items()}


def _word(cell: object) -> str:
    """Return a cell without spaces around it; NA, null and the like are no value."""
    text = str(cell).strip()
    return "" if text.lower() in MISSING_WORDS else text


def _number(text: str) -> float:
    """Return the number in a cell; NaN if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
