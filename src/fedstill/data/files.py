"""Files, folders and Hugging Face objects to frames: one Frame a split, nothing decoded yet."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Collection, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from fedstill.core.errors import FedstillError, suggest
from fedstill.data.images import IMAGE_SUFFIXES
from fedstill.data.source import Reading, first_line, require_extra
from fedstill.data.tables import Column, Frame, is_id, split_role
from fedstill.data.text import read_lines

MISSING_WORDS = frozenset({"", "na", "n/a", "nan", "null"})
CSV_SUFFIXES = frozenset({".csv", ".tsv"})
SHARD = re.compile(r"(?P<split>.+)-\d+-of-(?P<parts>\d+)")
NPZ_LAYOUTS = (  # (split, inputs, labels) by array name: Keras, MedMNIST, a single pair
    (("train", "x_train", "y_train"), ("test", "x_test", "y_test")),
    (("train", "train_images", "train_labels"), ("test", "test_images", "test_labels")),
    (("train", "x", "y"),),
)


class Contents(NamedTuple):
    """The splits of a source and what was noticed while reading them."""

    frames: dict[str, Frame]
    notes: tuple[str, ...] = ()


def read_files(files: list[Path], root: Path, reading: Reading) -> Contents:
    """Read what `files_of(root)` found, by the kind of the files."""
    suffix = files[0].suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return Contents(_image_folder(files, root.parent if root.is_file() else root, labelled=reading.labelled))
    if suffix == ".npz":
        return Contents(_read_npz(files[0], labelled=reading.labelled))
    if root.is_file():
        return Contents({"train": _read_one(root, reading)})
    shards: dict[str, list[Path]] = {}
    notes = []
    for file in files:
        shards.setdefault(_split_of(file), []).append(file)
    for split, parts in shards.items():
        found = SHARD.fullmatch(parts[0].stem)
        if found and len(parts) < int(found["parts"]):
            notes.append(f"{split}: {len(parts)} of {int(found['parts'])} files are here")
    if not any(split_role(split) for split in shards):  # plain names: parts of one set
        shards = {"train": files}
    return Contents(
        {split: _stack([_read_one(file, reading) for file in parts]) for split, parts in shards.items()}, tuple(notes)
    )


def _split_of(file: Path) -> str:
    found = SHARD.fullmatch(file.stem)
    return found["split"] if found else file.stem


def files_of(root: Path, reading: Reading | None = None) -> list[Path]:
    """The data files of a source on disk, sorted: one file, a folder's tables (or its only sub-folder's), or images.

    Where only images are wanted (`reading.fit`), a table beside them describes them; it is not the data, unless it is
    a parquet file called train, test or the like. Without labels, files are named: a name that is no text will not do.
    """
    reading = reading or Reading()
    lines = {".txt"} if reading.text and not reading.labelled else set[str]()
    known = {".parquet", ".npz", *CSV_SUFFIXES, *lines, *(IMAGE_SUFFIXES if not reading.labelled else ())}
    if root.is_file():
        if root.suffix.lower() not in known:
            named = ", ".join(sorted(known - IMAGE_SUFFIXES))
            raise FedstillError(f"data.source: cannot read '{root}'; give a folder or a file of {named}")
        return [root]
    images = None if reading.fit is None else _with_suffix(files_below(root), IMAGE_SUFFIXES)
    tables = ({".parquet"},) if images else ({".parquet"}, CSV_SUFFIXES, *([lines] if lines else []))
    sub_folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    for suffixes in tables:
        for folders in ([root], sub_folders):
            tables_of = (_with_suffix(_files_in(folder), suffixes) for folder in folders)
            if images:
                tables_of = ([file for file in files if split_role(_split_of(file))] for files in tables_of)
            holding = [files for files in tables_of if files]
            if len(holding) == 1:
                return holding[0]
            if holding:
                told = ", ".join(files[0].parent.name for files in holding)
                raise FedstillError(f"data.source: '{root}' holds several datasets ({told}); name one of these folders")
    found = _with_suffix(files_below(root), IMAGE_SUFFIXES) if images is None else images
    if not reading.labelled:
        found = [file for file in found if file.is_file() and is_text(str(file.relative_to(root)))]  # or a broken link
    if not found:
        raise FedstillError(f"data.source: '{root}' holds no parquet, CSV or image files")
    return found


def files_below(root: Path) -> list[Path]:
    """Every file of a folder and its folders, sorted; hidden ones and those in hidden folders are not meant."""
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(here / name)]
        found += [here / name for name in names if not name.startswith(".")]
    return sorted(found)


def printable(path: Path) -> str:
    """The path; escaped, where its bytes are no UTF-8 and it could not be printed."""
    return path.as_posix() if is_text(path.as_posix()) else repr(path.as_posix())


def is_text(name: str) -> bool:
    """False for names of files that are no UTF-8, whose bytes Python marks by surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _leads_back(folder: Path) -> bool:
    """A link to a folder that it lies in."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.is_dir() and not path.name.startswith("."))


def _with_suffix(files: list[Path], suffixes: Collection[str]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in suffixes]


def _image_folder(files: list[Path], root: Path, *, labelled: bool) -> dict[str, Frame]:
    """Images and their classes; without labels also the path of each, and any arrangement of folders will do."""
    paths = [file.relative_to(root).as_posix() for file in files]
    try:
        splits, classes = _class_folders(files, root)
    except FedstillError:
        if labelled:
            raise
        return {"train": Frame({"image": list(files), "file": _words(paths)})}
    frames = {}
    for split, rows in splits.items():
        columns: dict[str, Column] = {"image": [files[row] for row in rows]}
        columns["label"] = _words([classes[row] for row in rows])
        if not labelled:
            columns["file"] = _words([paths[row] for row in rows])
        frames[split] = Frame(columns)
    return frames


def _class_folders(files: list[Path], root: Path) -> tuple[dict[str, list[int]], list[str]]:
    """(rows of each split, class of each file) of root/[split/]class/**/image.

    The split level is there when 'train' holds folders and no images.
    """
    parts = [file.relative_to(root).parts for file in files]
    depths = [len(part) for part in parts if split_role(part[0]) == "train"]
    level = 1 if depths and min(depths) > 2 else 0
    flat = [file for file, part in zip(files, parts, strict=True) if len(part) < level + 2]
    if flat:
        raise FedstillError(
            f"data.source: '{flat[0]}' is in no class folder; put images in a folder named as their class"
        )
    unprintable = next((part for part in parts if not is_text(part[level])), None)
    if unprintable:
        raise FedstillError(f"data.source: the name of folder {unprintable[level]!r} is not UTF-8; rename it")
    splits: dict[str, list[int]] = {}
    for row, part in enumerate(parts):
        splits.setdefault(part[0] if level else "train", []).append(row)
    return splits, [part[level] for part in parts]


def _read_one(file: Path, reading: Reading) -> Frame:
    if file.suffix.lower() in CSV_SUFFIXES:
        return read_csv(file, reading=reading)
    if file.suffix.lower() == ".txt":
        return Frame({(*reading.inputs, "text")[0]: _words(read_lines(file))})
    return _read_parquet(file, reading)


def _stack(frames: list[Frame]) -> Frame:
    frames = [frame for frame in frames if frame.rows] or frames[:1]
    if len(frames) == 1:
        return frames[0]
    columns: dict[str, Column] = {}
    for name in frames[0].columns:
        parts = [frame.columns.get(name) for frame in frames]
        if any(part is None for part in parts):
            raise FedstillError(f"data.source: column '{name}' is missing in one of the files")
        if isinstance(parts[0], list):
            columns[name] = [blob for part in parts for blob in part]  # type: ignore[union-attr]
        else:
            columns[name] = np.concatenate(parts)  # type: ignore[arg-type]
    return Frame(columns, frames[0].names)


def _read_npz(file: Path, *, labelled: bool) -> dict[str, Frame]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise FedstillError(f"data.source: '{file}' is not a readable npz file ({first_line(error)})") from error
    for layout in NPZ_LAYOUTS:
        if all(x in arrays and (y in arrays or not labelled) for _, x, y in layout):
            frames = {split: {"x": arrays[x]} | ({"label": arrays[y]} if y in arrays else {}) for split, x, y in layout}
            return {
                split: Frame({n: _plain_array(a, n) for n, a in columns.items()}) for split, columns in frames.items()
            }
    expected = " or ".join("/".join(x + "," + y for _, x, y in layout) for layout in NPZ_LAYOUTS)
    raise FedstillError(f"data.source: '{file}' holds {', '.join(arrays) or 'nothing'}; expected {expected}")


def _plain_array(array: np.ndarray, name: str) -> np.ndarray:
    flat = array.reshape(len(array)) if name == "label" and array.size == len(array) else array
    return flat.astype(object) if flat.dtype.kind == "U" else flat


def read_csv(file: Path, *, delimiter: str | None = None, reading: Reading | None = None) -> Frame:
    """A table with a header line; a column is integers, else numbers, else words.

    Columns of words in the task (`reading.like`) are words at once; ids of rows without labels are left as written.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            first = text.readline()
            text.seek(0)
            rows = csv.reader(text, delimiter=delimiter or max(",;\t|", key=first.count), strict=True)
            header = [name.strip() for name in next(rows, [])]
            _check_header(header, file)
            cells = []
            for row in rows:
                if row and len(row) != len(header):
                    raise FedstillError(
                        f"data.source: line {rows.line_num} of '{file}' has {len(row)} cells, the header {len(header)}"
                    )
                if row:
                    cells.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FedstillError(f"data.source: '{file}' is not a UTF-8 CSV file ({first_line(error)})") from error
    if not cells:
        raise FedstillError(f"data.source: '{file}' has a header and no rows")
    columns = dict(zip(header, zip(*cells, strict=True), strict=True))
    reading = reading or Reading()
    words = {column.name for column in reading.like if column.words}
    return Frame(
        {
            name: _words(list(column)) if _as_text(name, reading) else _parse(column, as_words=name in words)
            for name, column in columns.items()
        }
    )


def _as_text(name: str, reading: Reading) -> bool:
    return not reading.labelled and is_id(name, reading)


def _check_header(header: list[str], file: Path) -> None:
    if not header or "" in header or len(set(header)) < len(header):
        raise FedstillError(f"data.source: the first line of '{file}' must name every column once")
    if all(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", name, re.IGNORECASE) for name in header):
        raise FedstillError(f"data.source: '{file}' has no header; add a first line with the names of its columns")


def _parse(cells: tuple[str, ...], *, as_words: bool = False) -> np.ndarray:
    stripped = ["" if cell.strip().lower() in MISSING_WORDS else cell.strip() for cell in cells]
    for dtype, missing in () if as_words else ((np.int64, ""), (np.float64, "nan")):
        try:
            return np.array([cell or missing for cell in stripped], dtype=np.str_).astype(dtype)
        except (ValueError, OverflowError):
            continue
    return _words(stripped)


def _words(words: list[str]) -> np.ndarray:
    array = np.empty(len(words), object)
    array[:] = words
    return array


def _read_parquet(file: Path, reading: Reading) -> Frame:
    parquet, arrow = require_extra("pyarrow.parquet"), require_extra("pyarrow")
    try:
        table = parquet.read_table(file)
    except (OSError, arrow.ArrowException) as error:
        raise FedstillError(f"data.source: '{file}' is not readable parquet ({first_line(error)})") from error
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    return frame_from_arrow(table, metadata.get("info", {}).get("features", {}), reading)


def frames_from_hf(dataset: Any, reading: Reading) -> dict[str, Frame]:
    """A Hugging Face Dataset, or a DatasetDict (any mapping from split to Dataset)."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    frames = {}
    for split, rows in splits.items():
        if not hasattr(rows, "with_format") or not hasattr(rows, "__len__"):
            raise FedstillError(f"data.source: expected a datasets.Dataset or DatasetDict, got {type(rows).__name__}")
        frames[str(split)] = frame_from_arrow(rows.with_format("arrow")[:], rows.features.to_dict(), reading)
    return frames


def frame_from_arrow(table: Any, features: Mapping[str, Any], reading: Reading) -> Frame:
    """Columns of an Arrow table; `features` is the Hugging Face description of it, {} if there is none."""
    columns: dict[str, Column] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name in table.column_names:
        ids = _arrow_ids(table[name]) if _as_text(name, reading) else None
        column = _arrow_column(table[name]) if ids is None else ids
        if column is not None:
            columns[name] = column
        described = features.get(name, {})
        if isinstance(described, dict) and described.get("_type") == "ClassLabel" and described.get("names"):
            names[name] = tuple(described["names"])
    return Frame(columns, names)


def _arrow_ids(column: Any) -> np.ndarray | None:
    """Ids as text, "" where one is missing; None for what names nothing (images, vectors, fractions)."""
    types = require_extra("pyarrow").types
    if types.is_nested(column.type) or types.is_binary(column.type) or types.is_large_binary(column.type):
        return None
    values = column.to_pylist()
    if not all(value is None or isinstance(value, str | int | Decimal | date | UUID) for value in values):
        return None
    return _words(["" if value is None else str(value) for value in values])


def _arrow_column(column: Any) -> Column | None:
    """Images as bytes or paths, numbers and words as arrays; None for types that are neither (dates, maps)."""
    arrow = require_extra("pyarrow")
    kind = column.type
    if isinstance(kind, arrow.BaseExtensionType):  # Array2D, Array3D of Hugging Face
        column, kind = arrow.chunked_array([chunk.storage for chunk in column.chunks]), kind.storage_type
    if arrow.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return [_blob(image) for image in column.to_pylist()]
    if arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind):
        return [_blob({"bytes": image}) for image in column.to_pylist()]
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        return _words([word or "" for word in column.to_pylist()])
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind):
        return _nested(column)
    if arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind):
        if column.null_count:
            column = column.cast(arrow.float64())
        numbers: np.ndarray = column.to_numpy()
        return numbers
    return None


def _nested(column: Any) -> np.ndarray | None:
    """Lists of equal length as one array with the type of their numbers; None if they are ragged or hold words."""
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    try:
        array = np.array(column.to_pylist(), dtype=kind.to_pandas_dtype())
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _blob(image: Mapping[str, Any] | None) -> bytes | Path:
    if image and image.get("bytes") is not None:
        return bytes(image["bytes"])
    return Path(image["path"]) if image and image.get("path") else b""


def frames_from_hub(identifier: str, known: list[str], reading: Reading) -> dict[str, Frame]:
    """Download 'owner/name' (or 'owner/name:configuration') with Hugging Face datasets; any failure is one line."""
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
    return frames_from_hf(loaded, reading)
