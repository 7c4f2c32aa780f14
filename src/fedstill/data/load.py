"""Load a Source from a name, a path, a hub id, a Hugging Face object, tensors or a CSV file.

>>> source = load("digits")
>>> tuple(source.train.x.shape), len(source.test.y), source.train.x.dtype
((1438, 1, 8, 8), 359, torch.uint8)
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from fedstill.core.data import InputColumn
from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset, Tree
from fedstill.data.files import files_of, frames_from_hf, frames_from_hub, read_csv, read_files
from fedstill.data.source import Reading, Source, as_array, first_line, stratified_holdout
from fedstill.data.tables import Frame, assemble, storage_form
from fedstill.data.text import pack, text_source, unpack
from fedstill.storage.cache import Cache

FORMAT = 7  # raise it when sources are decoded otherwise
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")
FILE_SUFFIX = re.compile(r"\.(csv|tsv|txt|parquet|npz|npy|jsonl?|zip|gz|png|jpe?g)$", re.IGNORECASE)
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


class Listing(NamedTuple):
    """A line of `fedstill list datasets`; the numbers are None where they depend on the data."""

    name: str
    summary: str
    rows: tuple[int, int] | None  # train, test
    shape: tuple[int, ...] | None
    classes: int | None


def _source_of(frames: Mapping[str, Frame], reading: Reading, **facts: Any) -> Source:
    return (assemble if reading.window is None else text_source)(frames, reading, **facts)


def _digits(reading: Reading) -> Source:
    """Read scikit-learn's file without importing scikit-learn, because the import takes as long as that of torch."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    x = np.round(table[:, :-1].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)
    y = table[:, -1].astype(np.int64)
    kept, held_out = stratified_holdout(y, 0.2)
    frames = {
        split: Frame({"image": x[rows], "label": y[rows]}) for split, rows in (("train", kept), ("test", held_out))
    }
    source = _source_of(frames, reading, name="digits", origin="digits")
    return source._replace(rows={"train": kept, "test": held_out}) if reading.labelled else source


def _fashion_mini(reading: Reading) -> Source:
    path = Path(__file__).parent / "embedded" / "fashion_mnist_mini.npz"
    names = {"label": FASHION_CLASSES}
    with np.load(path, allow_pickle=False) as archive:
        frames = {
            split: Frame({"image": archive[f"x_{split}"], "label": archive[f"y_{split}"]}, names)
            for split in ("train", "test")
        }
    return _source_of(frames, reading, name="fashion-mini", origin="fashion-mini")


EMBEDDED: dict[str, tuple[Callable[[Reading], Source], Listing]] = {
    "digits": (
        _digits,
        Listing("digits", "handwritten digits of scikit-learn (UCI), 8x8 grey", (1438, 359), (1, 8, 8), 10),
    ),
    "fashion-mini": (
        _fashion_mini,
        Listing("fashion-mini", "first 600 + 100 of each class of Fashion-MNIST", (6000, 1000), (1, 28, 28), 10),
    ),
}


def _embedded_name(source: str) -> str:
    return source.lower().replace("_", "-")


def is_embedded(source: str) -> bool:
    """Return whether a source is a set that ships with the package; it comes before a folder of that name."""
    return _embedded_name(source) in EMBEDDED


def fingerprint(files: Iterable[Path]) -> str:
    """Return a text that changes when a file is added, removed, renamed or written again, even under its old date."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        facts = f"\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n"
        digest.update(os.fsencode(file) + facts.encode())  # a name need not be UTF-8
    return digest.hexdigest()


def _as_tree(source: Source) -> Tree:
    train, test = source.train, source.test
    return {
        **{name: getattr(train, name) for name in ("name", "classes", "mean", "std", "columns", "label")},
        "train": {"x": train.x, "y": train.y},
        "test": {"x": test.x, "y": test.y},
        "keys": dict(source.keys),
        "rows": dict(source.rows),
        "texts": {} if source.texts is None else dict(zip(("blob", "ends"), pack(source.texts), strict=True)),
        **{name: getattr(source, name) for name in ("notes", "origin", "skipped")},
    }


def _as_source(tree: Tree) -> Source:
    about: dict[str, Any] = {name: tuple(tree[name]) for name in ("classes", "mean", "std")}
    about["columns"] = tuple(
        InputColumn(name, width, tuple(words), *rules) for name, width, words, *rules in tree["columns"]
    )
    about["label"] = tree["label"]
    train, test = (Dataset(tree["name"], **tree[split], **about) for split in ("train", "test"))
    return Source(
        train,
        test,
        tree["keys"],
        tuple(tree["notes"]),
        tree["origin"],
        rows=tree["rows"],
        skipped=tuple(tree["skipped"]),
        texts=unpack(**tree["texts"]) if tree["texts"] else None,
    )


class Options(TypedDict, total=False):
    """The options of `load`; `Reading` states their meaning and defaults."""

    label: str | None
    inputs: Sequence[str]
    keys: Sequence[str]
    size: int | None
    window: int | None
    text: bool
    seed: int
    drop: Sequence[str]
    missing: str
    unknown: str
    like: tuple[InputColumn, ...]
    like_classes: Sequence[str]
    fit: tuple[int, int] | None
    held_out: float


def load(
    source: str | Path,
    reading: Reading | None = None,
    *,
    cache_dir: str | Path | None = None,
    refresh: bool = False,
    **options: Unpack[Options],
) -> Source:
    """Load an embedded set, a file or folder (parquet, CSV, npz, images), or a Hugging Face hub id.

    label, inputs: columns; without them the names and types of columns decide. keys: columns to partition by, never
    inputs. size: resize images to size x size. window: read text in windows of so many characters, whose label is the
    next character. text: read one column of text whole; `tokenise` then makes ids of it.
    drop: columns to leave out. missing, unknown: rules for cells without a value and for new words (see Reading).
    like, like_classes, fit: columns, classes, and height and width of images that parties agreed on (see Reading).
    seed: draws the held-out fifth, where there is no test split; held_out: another share.
    reading: these options as one value.
    The cache keeps a hub id for good; refresh=True reads any source again.
    """
    reading = replace(reading or Reading(), **options)
    text = str(source)
    if isinstance(source, str) and is_embedded(source):
        return EMBEDDED[_embedded_name(source)][0](reading)
    if not text.strip():
        raise FedstillError("data.source is empty; see: fedstill list datasets")
    name, origin, stamp = text.partition(":")[0].rpartition("/")[2], f"hub:{text}", "hub"
    files: list[Path] = []
    try:
        root = Path(os.path.expanduser(source))
        if root.exists():
            root = root.resolve()
            files = files_of(root, reading)
            name, origin, stamp = root.stem, str(root), fingerprint(files)
        elif _is_path(source):
            hint = "" if root.is_absolute() else " (paths count from the current folder, not from a file that has them)"
            raise FedstillError(f"data.source: no such file or folder: '{source}'{hint}")
        cache = Cache("data", None if cache_dir is None else Path(cache_dir).expanduser())
        identity = {"format": FORMAT, "origin": origin, "reading": asdict(reading)}
        tree = None if refresh else cache.load(identity)
        if tree is not None and tree["stamp"] == stamp:
            return _as_source(tree)
        if files:
            frames, notes = read_files(files, root, reading)
        else:
            frames, notes = frames_from_hub(text, list(EMBEDDED), reading), []
        loaded = _source_of(frames, reading, name=name, origin=origin, notes=notes)
        cache.save(identity, {"stamp": stamp, **_as_tree(loaded)})
        return loaded
    except OSError as error:
        raise FedstillError(f"data.source: cannot read '{source}' ({first_line(error)})") from error
    except MemoryError as error:
        raise FedstillError(f"data.source: '{source}' does not fit into the memory of this machine") from error


def _is_path(source: str | Path) -> bool:
    """Return whether a text means a path and not a hub id: by its form, or because its first folder exists."""
    text = str(source)
    if isinstance(source, Path) or not HUB_ID.fullmatch(text) or FILE_SUFFIX.search(text):
        return True
    return "/" in text and Path(text.partition("/")[0]).is_dir()


def from_csv(path: str | Path, *, delimiter: str | None = None, **options: Unpack[Options]) -> Source:
    """Read a CSV file of any suffix: numbers as they are, words one-hot; a fifth of the rows is the test set."""
    file, reading = Path(path).expanduser(), Reading(**options)
    if not file.is_file():
        raise FedstillError(f"data.source: no such file: '{path}'")
    frames = {"train": read_csv(file, delimiter=delimiter)}
    return _source_of(frames, reading, name=file.stem, origin=str(file.resolve()))


def from_hf(dataset: Any, *, name: str = "dataset", **options: Unpack[Options]) -> Source:
    """Read a Hugging Face Dataset or DatasetDict with Image, ClassLabel, number, vector or string columns."""
    reading = Reading(**options)
    return _source_of(frames_from_hf(dataset, reading), reading, name=name, origin="")


def from_tensors(
    x: Any,
    y: Any,
    *,
    test: tuple[Any, Any] | float = 0.2,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    name: str = "tensors",
) -> Source:
    """Make a Source of tensors or arrays: images (n, [channels,] h, w) as uint8 or float, anything 2-d as a table.

    test is a pair (x, y) or the share of rows to hold out, stratified. Labels that are not 0..K-1 are renumbered
    in order, unless `classes` names the classes 0..K-1.
    """
    frames = {"train": _tensor_frame(x, y, classes)}
    reading = Reading(label="y", inputs=("x",), seed=seed)
    if isinstance(test, tuple):
        frames["test"] = _tensor_frame(*test, classes)
    else:
        reading = replace(reading, held_out=float(test))
    return assemble(frames, reading, name=name, origin="")


def _tensor_frame(x: Any, y: Any, classes: Sequence[str] | None) -> Frame:
    samples, labels = as_array(x), as_array(y)
    if labels.ndim != 1 or samples.ndim < 1 or len(samples) != len(labels) or len(labels) == 0:
        raise FedstillError(f"expected x (n, ...) and y (n,) of one length, got {samples.shape} and {labels.shape}")
    if samples.dtype.kind not in "biuf":
        raise FedstillError(f"x must hold numbers, got {samples.dtype}")
    labels = labels.astype(object) if labels.dtype.kind == "U" else labels
    names = {} if classes is None else {"y": tuple(classes)}
    return Frame({"x": storage_form(samples), "y": labels}, names)


def describe_datasets() -> list[Listing]:
    """List the embedded sets, and the ways to name other data."""
    return [
        *(listing for _, listing in EMBEDDED.values()),
        Listing("FOLDER", "a folder of train-*.parquet and test-*.parquet, or of class/image files", None, None, None),
        Listing(
            "FILE", "a .csv, .parquet or .npz file; columns by data.label, data.inputs, data.keys", None, None, None
        ),
        Listing("OWNER/NAME", "a Hugging Face hub id such as uoft-cs/cifar10", None, None, None),
    ]
