"""Read files, folders and Hugging Face objects into frames: one Frame for each split, not decoded yet."""

from __future__ import annotations

import contextlib
import csv
import glob
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from fedstill.core.errors import FedstillError, suggest
from fedstill.data.arrays import read_npz
from fedstill.data.bounds import LONGEST_LINE, check_columns, check_file, check_lines, is_inside, readable
from fedstill.data.images import IMAGE_SUFFIXES
from fedstill.data.parquet import ParquetFile, read_json_lines
from fedstill.data.source import Reading, first_line, require_extra, row_numbers
from fedstill.data.tables import (
    MAX_ODD_SHARE,
    TEXT_FILE,
    Frame,
    is_number,
    kind_of,
    may_name_rows,
    objects,
    split_role,
    stack,
)
from fedstill.data.text import read_lines
from fedstill.storage.spreadsheet import from_cell

ROWS_AT_ONCE = 32_768  # a multiple of the engines' pieces, so that a row is computed alike in tables of any length
MISSING_WORDS = frozenset({"", "na", "n/a", "nan", "null"})
_MISSING_SPELT = [
    "".join(letters) for word in MISSING_WORDS for letters in itertools.product(*({c, c.upper()} for c in word))
]  # for pandas, which tells NA from Na
LINES_OF_A_LOOK = 1000  # of a table, to see how its numbers are written
_DECIMAL_COMMA = re.compile(r"(?<![^;\t|\s])[-+]?\d+,\d+(?![^;\t|\s])")  # 32,1 as a whole cell
_WITH_COMMA = re.compile(r"\s*[-+]?\d*,\d+\s*")
FILE = "file"  # the key that says in which of a folder's tables a row stands
EXACT_PANDAS = (3, 1)  # from this release on, its plain reader of numbers gives the nearest float
TABLE_SUFFIXES = ((".parquet",), (".csv", ".tsv"), (".jsonl",))  # a folder is read by the first kind that it holds
SHARD = re.compile(r"(?P<split>.+)-\d+-of-(?P<parts>\d+)")


def read_files(files: list[Path], root: Path, reading: Reading) -> tuple[dict[str, Frame], list[str]]:
    """Read the files that `files_of(root)` listed, and return (splits, notes)."""
    for file in files:
        check_file(file, root.parent if root.is_file() else root)
    suffix = files[0].suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return _class_folders(files, {"image": objects(files)}, root, reading), []
    if suffix == ".txt" and _reads_whole_files(reading):
        texts = objects([_read_text(file, reading) for file in files])
        return _class_folders(files, {TEXT_FILE: texts}, root, reading), []
    if suffix == ".npz":
        return read_npz(files[0], labelled=reading.labelled), []
    if root.is_file():
        return {"train": _read_table(root, reading, root.parent)}, []
    shards: dict[str, list[Path]] = {}
    notes = []
    for file in files:
        shards.setdefault(_split_of(file), []).append(file)
    for split, parts in shards.items():
        shard = SHARD.fullmatch(parts[0].stem)
        if shard and len(parts) < int(shard["parts"]):
            notes.append(f"{split}: {len(parts)} of {int(shard['parts'])} files are here")
    joined = are_joined(files)
    if joined:
        shards = {"train": files}
    frames = {}
    for split, parts in shards.items():
        read = [_read_table(file, reading, root) for file in parts]
        words = {name for frame in read for name, column in frame.columns.items() if kind_of(column) == "words"}
        for place, (file, frame) in enumerate(zip(parts, read, strict=True)):
            numbers = {name for name, column in frame.columns.items() if kind_of(column) == "numbers"}
            if words & numbers and file.suffix.lower() in (".csv", ".tsv"):  # as they are written: 007 is not 7
                read[place] = read_csv(file, reading=reading, words=words & numbers)
        if joined and FILE in reading.keys:
            read = [_with_name(frame, file) for frame, file in zip(read, parts, strict=True)]
        filled = [frame for frame in read if frame.rows] or read[:1]
        frames[split] = stack(filled, filled[0].columns, root.name)
    return frames, notes


def are_joined(files: Sequence[Path]) -> bool:
    """Return whether tables are parts of one set, because none is called train, test or the like."""
    return not any(split_role(_split_of(file)) for file in files)


def _with_name(frame: Frame, file: Path) -> Frame:
    """Return a table with the name of its file in each row, unless it has such a column of its own."""
    return Frame({FILE: objects([file.stem] * frame.rows), **frame.columns}, frame.names)


def _split_of(file: Path) -> str:
    shard = SHARD.fullmatch(file.stem)
    return shard["split"] if shard else file.stem


def files_of(root: Path, reading: Reading | None = None) -> list[Path]:
    """List the data files of a source, sorted: one file, a folder's tables (or its only sub-folder's), images or texts.

    Where only images are wanted (`reading.fit`), a table beside images is their description and no data, unless it is a
    parquet file called train, test or the like.
    """
    reading = reading or Reading()
    of_lines = [(".txt",)] if reading.text and not reading.labelled else []
    if root.is_file():
        tables = {".npz", *(suffix for kind in [*TABLE_SUFFIXES, *of_lines] for suffix in kind)}
        if root.suffix.lower() not in tables | (set() if reading.labelled else IMAGE_SUFFIXES):
            raise FedstillError(
                f"data.source: cannot read '{root}'; give a folder or a file of {', '.join(sorted(tables))}"
            )
        return [root]
    files = files_below(root)
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    described = reading.fit is not None and bool(images)
    kinds = [*TABLE_SUFFIXES, *([] if _reads_whole_files(reading) else of_lines)]
    for kind in kinds[:1] if described else kinds:
        near = [f for f in files if f.suffix.lower() in kind and len(f.relative_to(root).parts) <= 2]
        near = [file for file in near if not described or split_role(_split_of(file))]
        near = [file for file in near if file.parent == root] or near
        folders = sorted({file.parent.name for file in near})
        if len(folders) > 1:
            listed = ", ".join(folders)
            raise FedstillError(f"data.source: '{root}' holds several datasets ({listed}); name one of these folders")
        if near:
            return near
    if _reads_whole_files(reading):  # with labels a text beside the folders of classes describes them
        texts = [file for file in files if file.suffix.lower() == ".txt"]
        texts = [file for file in texts if file.parent != root or not reading.labelled]
        if texts:
            return texts
    if not reading.labelled:
        images = [file for file in images if file.is_file()]  # a broken link is left out
    if not images:
        hint = ""
        if any(file.suffix.lower() == ".txt" for file in files):
            hint = "; to read class/*.txt as texts, set data.tokens, e.g. 64"
        raise FedstillError(f"data.source: '{root}' holds no parquet, CSV, JSON lines or image files{hint}")
    return images


def _reads_whole_files(reading: Reading) -> bool:
    """Return whether each .txt file is one text: with labels, or where the task's texts are such files."""
    return reading.text and (reading.labelled or reading.inputs == (TEXT_FILE,))


def _read_text(file: Path, reading: Reading) -> str:
    """Return a text file as one line; where data.missing skips rows, a file that is no UTF-8 text comes as ""."""
    try:
        return " ".join(read_lines(file))
    except FedstillError:
        if reading.missing == "refuse":
            raise
        return ""


def files_below(root: Path) -> list[Path]:
    """List every file of a folder and its folders, sorted, without hidden files and without folders of runs."""
    paths = (root / name for name in glob.iglob("**/*", root_dir=root, recursive=True))
    files = sorted(path for path in paths if not path.is_dir())
    runs = {file.parent for file in files if file.name == "config.toml"} - {root}
    return [file for file in files if not runs.intersection(file.parents)]


def _class_folders(
    files: list[Path], samples: Mapping[str, np.ndarray], root: Path, reading: Reading
) -> dict[str, Frame]:
    """Return the samples of root/[split/]class/**/file by split; without labels any arrangement, with their paths.

    There are splits when the folder 'train' holds folders and no files. Each level of folders above all files is a
    column: folder1, folder2, ... The class is folder1, unless data.label names another level.
    """
    paths = [file.relative_to(root.parent if root.is_file() else root) for file in files]
    depths = [len(path.parts) for path in paths if split_role(path.parts[0]) == "train"]
    first = 1 if depths and min(depths) > 2 else 0
    flat = [file for file, path in zip(files, paths, strict=True) if len(path.parts) < first + 2]
    if flat and reading.labelled:
        raise FedstillError(
            f"data.source: '{flat[0]}' is in no class folder; put each file in a folder named as its class"
        )
    columns = dict(samples)
    if not flat:
        shared = min(len(path.parts) for path in paths) - 1
        levels = {
            f"folder{number}": objects([path.parts[level] for path in paths])
            for number, level in enumerate(range(first, shared), 1)
        }
        if reading.label not in levels:
            columns["label"] = levels["folder1"]
        columns |= levels
    if not reading.labelled:
        columns["file"] = objects([path.as_posix() for path in paths])
    splits = np.array([path.parts[0] if first and not flat else "train" for path in paths])
    return {
        split: Frame({name: column[splits == split] for name, column in columns.items()})
        for split in dict.fromkeys(splits.tolist())
    }


def folder_columns(table: Frame) -> list[str]:
    """Return the columns that hold folders, one for each level: folder1, folder2, ..."""
    numbers = itertools.takewhile(lambda number: f"folder{number}" in table.columns, itertools.count(1))
    return [f"folder{number}" for number in numbers]


def _read_table(file: Path, reading: Reading, folder: Path) -> Frame:
    suffix, features = file.suffix.lower(), dict[str, Any]()
    if suffix in (".csv", ".tsv"):
        return read_csv(file, reading=reading)
    if suffix == ".txt":
        return Frame({(*reading.inputs, "text")[0]: objects(read_lines(file))})
    if suffix == ".jsonl":
        table = read_json_lines(file)
    else:
        with ParquetFile(file) as parquet:
            table, features = parquet.table(), parquet.features
    with readable(file, "readable parquet" if suffix == ".parquet" else "readable JSON lines"):
        return frame_from_arrow(table, features, reading, paths_of(file.parent, folder))


class CsvFile:
    """A table with a header line in a text file: its columns, and its rows in pieces."""

    def __init__(self, file: Path, delimiter: str | None = None) -> None:
        self.file = file
        check_lines(file)
        with self._readable(), file.open(encoding="utf-8-sig") as lines:
            header = lines.readline()
            separator = delimiter or max(",;\t|", key=header.count)
            check_columns(header.count(separator) + 1, f"'{file}'")
            first = list(itertools.islice(lines, LINES_OF_A_LOOK))
        decimal = "," if separator != "," and any(_DECIMAL_COMMA.search(line) for line in first) else "."
        self._form: dict[str, Any] = {
            "sep": separator,
            "decimal": decimal,
            "encoding": "utf-8-sig",
            "compression": None,
        }
        release = tuple(map(int, require_extra("pandas").__version__.split(".")[:2]))
        if release < EXACT_PANDAS:
            self._form["float_precision"] = "round_trip"
        self.header = self._checked_header()

    @property
    def decimal(self) -> str:
        """The decimal mark: a comma where cells such as 32,1 are set apart by another sign."""
        return str(self._form["decimal"])

    def pieces(self, *, words: Collection[str]) -> Iterator[dict[str, np.ndarray]]:
        """Yield all columns of ROWS_AT_ONCE rows: numbers where all cells are numbers, else cells as written.

        words: the columns whose cells come as written in any case. A cell without a value is NaN or "".
        """
        kinds = {place: object for place, name in enumerate(self.header) if name in words}
        gaps = {place: _MISSING_SPELT for place in range(len(self.header)) if place not in kinds}
        places = range(len(self.header))
        form = {"header": 0, "names": places, "usecols": places, "index_col": False, "dtype": kinds, **self._form}
        form |= {"keep_default_na": False, "na_values": gaps, "low_memory": False, "chunksize": ROWS_AT_ONCE}
        with self._readable(), require_extra("pandas").read_csv(self.file, **form) as chunks:
            for cells in chunks:
                if cells.empty:
                    raise FedstillError(f"data.source: '{self.file}' has a header and no rows")
                yield {
                    name: _cells(cells[place], decimal="." if place in kinds else self.decimal)
                    for place, name in enumerate(self.header)
                }

    def uneven_rows(self) -> dict[int, str]:
        """Return the rows with more or fewer cells than the header, because their cells may stand in wrong columns.

        Rows are counted from 0. Empty cells beyond the last column do not count, because spreadsheets leave some.
        """
        width, separator, uneven = len(self.header), self._form["sep"], dict[int, str]()
        words = dict[int, str]()  # one text for all rows of a length, because a file may hold millions of them
        with self._readable(), self.file.open(encoding="utf-8-sig", newline="") as lines:
            plain = all('"' not in line and "\r" not in line.removesuffix("\r\n") for line in lines)
            lines.seek(0)
            csv.field_size_limit(LONGEST_LINE)  # of the module: a text of 131,072 letters would be an error
            rows = (
                (line.rstrip("\r\n").split(separator) for line in lines)
                if plain
                else csv.reader(lines, delimiter=separator)
            )
            filled = (cells for cells in rows if len(cells) > 1 or "".join(cells).strip())
            for row, cells in enumerate(filled, start=-1):  # the first line is the header
                if len(cells) != width and (len(cells) < width or any(cells[width:])):
                    count = len(cells)
                    uneven[row] = words.setdefault(count, f"has {count} cells, and the first line has {width}")
        return uneven

    def _checked_header(self) -> list[str]:
        """Return the names of the columns, and refuse a table without names or rows."""
        pandas, file = require_extra("pandas"), self.file
        with self._readable():
            try:
                cells = pandas.read_csv(file, header=None, dtype=object, na_filter=False, nrows=1, **self._form)
            except pandas.errors.EmptyDataError:
                cells = pandas.DataFrame([[""]])
        header = [str(name).strip() for name in cells.iloc[0]]
        if "" in header or len(set(header)) < len(header):
            raise FedstillError(f"data.source: the first line of '{file}' must name every column once")
        if all(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", name, re.IGNORECASE) for name in header):
            raise FedstillError(f"data.source: '{file}' has no header; add a first line with the names of its columns")
        return header

    def _readable(self) -> contextlib.AbstractContextManager[None]:
        return readable(self.file, "a UTF-8 CSV file")


def _cells(column: Any, *, decimal: str) -> np.ndarray:
    """Return a column of pandas as numbers, or as words as written; numbers among words get a decimal point."""
    if column.dtype.kind in "ifu":
        numbers: np.ndarray = column.to_numpy()
        return numbers.astype(np.float64) if column.dtype.kind == "u" else numbers  # u: numbers beyond int64
    words = ["" if isinstance(cell, float) else from_cell(str(cell)) for cell in column.tolist()]
    if decimal == ",":
        words = [word.replace(",", ".") if _WITH_COMMA.fullmatch(word) else word for word in words]
    return objects(words)


def read_csv(
    file: Path, *, delimiter: str | None = None, reading: Reading | None = None, words: Collection[str] = ()
) -> Frame:
    """Read a table with a header line; a column becomes integers, else numbers, else words.

    Columns of `words`, and of words in the task (`reading.like`), stay words. Ids of rows without labels stay as they
    are written. Of words that are nearly all numbers with a decimal comma, these get a point.
    """
    table, reading = CsvFile(file, delimiter), reading or Reading()
    ids = {name for name in table.header if _as_written(name, reading)}
    words = {*words, *(column.name for column in reading.like if column.words)}
    first = next(table.pieces(words=words | ids))
    if uneven := table.uneven_rows():
        rows = np.fromiter(uneven, np.int64)
        raise FedstillError(
            f"data.source: '{file}': {row_numbers(rows)} {uneven[rows[0]]}: put cells with the separator in quotes"
        )
    spelt = {name for name, cells in first.items() if cells.dtype == object}  # pandas sees no numbers: `_parse` looks
    parsed: dict[str, list[np.ndarray]] = {name: [] for name in table.header}
    read_again = set[str]()  # columns of words that began with numbers
    for piece in table.pieces(words=spelt):
        for name, cells in piece.items():
            if cells.dtype == object and name not in ids:
                cells = _parse(cells, as_words=name in words)
                if cells.dtype == object and name not in words:
                    words.add(name)
                    read_again |= {name} if parsed[name] or name not in spelt else set()
            parsed[name].append(cells)
    for name in read_again:
        parsed[name] = [_parse(piece[name], as_words=True) for piece in table.pieces(words=words)]
    columns = {name: np.concatenate(parsed.pop(name)) for name in table.header}
    if table.decimal == ",":
        columns |= {name: _with_points(columns[name]) for name in words - ids if name in columns}
    return Frame(columns)


def _with_points(words: np.ndarray) -> np.ndarray:
    """Return words with a point for each decimal comma, if nearly all of them are numbers then."""
    cells = [cell.replace(",", ".") if _WITH_COMMA.fullmatch(cell) else cell for cell in words.tolist()]
    filled = [cell for cell in cells if cell]
    return objects(cells) if sum(map(is_number, filled)) >= (1 - MAX_ODD_SHARE) * len(filled) else words


def _parse(cells: np.ndarray, *, as_words: bool) -> np.ndarray:
    """Return cells as integers, else numbers, else words without spaces around them; NA and null are no value."""
    if not as_words:
        for dtype in (np.int64, np.float64):
            with contextlib.suppress(ValueError, OverflowError):
                return cells.astype(dtype)
    texts = cells.tolist()
    spelt = {text: "" if text.strip().lower() in MISSING_WORDS else sys.intern(text.strip()) for text in set(texts)}
    words = objects([spelt[text] for text in texts])
    with contextlib.suppress(ValueError):
        return words if as_words else np.where(words == "", "nan", words).astype(np.float64)
    return words


def _as_written(name: str, reading: Reading) -> bool:
    """Return whether a column may name rows without labels; such ids stay as written, because 007 is not 7."""
    return not reading.labelled and may_name_rows(name, reading)


def frames_from_hf(dataset: Any, reading: Reading, place: Callable[[str], Path] = Path) -> dict[str, Frame]:
    """Return the frames of a Hugging Face Dataset, or of a DatasetDict (any mapping from split to Dataset)."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    frames = {}
    for split, rows in splits.items():
        if not hasattr(rows, "with_format") or not hasattr(rows, "__len__"):
            raise FedstillError(f"data.source: expected a datasets.Dataset or DatasetDict, got {type(rows).__name__}")
        frames[str(split)] = frame_from_arrow(rows.with_format("arrow")[:], rows.features.to_dict(), reading, place)
    return frames


def frame_from_arrow(
    table: Any, features: Mapping[str, Any], reading: Reading, place: Callable[[str], Path] = Path
) -> Frame:
    """Return the columns of an Arrow table; `features` is its Hugging Face description, {} if there is none.

    place: where the file of an image lies that a cell names; a table from elsewhere may name files of its folder only.
    """
    columns: dict[str, np.ndarray] = {}
    names: dict[str, tuple[str, ...]] = {}
    if len(set(table.column_names)) < len(table.column_names):
        raise FedstillError("data.source: a table must name every column once")
    for name in table.column_names:
        column = _arrow_column(table[name], place, as_written=_as_written(name, reading))
        if column is not None:
            columns[name] = column
        described = features.get(name, {})
        if isinstance(described, dict) and described.get("_type") == "ClassLabel" and described.get("names"):
            names[name] = _class_names(described["names"], name)
    return Frame(columns, names)


def _class_names(stated: Any, column: str) -> tuple[str, ...]:
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        raise FedstillError(f"data.label: the class names of column '{column}' must be a list of words")
    if len(set(stated)) < len(stated):
        raise FedstillError(f"data.label: the class names of column '{column}' hold one name twice")
    return tuple(stated)


def _arrow_column(column: Any, place: Callable[[str], Path], *, as_written: bool) -> np.ndarray | None:
    """Return images as bytes or paths, numbers and words as arrays; None for dates, maps, ragged lists."""
    arrow, kind = require_extra("pyarrow"), column.type
    if isinstance(kind, arrow.BaseExtensionType):  # Array2D, Array3D of Hugging Face
        column, kind = arrow.chunked_array([chunk.storage for chunk in column.chunks]), kind.storage_type
    whole = arrow.types.is_integer(kind)
    if (whole and not as_written) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind):
        numbers: np.ndarray = (column.cast(arrow.float64()) if column.null_count else column).to_numpy()
        return numbers
    values = column.to_pylist()
    first = next((value for value in values if value is not None), "")
    if isinstance(first, str) or (as_written and isinstance(first, int | Decimal | date | UUID)):
        return objects(["" if value is None else str(value) for value in values])
    if isinstance(first, bytes) or (isinstance(first, dict) and "bytes" in first):
        return objects([_blob(value if isinstance(value, dict) else {"bytes": value}, place) for value in values])
    if isinstance(first, list):
        while hasattr(kind, "value_type"):
            kind = kind.value_type
        try:
            array = np.array(values, dtype=kind.to_pandas_dtype())
        except (ValueError, TypeError):
            return None
        return array if array.dtype.kind in "biuf" else None
    return None


def _blob(image: Mapping[str, Any], place: Callable[[str], Path]) -> bytes | Path:
    blob, path = image.get("bytes"), image.get("path")
    if blob is None:
        return place(path) if isinstance(path, str) and path else b""
    if not isinstance(blob, bytes):
        raise FedstillError(f"data.source: an image is bytes, and a cell holds a {type(blob).__name__}")
    return blob


def paths_of(start: Path, folder: Path) -> Callable[[str], Path]:
    """Return a function from the path in a cell to a file; paths count from `start`, and none leads out of `folder`.

    Without it a table could have any file of this machine opened as an image.
    """

    def place(path: str) -> Path:
        file = start / path
        if "\0" in path or not is_inside(file, folder):
            raise FedstillError(
                f"data.source: a cell names the file '{path}', which is not in the data's folder '{folder}': put the "
                "image there, or its bytes into the table"
            )
        if os.path.exists(file):  # a file that is not there, or whose name is too long, is an image that cannot be read
            check_file(file, folder)
        return file

    return place


def frames_from_hub(identifier: str, known: list[str], reading: Reading) -> dict[str, Frame]:
    """Download 'owner/name' or 'owner/name:configuration' from the Hugging Face hub; any failure is one line."""
    datasets, hub = require_extra("datasets"), require_extra("huggingface_hub")
    repository, _, configuration = identifier.partition(":")
    try:
        try:
            hub.HfApi().dataset_info(repository, timeout=10)
        except Exception:
            # load_dataset would retry for half a minute; only a copy in its own cache can still help
            if not (Path(datasets.config.HF_DATASETS_CACHE) / repository.replace("/", "___")).exists():
                raise
        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:
        raise FedstillError(
            f"data.source: '{identifier}' is neither an embedded set nor a file or folder here, "
            f"and the Hugging Face hub did not give it ({first_line(error)}); {suggest(identifier, known)}"
        ) from error
    kept = Path(datasets.config.HF_CACHE_HOME)
    return frames_from_hf(loaded, reading, paths_of(kept, kept))
