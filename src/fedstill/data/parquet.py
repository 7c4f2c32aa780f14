"""Read parquet and JSON lines as Arrow tables, after their sizes are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fedstill.core.errors import FedstillError
from fedstill.data.bounds import FLOOR, OF_A_ROW, check_columns, check_lines, check_size, readable
from fedstill.data.source import require_extra

MOST_ROWS = 32_768  # unpacked at once
OF_A_CELL = 8
REPEATING = {"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"}  # encodings that write a long cell once for many
LONGEST_PAGE_HEAD = 256  # bytes that hold the sizes of a page
CURE = "if it is sound, write it without compression and dictionaries, or in several files"


class ParquetFile:
    """A parquet file whose footer asks for no more memory than its size lets expect."""

    def __init__(self, file: Path) -> None:
        self.file, self.what, self.on_disk = file, f"'{file}'", file.stat().st_size
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
                check_size(taken, self.on_disk, self.what, CURE)
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
                check_size(taken, self.on_disk, self.what, CURE)
            while count >= rows or (batch is None and count):
                whole = arrow.Table.from_batches(waiting)
                yield whole.slice(0, rows)
                waiting = whole.slice(rows).to_batches()
                count, taken = max(0, count - rows), sum(each.nbytes for each in waiting)
            if batch is None:
                return

    def _batches(self, columns: list[str] | None) -> Iterator[Any]:
        """Return an iterator of rows, so few at once that no dictionary can fill the memory before they are counted."""
        at_once = max(1, min(MOST_ROWS, FLOOR // max(1, self._longest_cell())))
        for batch in self._opened.iter_batches(batch_size=at_once, columns=columns):
            yield _without_dictionaries(batch)

    def _readable(self) -> Any:
        return readable(self.file, "readable parquet")

    def _check(self, footer: Any) -> None:
        check_columns(footer.num_columns, self.what)
        wanted = footer.num_rows * (OF_A_ROW + OF_A_CELL * footer.num_columns)
        for chunk in self._chunks():
            wanted += max(0, chunk.total_uncompressed_size) + OF_A_CELL * max(0, chunk.num_values - footer.num_rows)
        check_size(wanted, self.on_disk, self.what, CURE)

    def _chunks(self) -> Iterator[Any]:
        footer = self._opened.metadata
        for group in range(footer.num_row_groups):
            for column in range(footer.num_columns):
                yield footer.row_group(group).column(column)

    def _longest_cell(self) -> int:
        """Return the bytes that one cell can take which stands for many: at most those of its dictionary."""
        longest = 1
        for chunk in self._chunks():
            if chunk.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY") and REPEATING & set(chunk.encodings):
                longest = max(longest, self._dictionary_size(chunk))
        return longest

    def _dictionary_size(self, chunk: Any) -> int:
        whole = int(chunk.total_uncompressed_size)
        if "DELTA_BYTE_ARRAY" in chunk.encodings or chunk.dictionary_page_offset is None:
            return whole
        with self.file.open("rb") as file:
            file.seek(chunk.dictionary_page_offset)
            stated = _page_size(file.read(LONGEST_PAGE_HEAD))
        return whole if stated is None else stated


def _without_dictionaries(batch: Any) -> Any:
    """Return rows whose size can be seen: a word stands in each of its cells, and not once for all of them."""
    arrow = require_extra("pyarrow")
    columns = [column.dictionary_decode() if arrow.types.is_dictionary(column.type) else column for column in batch]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _page_size(head: bytes) -> int | None:
    """Return the unpacked bytes of a page by its head (Thrift's compact form): field 1 its kind, field 2 this size.

    >>> _page_size(bytes([0x15, 0x04, 0x15, 0x80, 0x02]))
    128
    """
    numbers, place = [], 0
    for _ in range(2):
        if head[place : place + 1] != b"\x15":  # the next field, a number of 32 bits
            return None
        number, shift, place = 0, 0, place + 1
        while True:
            if place >= len(head):
                return None
            number |= (head[place] & 127) << shift
            shift, place = shift + 7, place + 1
            if head[place - 1] < 128:
                break
        numbers.append(number >> 1)
    return numbers[1]


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
