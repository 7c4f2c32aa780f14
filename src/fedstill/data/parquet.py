"""Read parquet and JSON lines as Arrow tables, after their sizes are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedstill.core.errors import FedstillError
from fedstill.data.bounds import FLOOR, OF_A_ROW, check_columns, check_lines, check_size, readable
from fedstill.data.source import require_extra

MOST_ROWS = 32_768  # unpacked at once
OF_A_CELL = 8
LONGEST_PAGE_HEAD = 8192  # bytes
BYTES, DICTIONARY, DELTA_BYTE_ARRAY = (6, 7), 2, 7  # numbers of the format: types of words, a page, an encoding
CURE = "if it is sound, write it without compression and dictionaries, or in several files"


class ParquetFile:
    """A parquet file whose footer asks for no more memory than its size lets expect."""

    def __init__(self, file: Path) -> None:
        self.file, self.subject, self.on_disk = file, f"'{file}'", file.stat().st_size
        parquet = require_extra("pyarrow.parquet")
        with self._readable():
            self._opened = parquet.ParquetFile(file)
            self._check(self._opened.metadata)
            self.header: list[str] = self._opened.schema_arrow.names
            self.features = _features(self._opened.schema_arrow.metadata or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def uneven_rows(self) -> dict[int, str]:
        """Return nothing: no row of a parquet file can have more or fewer cells than another."""
        return {}

    def table(self) -> Any:
        """Return all rows."""
        arrow, read, taken = require_extra("pyarrow"), [], 0
        with self._readable():
            for batch in self._batches(None):
                taken += batch.nbytes
                check_size(taken, self.on_disk, self.subject, CURE)
                read.append(batch)
            return arrow.Table.from_batches(read, None if read else self._opened.schema_arrow)

    def pieces(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Yield some columns as tables of so many rows; only the last one is shorter."""
        arrow = require_extra("pyarrow")
        waiting, count, taken = [], 0, 0
        batches = self._batches(list(columns))
        while True:
            with self._readable():
                batch = next(batches, None)
            if batch is not None:
                waiting.append(batch)
                count, taken = count + len(batch), taken + batch.nbytes
                check_size(taken, self.on_disk, self.subject, CURE)
            while count >= rows or (batch is None and count):
                whole = arrow.Table.from_batches(waiting)
                yield whole.slice(0, rows)
                waiting = whole.slice(rows).to_batches()
                count, taken = max(0, count - rows), sum(each.nbytes for each in waiting)
            if batch is None:
                return

    def _batches(self, columns: list[str] | None) -> Iterator[Any]:
        """Return an iterator of rows, so few at once that no dictionary can fill the memory before they are counted."""
        at_once = max(1, min(MOST_ROWS, FLOOR // max(1, self._longest_cell)))
        for batch in self._opened.iter_batches(batch_size=at_once, columns=columns):
            yield _without_dictionaries(batch)

    def _readable(self) -> Any:
        return readable(self.file, "readable parquet")

    def _check(self, footer: Any) -> None:
        check_columns(footer.num_columns, self.subject)
        rows, self._longest_cell = footer.num_rows, 1
        wanted = rows * (OF_A_ROW + OF_A_CELL * footer.num_columns)
        for chunk in _chunks(self.file):
            wanted += max(0, chunk.unpacked) + OF_A_CELL * max(0, chunk.values - rows)
            if chunk.kind in BYTES:
                self._longest_cell = max(self._longest_cell, self._repeated(chunk))
        check_size(wanted, self.on_disk, self.subject, CURE)

    def _repeated(self, chunk: _Chunk) -> int:
        """Return the bytes that one cell can take which is stored once for many: at most those of the dictionary."""
        with self.file.open("rb") as file:
            file.seek(chunk.start)
            page = _page(file.read(LONGEST_PAGE_HEAD))
        if page is None or DELTA_BYTE_ARRAY in chunk.encodings:
            return chunk.unpacked
        return page[1] if page[0] == DICTIONARY else 1


class _Chunk(NamedTuple):
    """One column of a group of rows, as the footer describes it."""

    kind: int
    encodings: list[int]
    values: int
    unpacked: int  # bytes
    start: int  # of its first page


def _chunks(file: Path) -> list[_Chunk]:
    """Read the footer without pyarrow, which ends the process where the statistics in a footer are wrong."""
    with file.open("rb") as opened:
        opened.seek(-8, 2)
        length = int.from_bytes(opened.read(4), "little")
        opened.seek(-8 - length, 2)
        groups = _Thrift(opened.read(length)).struct().get(4, [])
    chunks = []
    for column in (column for group in groups for column in group[1]):
        about = column[3]
        start = min(about[9], about.get(11) or about[9])
        chunks.append(_Chunk(about[1], about[2], about[5], about[6], start))
    return chunks


class _Thrift:
    """Reads the compact form of Thrift, in which a footer is written: dicts of values by the number of their field."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def struct(self) -> dict[int, Any]:
        fields, number = dict[int, Any](), 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind in (7, 8):
            size = 8 if kind == 7 else self._number()
            self.place += size
            if self.place > len(self.data):
                raise ValueError("a footer that is cut off")
            return self.data[self.place - size : self.place]
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._number()
            return [self._value(head & 15) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"a footer with a value of kind {kind}")

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _number(self) -> int:
        number, shift = 0, 0
        while (byte := self._byte()) > 127:
            number, shift = number | (byte & 127) << shift, shift + 7
            if shift > 63:
                raise ValueError("a footer with a number of more than 64 bits")
        return number | byte << shift

    def _zigzag(self) -> int:
        number = self._number()
        return number >> 1 ^ -(number & 1)


def _without_dictionaries(batch: Any) -> Any:
    """Return rows whose size can be seen: a word stands in each of its cells, and not once for all of them."""
    arrow = require_extra("pyarrow")
    columns = [column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column for column in batch]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _page(head: bytes) -> tuple[int, int] | None:
    """Return the kind of a page and its unpacked bytes by its head, whose first fields these are.

    >>> _page(bytes([0x15, 0x04, 0x15, 0x80, 0x02]))
    (2, 128)
    """
    try:
        fields = _Thrift(head[:LONGEST_PAGE_HEAD] + bytes(1)).struct()
        return int(fields[1]), int(fields[2])
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return how Hugging Face describes the columns; {} where the file does not say it."""
    described: Any = json.loads(metadata.get(b"huggingface", b"{}"))
    for key in ("info", "features"):
        described = described.get(key, {}) if isinstance(described, dict) else {}
    return described if isinstance(described, dict) else {}


def read_json_lines(file: Path) -> Any:
    """Return a table with a row for each line, which holds a JSON object, and a column for each of their names."""
    arrow, pandas = require_extra("pyarrow"), require_extra("pandas")
    check_lines(file)
    with readable(file, "readable JSON lines"), file.open(encoding="utf-8-sig") as lines:
        rows, names = [], set[str]()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise FedstillError(f"data.source: line {number} of '{file}' is no JSON object such as {{\"x\": 1}}")
            rows.append(row)
            names.update(row)
            check_columns(len(names), f"'{file}'")
        cells = len(rows) * len(names) * 2 * OF_A_CELL  # a name of one row is an empty cell of all others
        check_size(cells, file.stat().st_size, f"'{file}'", "write the same names in every line")
        return arrow.Table.from_pandas(pandas.DataFrame(rows), preserve_index=False)
