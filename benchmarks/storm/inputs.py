# ruff: noqa: E501
"""Files and messages to damage, by kind: valid ones, hostile ones made by hand, and the reader of each kind.

A `Kind` has a function for each of the three. What depends on a trained model comes from one small run in a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

from run_helpers import toy_uploads  # noqa: E402
from storm.mutations import damaged, damaged_header, damaged_tree  # noqa: E402

import fedstill  # noqa: E402
from fedstill.core.tree import select  # noqa: E402
from fedstill.core.types import Dataset  # noqa: E402
from fedstill.data import Source, load  # noqa: E402
from fedstill.data.source import Reading  # noqa: E402
from fedstill.data.tokens import read_tokenizer, train_tokenizer  # noqa: E402
from fedstill.experiment.bundle import read_bundle  # noqa: E402
from fedstill.experiment.config import Experiment, quickstart_table  # noqa: E402
from fedstill.loop.checkpoint import load_model, load_newest  # noqa: E402
from fedstill.loop.message import decode, encode, template_of  # noqa: E402
from fedstill.methods.lookup import build_method  # noqa: E402
from fedstill.population.wire import pack_tree, seal, unpack_tree, unseal  # noqa: E402
from fedstill.prediction.stream import new_samples  # noqa: E402
from fedstill.storage import toml  # noqa: E402

Random = random.Random
SECRET = "secret.png"  # an image outside of every data folder; its one colour must never be read
SECRET_GREY = 173
REFUSED = "refused: one line"


class Kind(NamedTuple):
    """One kind of input: valid ones by name, hostile ones by name, their damage, and the reader."""

    valid: Callable[[], Mapping[str, bytes]]
    hostile: Callable[[], Mapping[str, bytes]]
    read: Callable[[bytes, str, Path], object]  # (content, name, empty folder) -> what came of it
    damage: Callable[[Random, bytes, list[bytes]], tuple[str, bytes]] = damaged
    heavy: tuple[str, ...] = ()  # hostile ones that take a second to make


# ---- npz


def _npy(array: np.ndarray, *, pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=pickle)
    return file.getvalue()


def _npy_saying(descr: str, shape: str, body: bytes = b"") -> bytes:
    """A header that says what no array holds."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def _zip(members: Mapping[str, bytes], *, deflate: bool = False) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED if deflate else None)
    return file.getvalue()


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _npz(*, deflate: bool = False, **arrays: np.ndarray) -> bytes:
    return _zip({f"{name}.npy": _npy(array) for name, array in arrays.items()}, deflate=deflate)


def _rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape)


@cache
def valid_npz() -> dict[str, bytes]:
    y, images = np.arange(40) % 3, _rows(40, 6, 6).astype(np.uint8)
    return {
        "table": _npz(x=_rows(40, 5).astype(np.float32), y=y),
        "packed": _npz(deflate=True, x=_rows(40, 5) / 7, y=y.astype(np.uint8)),
        "images": _npz(x_train=images, y_train=y, x_test=images[:9], y_test=y[:9]),
        "colours": _npz(train_images=_rows(40, 4, 4, 3), train_labels=y[:, None], test_images=_rows(9, 4, 4, 3),
                        test_labels=y[:9, None]),
        "words": _npz(x=_rows(40, 5), y=np.array(["cat", "dog"] * 20)),
    }  # fmt: skip


@cache
def hostile_npz() -> dict[str, bytes]:
    x, y = _rows(40, 5).astype(np.float32), np.arange(40) % 3

    def pair(x_bytes: bytes, y_bytes: bytes = b"") -> bytes:
        return _zip({"x.npy": x_bytes, "y.npy": y_bytes or _npy(y)})

    objects = np.empty(40, object)
    objects[:] = [{"a": 1}] * 40
    arrays = {
        "other lengths": (x, y[:-1]), "complex": (x + 1j, y), "no rows": (x[:0], y[:0]), "no axis": (np.float32(1), y),
        "not finite": (x * np.nan, y), "beyond float32": (x * np.float64(1e300), y), "fractions": (x, y / 2),
        "NaN labels": (x, np.where(y == 1, np.nan, y)), "endless labels": (x, np.where(y == 1, np.inf, y)),
        "negative labels": (x, y - 7), "huge labels": (x, np.uint64(2**64 - 1) - y.astype(np.uint64)), "bytes": (x, y.astype("S1")),
        "dates": (x.astype("M8[s]"), y), "one hot": (x, np.eye(3)[y]), "text": (x.astype("U9"), y),
        "structured": (np.zeros(40, [("a", "f4"), ("b", "i4")]), y), "big-endian": (x.astype(">f8"), y.astype(">i2")),
        "half": (x.astype(np.float16), y.astype(bool)), "signs": (x, np.array(["=1+1", "\x1b[2J", "$a^b^c$", "\u202e"] * 10)),
        "no columns": (x[:, :0], y), "five axes": (x.reshape(40, 5, 1, 1, 1), y),
    }  # fmt: skip
    return {
        **{name: _npz(x=np.asarray(a), y=np.asarray(b)) for name, (a, b) in arrays.items()},
        "pickle": pair(_npy(x), _npy(objects, pickle=True)),
        "says a petabyte": pair(_npy_saying("'<f4'", f"({2**48}, 2)", x.tobytes())),
        "says too much": pair(_npy_saying("'<f4'", "(4000, 5)", x.tobytes())),
        "negative shape": pair(_npy_saying("'<f4'", "(-40, -5)", x.tobytes())),
        "shape of words": pair(_npy_saying("'<f4'", "('a',)", x.tobytes())),
        "code in the head": pair(_npy_saying("__import__('os')", "(40, 5)", x.tobytes())),
        "deep head": pair(_npy_saying("[" * 90, "(40, 5)", x.tobytes())),
        "long head": pair(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{"),
        "version 9": pair(b"\x93NUMPY\x09\x00" + _npy(x)[8:]),
        "an npy file": _npy(x),
        "nothing": b"",
        "no arrays": _zip({}),
        "only x": _zip({"x.npy": _npy(x)}),
        "climbing names": _zip({"../x.npy": _npy(x), "../y.npy": _npy(y)}),
        "x twice": _zip({"x.npy": _npy(x), "y.npy": _npy(y)}) + _zip({"x.npy": _npy(x[:3])}),
        "bomb": packed_zeros({"x": (700_000_000, 1), "y": (700_000_000,)}),
        "bomb of many": packed_zeros({"x_train": (2**28, 1), "y_train": (2**28,), "x_test": (2**28, 1), "y_test": (9,)}),
    }  # fmt: skip


def packed_zeros(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """An npz file of uint8 zeros, a thousandth of their size, made without them."""
    file, entries = io.BytesIO(), []
    for name, shape in shapes.items():
        head, size = _npy_saying("'|u1'", str(shape)), int(np.prod(shape))
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
        block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
        packed += block * (size // 2**20) + packer.flush()
        stored, place = f"{name}.npy".encode(), file.tell()
        facts = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, 0, len(packed), size + len(head), len(stored), 0)
        file.write(b"PK\x03\x04" + facts + stored + packed)
        entries.append(
            b"PK\x01\x02" + struct.pack("<H", 20) + facts + struct.pack("<HHHII", 0, 0, 0, 0, place) + stored
        )
    start = file.tell()
    for entry in entries:
        file.write(entry)
    size = file.tell() - start
    file.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), size, start, 0))
    return file.getvalue()


def damage_npz(draw: Random, data: bytes, others: list[bytes]) -> tuple[str, bytes]:
    """Damage one array and pack it again with the right checksum, so that the damage arrives."""
    if draw.random() < 0.3:
        return damaged(draw, data, others)
    try:
        members = _members(data) if len(data) < 100_000 else {}
    except (zipfile.BadZipFile, zlib.error, EOFError):
        members = {}
    if not members:
        return damaged(draw, data, others)
    name = draw.choice(list(members))
    names, members[name] = damaged(draw, members[name], list(members.values()))
    return f"{name} {names}", _zip(members, deflate=draw.random() < 0.3)


def read_data(content: bytes, name: str, folder: Path, *, suffix: str) -> object:
    """Load one file as labelled data, as unlabeled data, or as the rows of a prediction."""
    file = folder / f"data{suffix}"
    file.write_bytes(content)
    way = zlib.crc32(content) % 4
    if way == 3 and suffix in (".csv", ".parquet"):
        return list(new_samples(file, table_task()))
    reading = Reading(labelled=way != 2, missing=("refuse", "skip", "mean", "refuse")[way], unknown="zeros")
    return load(file, reading, cache_dir=folder / "cache")


@cache
def table_task() -> Dataset:
    from fedstill.data import from_tensors

    return _table_source(from_tensors).train


def _table_source(from_tensors: Callable[..., Source]) -> Source:
    from fedstill.data.tables import Frame, assemble

    columns = {
        "age": np.arange(40.0), "town": np.array(["bern", "oslo"] * 20, object), "label": np.array(["no", "yes"] * 20, object),
    }  # fmt: skip
    return assemble({"train": Frame(columns)}, Reading(label="label"), name="task", origin="")


# ---- parquet


def _parquet(columns: Mapping[str, Any], *, features: object = None, **how: Any) -> bytes:
    table, file = pyarrow.table(dict(columns)), io.BytesIO()
    if features is not None:
        about = json.dumps(features) if not isinstance(features, str) else features
        table = table.replace_schema_metadata({"huggingface": about})
    parquet.write_table(table, file, **how)
    return file.getvalue()


def _png(grey: int = 90, side: int = 6) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), grey).save(file, "PNG")
    return file.getvalue()


def _described(names: object) -> dict[str, Any]:
    return {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}


@cache
def valid_parquet() -> dict[str, bytes]:
    y, pictures = [0, 1, 2, 1] * 10, [{"bytes": _png(grey), "path": "a.png"} for grey in range(40)]
    table = {"age": [float(n) for n in range(40)], "town": ["bern", "oslo"] * 20, "label": ["yes", "no"] * 20}
    return {
        "table": _parquet(table),
        "zstd": _parquet({**table, "id": [f"row {n}" for n in range(40)]}, compression="zstd", row_group_size=10),
        "plain": _parquet(table, compression="none", use_dictionary=False),
        "images": _parquet({"image": pictures, "label": y}, features=_described(["a", "b", "c"])),
        "arrays": _parquet({"x": [[n, n + 1, 3.0] for n in range(40)], "label": y}),
        "gaps": _parquet({"x": [None, 1.5, 2.0, 3.0] * 10, "word": [None, "a", "b", "c"] * 10, "label": y}),
    }


@cache
def hostile_parquet() -> dict[str, bytes]:
    y = [0, 1, 2, 1] * 10
    paths = ["/etc/passwd", f"../{SECRET}", "../../../../../../etc/passwd", "", "\x00", "a" * 5000, "/dev/zero", "."]
    word = "x" * 1_000_000
    return {
        **{f"path {path[:20]!r}": _parquet({"image": [{"bytes": None, "path": path}] * 40, "label": y}) for path in paths},
        "class names of words": _parquet({"x": y, "label": y}, features=_described("abc")),
        "class names twice": _parquet({"x": y, "label": y}, features=_described(["a", "a", "b"])),
        "class names of numbers": _parquet({"x": y, "label": y}, features=_described([1, 2, 3])),
        "too few classes": _parquet({"x": y, "label": y}, features=_described(["a"])),
        "features as a list": _parquet({"x": y, "label": y}, features={"info": {"features": [1]}}),
        "metadata no JSON": _parquet({"x": y, "label": y}, features="{"),
        "metadata deep": _parquet({"x": y, "label": y}, features="[" * 100_000),
        "image in words": _parquet({"image": [{"bytes": "a", "path": "b"}] * 40, "label": y}),
        "huge whole numbers": _parquet({"x": [2**63 - 1, -(2**63)] * 20, "label": y}),
        "NaN labels": _parquet({"x": y, "label": [float("nan"), 1.0] * 20}),
        "no rows": _parquet({"x": pyarrow.array([], pyarrow.int64()), "label": pyarrow.array([], pyarrow.int64())}),
        "no columns": _parquet({}),
        "dates": _parquet({"x": pyarrow.array([2**62] * 40, pyarrow.timestamp("ns")), "label": y}),
        "late dates as ids": _parquet({"id": pyarrow.array(range(2**58, 2**58 + 40), pyarrow.timestamp("us")), "x": y}),
        "durations": _parquet({"id": pyarrow.array([2**62] * 40, pyarrow.duration("s")), "x": y, "label": y}),
        "ragged": _parquet({"x": [[1], [1, 2]] * 20, "label": y}),
        "nested": _parquet({"x": [[[[1]]]] * 40, "label": y}),
        "signs": _parquet({"\x1b[2J": y, "$a^b^c$": y, "=1": ["\u202e", "@a", "-b", "\tc"] * 10, "label": y}),
        "many columns": _parquet({f"c{n}": [1.0] for n in range(3000)} | {"label": [1]}),
        "rows of one word": _parquet({"x": np.zeros(4_000_000, np.int8), "label": np.zeros(4_000_000, np.int8)}),
        "one long word": _parquet({"text": pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(np.zeros(5000, np.int32)), pyarrow.array([word])), "label": np.arange(5000) % 2}),
        "long delta words": _parquet({"text": [word + str(n) for n in range(300)], "label": np.arange(300) % 2},
                                     use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY", "label": "PLAIN"}),
    }  # fmt: skip


# ---- tables as text


@cache
def valid_csv() -> dict[str, bytes]:
    lines = [f"{20 + n % 50},{('bern', 'oslo')[n % 2]},{('yes', 'no')[n % 3 == 0]}" for n in range(40)]
    return {
        "plain": "\n".join(["age,town,label", *lines]).encode(),
        "semicolons": "\n".join(["age;town;label", *(line.replace(",", ",5;", 1).replace(",", ";", 0) for line in lines)])
        .replace("bern,", "bern;").replace("oslo,", "oslo;").encode(),
        "quotes": "\r\n".join(['"id","age","label"', *(f'"row ""{n}""","{n},5",{n % 2}' for n in range(40))]).encode(),
        "gaps": "\n".join(["age,town,label", ",bern,yes", "NA,,no", *lines]).encode(),
    }  # fmt: skip


@cache
def hostile_csv() -> dict[str, bytes]:
    rows = [b"a,b,label", *(b"%d,%d,%d" % (n, n % 7, n % 2) for n in range(40))]

    def with_row(row: bytes) -> bytes:
        return b"\n".join([*rows, row])

    return {
        "formula": with_row(b"=cmd|' /C calc'!A0,1,1"), "unicode": with_row("\u202e\x1b[2J,1,1".encode()),
        "no UTF-8": with_row(b"\xff\xfe,1,1"), "zero bytes": with_row(b"\0,\0,1"), "open quote": with_row(b'"1,1,1\n2,2,2'),
        "long cell": with_row(b'"' + b"x" * 300_000 + b'",1,1'), "huge number": with_row(b"1" * 5000 + b",1,1"),
        "1e999": with_row(b"1e999,1,1"), "hex": with_row(b"0x10,1,1"), "endless": with_row(b"inf,-inf,nan"),
        "label 1e300": b"\n".join([b"a,label", b"1,1e300", b"2,1.0", b"3,1e300"]), "one cell": b"a", "one line": b"a,label",
        "nothing": b"", "only lines": b"\n" * 1000, "only commas": b",,,\n,,,", "names twice": b"a,a\n1,2\n3,4",
        "lone returns": b"a,label\r1,2\r3,4\r", "mark twice": b"\xef\xbb\xbf\xef\xbb\xbfa,label\n1,2\n3,4", "UTF-16": "a,b\n1,2".encode("utf-16"),
        "many columns": b",".join(b"c%d" % n for n in range(20_000)) + b",label\n" + b"1," * 20_000 + b"1\n" + b"2," * 20_000 + b"0\n",
        "too many columns": b",".join(b"c%d" % n for n in range(200_000)) + b"\n" + b"1," * 199_999 + b"1\n",
        "uneven": b"a,b,label\n" + b"1\n1,2\n1,2,3,4\n" * 2000, "one column": b"label\n" + b"1\n2\n" * 30,
        "one class": b"a,label\n" + b"1,1\n" * 40, "two rows": b"a,label\n1,1\n2,2\n", "words": b"a,label\n" + b"".join(b"w%d,%d\n" % (n, n % 2) for n in range(500)),
        "separators": b"a;b,label\n1;2,3\n4;5,6\n", "a long line": b"a,label\n" + b"1" * (70 * 2**20) + b",1\n",
        "one line of zeros": bytes(70 * 2**20),
    }  # fmt: skip


@cache
def valid_lines() -> dict[str, bytes]:
    rows = [{"x": n, "town": ("bern", "oslo")[n % 2], "label": ("yes", "no")[n % 3 == 0]} for n in range(40)]
    vectors = [{"x": [n, 2.5, 3], "label": n % 3} for n in range(40)]
    return {name: "\n".join(map(json.dumps, table)).encode() for name, table in (("table", rows), ("vectors", vectors))}


@cache
def hostile_lines() -> dict[str, bytes]:
    good = b'{"x": 1, "label": 1}\n{"x": 2, "label": 0}\n'
    image = b'{"image": {"bytes": null, "path": "%s"}, "label": 1}\n'
    return {
        "numbers": b"1\n2\n", "lists": b"[1]\n[2]\n", "words": b'"a"\n"b"\n', "null": good + b"null\n", "nothing": b"",
        "deep": good + b"[" * 100_000, "deep row": good + b'{"x":' * 90_000, "long number": good + b'{"x": ' + b"9" * 6000 + b"}\n",
        "huge number": good + b'{"x": 99999999999999999999999999, "label": 1}\n', "NaN": good + b'{"x": NaN, "label": 1}\n',
        "mixed": good + b'{"x": "a", "label": [1]}\n', "half a sign": good + b'{"x": "\\ud800", "label": 1}\n',
        "other names": b"".join(b'{"n%d": 1}\n' % n for n in range(9000)), "names of signs": b'{"\\u001b": 1, "label": 1}\n' * 4,
        "no names": b"{}\n{}\n", "a path": image % b"/etc/passwd" * 40, "climbing": image % f"../{SECRET}".encode() * 40,
        "bytes as words": b'{"image": {"bytes": "abc"}, "label": 1}\n' * 40, "a long line": b'{"x": "' + b"a" * (66 * 2**20),
    }  # fmt: skip


# ---- images


def _picture(form: str, mode: str = "RGB", **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(_rows(12, 12, 3).astype(np.uint8)).convert(mode).save(file, form, **how)
    return file.getvalue()


@cache
def valid_images() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        ".png": _picture("PNG"), "grey.png": _picture("PNG", "L"), "palette.png": _picture("PNG", "P"), ".jpg": _picture("JPEG"),
        "turned.jpg": _picture("JPEG", exif=exif), ".bmp": _picture("BMP"), ".gif": _picture("GIF", "P"), ".webp": _picture("WEBP"),
        ".ppm": _picture("PPM"), ".tif": _picture("TIFF"), "packed.tif": _picture("TIFF", compression="tiff_lzw"),
        "deep.png": _picture("PNG", "I;16"), "clear.png": _picture("PNG", "RGBA"),
    }  # fmt: skip


def png_of(width: int, height: int, *, rows: int | None = None, extra: bytes = b"") -> bytes:
    """A grey image of zeros that says any size; `rows` of it are there."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(1)
    packed = (
        b"".join(packer.compress(bytes(width + 1)) for _ in range(height if rows is None else rows)) + packer.flush()
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@cache
def hostile_images() -> dict[str, bytes]:
    text = b"zTXta\0\0" + zlib.compress(bytes(50_000_000))
    bomb = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/tmp/storm) (w) file closefile\n%%EOF\n"
    scans = _picture("JPEG", progressive=True)
    last = scans[scans.rindex(b"\xff\xda") : -2]
    return {
        "scans.jpg": scans[:-2] + last * 50_000 + scans[-2:],
        "bomb.png": png_of(30_000, 30_000, rows=3000), "just too large.png": png_of(8000, 6300), "large.png": png_of(6000, 6000),
        "says much.png": png_of(2**31 - 1, 2**31 - 1, rows=0), "no side.png": png_of(0, 5, rows=0), "long text.png": png_of(8, 8, extra=bomb),
        "nothing.png": b"", "script.png": script, "text.jpg": b"no image", "zeros.gif": bytes(1000),
        "huge.gif": b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\x00\x00\x00\x00\xff\xff\xff\xff\x00\x08\x01\x00;",
        "huge.bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0),
        "huge.ppm": b"P6 99999 99999 255\n", "pipe.png": b"", "device.png": b"", "link.png": b"", "folder link.png": b"",
    }  # fmt: skip


SPECIAL_FILES = ("pipe.png", "device.png", "link.png", "folder link.png")


def read_images(content: bytes, name: str, folder: Path) -> object:
    """A folder of two classes with five good images and this one."""
    import os

    data = folder / "set"
    for place in range(5):
        file = data / "ab"[place % 2] / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_png(place, 12))
    stem = name.partition(" ")[0] if name.startswith("damaged") else name
    target = data / "a" / f"x{Path(name).suffix if name in SPECIAL_FILES or '.' in stem else '.png'}"
    if name == "pipe.png":
        os.mkfifo(target)
    elif name == "device.png":
        target.symlink_to("/dev/zero")
    elif name == "link.png":
        target.symlink_to(folder.parent / SECRET)
    elif name == "folder link.png":
        (data / "c").symlink_to(folder.parent)
    else:
        target.write_bytes(content)
    way = zlib.crc32(content) % 3
    size, missing = (12, None, 8)[way], ("refuse", "skip", "refuse")[way]
    return load(data, Reading(size=size, missing=missing, labelled=way != 2), cache_dir=folder / "cache")


# ---- texts and tokenizers


@cache
def valid_texts() -> dict[str, bytes]:
    return {
        "lines": "\n".join(f"the {('cat', 'dog')[n % 2]} said {n}" for n in range(40)).encode(),
        "accents": "Ä é ß 中文 🙂\n".encode() * 30,
    }


@cache
def hostile_texts() -> dict[str, bytes]:
    return {
        "nothing": b"", "spaces": b" \n\t\n", "no UTF-8": b"\xff\xfe\n", "zeros": bytes(2000), "UTF-16": "text".encode("utf-16"),
        "signs": "\x1b[2J\u202e\u2028\r\r\n".encode() * 20, "one long line": b"a" * (70 * 2**20), "many marks": "e\u0301\u0301".encode() * 5000,
    }  # fmt: skip


def read_texts(content: bytes, name: str, folder: Path) -> object:
    data, way = folder / "set", zlib.crc32(content) % 2
    for place in range(3):
        for side in "ab":
            (data / side).mkdir(parents=True, exist_ok=True)
            (data / side / f"{place}.txt").write_text(f"some {side} words {place}")
    (data / "a" / "x.txt").write_bytes(content)
    if way:
        (folder / "text.txt").write_bytes(content)
        return load(folder / "text.txt", Reading(window=3, labelled=False), cache_dir=folder / "cache")
    return load(data, Reading(text=True), cache_dir=folder / "cache")


@cache
def valid_tokenizers() -> dict[str, bytes]:
    return {"trained": train_tokenizer(["the cat sat on the mat", "the dog sat"] * 3, 60).encode()}


@cache
def hostile_tokenizers() -> dict[str, bytes]:
    tree = json.loads(valid_tokenizers()["trained"])
    growing = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000}
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    changed = {
        "growing": {**tree, "normalizer": {"type": "Sequence", "normalizers": [growing] * 2}},
        "slow": {**tree, "pre_tokenizer": slow},
        "copies": {
            **tree,
            "post_processor": {**tree["post_processor"], "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000},
        },
        "tenfold": {**tree, "normalizer": {"type": "Sequence", "normalizers": [{**growing, "content": "a" * 10}] * 9}},
        "a panic": {**tree, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "long words": {**tree, "model": {**tree["model"], "max_input_chars_per_word": 10**9}},
        "no model": {key: value for key, value in tree.items() if key != "model"},
        "far ids": {**tree, "model": {**tree["model"], "vocab": {"[PAD]": 0, "[UNK]": 2**31}}},
        "bad pattern": {**tree, "pre_tokenizer": {**slow, "pattern": {"Regex": "(((("}}},
    }
    return {
        "nothing": b"",
        "deep": b"[" * 100_000,
        **{name: json.dumps(each).encode() for name, each in changed.items()},
    }


def damage_json(draw: Random, data: bytes, others: list[bytes]) -> tuple[str, bytes]:
    if draw.random() < 0.3:
        return damaged(draw, data, others)
    try:
        return "a value", json.dumps(damaged_tree(draw, json.loads(data))).encode()
    except (ValueError, RecursionError):
        return damaged(draw, data, others)


def read_tokens(content: bytes, name: str, folder: Path) -> object:
    (folder / "tokenizer.json").write_bytes(content)
    return read_tokenizer(folder / "tokenizer.json", 16)


# ---- experiment files and expressions


@cache
def valid_configs() -> dict[str, bytes]:
    full = Experiment(rounds=3, method="feddf", data={"source": "digits", "unlabeled": "test"}).resolved()
    return {
        "quick start": toml.dumps(quickstart_table()).encode(),
        "full": toml.dumps(full).encode(),
        "short": b'rounds = 2\nmethod = "fedprox(mu=0.1)"\n',
    }


@cache
def hostile_configs() -> dict[str, bytes]:
    keys = (
        "rounds",
        "cohort",
        "seed",
        "method",
        "data.source",
        "local.lr",
        "model.name",
        "guard.bound",
        "engine.device",
        "x.y.z",
        '"\\u001b[2J"',
    )
    values = (
        "1e400",
        "nan",
        "-1",
        "99999999999999999999",
        '""',
        '"\\u0000"',
        "[]",
        "{}",
        "[[[[]]]]",
        "true",
        "2026-01-01",
        '"$a^b^c$"',
    )
    lines = {f"{key} = {value}": f"{key} = {value}\n".encode() for key in keys for value in values}
    return {
        **lines, "nothing": b"", "no UTF-8": b"\xff", "deep": b"a = " + b"[" * 50_000, "deep table": b"a." * 20_000 + b"b = 1",
        "deep expression": b'method = "' + b"fedprox(" * 20_000 + b'"', "long number": b"rounds = " + b"9" * 10_000,
        "a thousand methods": b'method = "' + b"+".join([b"fedprox"] * 1000) + b'"', "tables": b"[a]\n" * 1000, "sign": b'name = "\x1b"\n',
    }  # fmt: skip


def read_config(content: bytes, name: str, folder: Path) -> object:
    (folder / "experiment.toml").write_bytes(content)
    return Experiment.from_toml(folder / "experiment.toml")


@cache
def valid_expressions() -> dict[str, bytes]:
    texts = (
        "fedavg",
        "fedprox(mu=0.1)",
        "feddf(student.steps=20)+moon",
        "fedlmd_tf until 5 then fedlmd+fedavgm",
        "fedopt(server_lr=1.0, momentum=0.5)",
        'fedaux+feddf(pool="logits")',
        "median+feddf",
    )
    return {text: text.encode() for text in texts}  # fmt: skip


@cache
def hostile_expressions() -> dict[str, bytes]:
    texts = (
        "",
        " ",
        "+",
        "(",
        ")",
        "fedavg(",
        "fedavg)",
        "()",
        "fedprox(mu)",
        "fedprox(mu=)",
        "fedprox(mu=1e999)",
        "fedprox(mu=nan)",
        "fedprox(mu=-1)",
        "fedprox(" * 5000,
        "+".join(["fedprox"] * 3000),
        "fedprox(mu=" + "9" * 9000 + ")",
        "fedprox(mu=[" + "[" * 5000 + ")",
        "then",
        "fedavg until then",
        "fedavg until 99999999999999999999999 then fedprox",
        "fedavg until -1 then fedprox",
        "fedprox(mu.mu.mu=1)",
        "\x00",
        "\u202e",
        "fedprox(\x1b=1)",
        "feddf(student={})",
        "feddf(student.student=1)",
        'fedprox(mu=""")',
        "x" * 100_000,
    )
    return {f"{place} {text[:20]!r}": text.encode() for place, text in enumerate(texts)}  # fmt: skip


def read_expression(content: bytes, name: str, folder: Path) -> object:
    return build_method(content.decode("utf-8", "replace"))


# ---- what a run writes and sends


@cache
def run_files(place: Path) -> dict[str, bytes]:
    """The bundle, the checkpoint and the weights of a small run."""
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    wanted = Experiment(
        rounds=1, cohort=2, checkpoint_every=1, method="scaffold", data={"source": "digits"}, model={"name": "mlp", "hidden": [4]},
        partition={"scheme": "lda", "clients": 4, "alpha": 1.0}, local={"batch_size": 64, "lr": 0.1}, engine={"device": "cpu"},
    )  # fmt: skip
    fedstill.run(wanted, run_dir=folder, pictures=False)
    fedstill.export(folder, out=folder / "bundle.safetensors")
    checkpoint = next((folder / "checkpoints").glob("*.zip"))
    return {"bundle": (folder / "bundle.safetensors").read_bytes(), "checkpoint": checkpoint.read_bytes(),
            "weights": (folder / "last" / "weights.safetensors").read_bytes()}  # fmt: skip


PLACE: list[Path] = []  # the storm's folder, which it sets


def valid_of_run(name: str) -> dict[str, bytes]:
    return {"of a run": run_files(PLACE[0])[name]}


def _head(kind: str, shape: list[int]) -> bytes:
    """A file of one tensor without a number in it."""
    tensor = {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}
    words = json.dumps({"__metadata__": {"outline": '{"a": 0}'}, "0": tensor}).encode()
    return struct.pack("<Q", len(words)) + words


HEADS = {
    "beyond torch": _head("F32", [0, 2**62, 4]), "beyond 64 bits": _head("U8", [0, 2**64 - 1]),
    "many dimensions": _head("F16", [0] * 70), "8-bit floats": _head("F8_E4M3", [0]), "complex": _head("C64", [0]),
    "nothing": b"", "short": b"\x08", "long head": struct.pack("<Q", 2**62) + b"{}", "empty head": struct.pack("<Q", 2) + b"{}",
    "head no JSON": struct.pack("<Q", 4) + b"[[[[", "deep head": struct.pack("<Q", 90_000) + b"[" * 90_000,
    "negative": struct.pack("<Q", 70) + b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}'.ljust(70) + bytes(4),
    "huge": struct.pack("<Q", 90) + b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}'.ljust(90) + bytes(4),
}  # fmt: skip


def hostile_heads() -> dict[str, bytes]:
    return HEADS


def with_digest(data: bytes) -> bytes:
    """A bundle whose digest is right, whatever else is not."""
    try:
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        old = head["__metadata__"]["fedstill.digest"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data
    if len(old) != 64:
        return data
    blank = data.replace(old, b"0" * 64, 1)
    return blank.replace(b"0" * 64, hashlib.blake2b(blank, digest_size=32).hexdigest().encode(), 1)


def damage_bundle(draw: Random, data: bytes, others: list[bytes]) -> tuple[str, bytes]:
    try:
        name, damage = ("head", damaged_header(draw, data)) if draw.random() < 0.7 else damaged(draw, data, others)
    except (ValueError, RecursionError):
        name, damage = damaged(draw, data, others)
    return (f"{name}, right digest", with_digest(damage)) if draw.random() < 0.9 else (name, damage)


def read_a_bundle(content: bytes, name: str, folder: Path) -> object:
    (folder / "bundle.safetensors").write_bytes(content)
    return read_bundle(folder / "bundle.safetensors")


def damage_weights(draw: Random, data: bytes, others: list[bytes]) -> tuple[str, bytes]:
    try:
        return ("head", damaged_header(draw, data)) if draw.random() < 0.5 else damaged(draw, data, others)
    except (ValueError, RecursionError):
        return damaged(draw, data, others)


def read_weights(content: bytes, name: str, folder: Path) -> object:
    (folder / "weights.safetensors").write_bytes(content)
    return load_model(folder)


def damage_checkpoint(draw: Random, data: bytes, others: list[bytes]) -> tuple[str, bytes]:
    """Damage one part and write the digests again, or damage the file."""
    if draw.random() < 0.3:
        return damaged(draw, data, others)
    try:
        parts = _members(data)
        name = draw.choice([part for part in parts if part != "manifest.json"])
        if name.endswith(".json"):
            damage, parts[name] = "a value", json.dumps(damaged_tree(draw, json.loads(parts[name]))).encode()
        else:
            damage, parts[name] = damage_weights(draw, parts[name], list(parts.values()))
    except (ValueError, RecursionError, zipfile.BadZipFile, zlib.error, EOFError, IndexError):
        return damaged(draw, data, others)
    del parts["manifest.json"]

    def digest(content: bytes) -> str:
        return hashlib.blake2b(content, digest_size=32).hexdigest()

    manifest = json.dumps(
        {"format": 1, "files": {part: digest(content) for part, content in parts.items()}}, sort_keys=True
    )
    sealed = {"manifest": manifest, "blake2b": digest(manifest.encode())}
    return f"{name} {damage}, right digests", _zip({**parts, "manifest.json": json.dumps(sealed).encode()})


def read_checkpoint(content: bytes, name: str, folder: Path) -> object:
    (folder / "round-000001.zip").write_bytes(content)
    state = load_newest(folder)
    if state is None:
        return REFUSED
    return state, list(state.clients)


@cache
def an_upload() -> tuple[bytes, Any]:
    uploads, _ = toy_uploads(label_counts=True)
    return encode(select(uploads, 1), round=3), template_of(uploads)


def valid_messages() -> dict[str, bytes]:
    return {"an upload": an_upload()[0]}


def read_message(content: bytes, name: str, folder: Path) -> object:
    return decode(content, an_upload()[1], client=11, round=3)


@cache
def valid_parcels() -> dict[str, bytes]:
    tree = {"weights": {"a": torch.ones(3, 2), "b": {}}, "state": {"n": torch.tensor(3)}}
    return {
        "a tree": seal({"kind": "work", "round": 3}, pack_tree(tree)),
        "no body": seal({"kind": "ask"}),
        "a message": seal({"client": 11}, an_upload()[0]),
    }


def hostile_parcels() -> dict[str, bytes]:
    return {name: seal({"kind": "work"}, head) for name, head in HEADS.items()} | {"nothing": b""}


def damage_parcel(draw: Random, data: bytes, others: list[bytes]) -> tuple[str, bytes]:
    """Damage facts or body and seal them again, or damage the bytes."""
    try:
        parcel = unseal(data, limit=1 << 30)
    except fedstill.FedstillError:
        return damaged(draw, data, others)
    which = draw.random()
    if which < 0.25 or (which < 0.75 and not parcel.body):
        return damaged(draw, data, others)
    if which < 0.75:
        name, body = damage_weights(draw, parcel.body, [parcel.body, data])
        return f"{name}, right checksum", seal(parcel.facts, body)
    facts = damaged_tree(draw, parcel.facts)
    words = json.dumps(facts).encode()
    digest = hashlib.blake2b(words + parcel.body, digest_size=32).digest()
    return "facts, right checksum", struct.pack("<8sHI32s", b"fedstill", 1, len(words), digest) + words + parcel.body


def read_parcel(content: bytes, name: str, folder: Path) -> object:
    parcel = unseal(content, limit=1 << 20)
    return parcel.facts, unpack_tree(parcel.body) if parcel.body else None


KINDS: dict[str, Kind] = {
    "message": Kind(valid_messages, hostile_heads, read_message, damage_weights),
    "parcel": Kind(valid_parcels, hostile_parcels, read_parcel, damage_parcel),
    "config": Kind(valid_configs, hostile_configs, read_config),
    "expression": Kind(valid_expressions, hostile_expressions, read_expression),
    "checkpoint": Kind(partial(valid_of_run, "checkpoint"), hostile_heads, read_checkpoint, damage_checkpoint),
    "bundle": Kind(partial(valid_of_run, "bundle"), hostile_heads, read_a_bundle, damage_bundle),
    "weights": Kind(partial(valid_of_run, "weights"), hostile_heads, read_weights, damage_weights),
    "npz": Kind(valid_npz, hostile_npz, partial(read_data, suffix=".npz"), damage_npz, ("bomb", "bomb of many")),
    "parquet": Kind(valid_parquet, hostile_parquet, partial(read_data, suffix=".parquet"), damaged, ("rows of one word", "one long word")),
    "csv": Kind(valid_csv, hostile_csv, partial(read_data, suffix=".csv"), damaged, ("a long line", "one line of zeros")),
    "jsonl": Kind(valid_lines, hostile_lines, partial(read_data, suffix=".jsonl"), damaged, ("a long line",)),
    "image": Kind(valid_images, hostile_images, read_images, damaged, ("bomb.png", "just too large.png", "large.png")),
    "text": Kind(valid_texts, hostile_texts, read_texts, damaged, ("one long line",)),
    "tokenizer": Kind(valid_tokenizers, hostile_tokenizers, read_tokens, damage_json),
}  # fmt: skip


def secret_image(folder: Path) -> None:
    """Put the image that no reader may open beside the folders of the cases."""
    Image.new("L", (12, 12), SECRET_GREY).save(folder / SECRET)


def samples_in(answer: object) -> Iterator[np.ndarray]:
    """Yield the samples of whatever a data reader returned."""
    if isinstance(answer, Source):
        yield from (answer.train.x.numpy(), answer.test.x.numpy())
    elif isinstance(answer, list):
        yield from (samples.x.numpy() for samples in answer)
