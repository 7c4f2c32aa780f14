"""Read npz files: the forms of all arrays are checked before one of them is unpacked, and nothing is unpickled."""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from fedstill.core.errors import FedstillError
from fedstill.data.bounds import OF_A_ROW, check_size, readable
from fedstill.data.tables import Frame
from fedstill.storage.files import open_zip

LAYOUTS = (  # (split, inputs, labels) by array name: Keras, MedMNIST, a single pair
    (("train", "x_train", "y_train"), ("test", "x_test", "y_test")),
    (("train", "train_images", "train_labels"), ("test", "test_images", "test_labels")),
    (("train", "x", "y"),),
)
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # (3, 0) is for structures
OF_A_WORD = 128  # bytes of a label that is a word, as an object of Python
SHOWN = 10  # names of arrays


class _Form(NamedTuple):
    """What an array says of itself before its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def memory(self) -> int:
        """Return the bytes that the samples or labels take as they are used: 2-d arrays as float32, images as bytes."""
        if self.dtype.kind == "U":
            return math.prod(self.shape) * (self.dtype.itemsize + OF_A_WORD)
        return math.prod(self.shape) * max(self.dtype.itemsize, 4 if len(self.shape) < 3 else 1)


def read_npz(file: Path, *, labelled: bool) -> dict[str, Frame]:
    """Return the splits of an npz file; only the arrays of its layout are unpacked."""
    with readable(file, "a readable npz file"), file.open("rb") as opened, open_zip(opened) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        for layout in LAYOUTS:
            if all(x in members and (y in members or not labelled) for _, x, y in layout):
                wanted = [name for _, *pair in layout for name in pair if name in members]
                arrays = _arrays(archive, {name: members[name] for name in wanted}, file)
                return {split: _frame(arrays, x, y, file) for split, x, y in layout}
    expected = " or ".join("/".join(x + "," + y for _, x, y in layout) for layout in LAYOUTS)
    shown = ", ".join(list(members)[:SHOWN]) + (f" and {len(members) - SHOWN} more" if len(members) > SHOWN else "")
    raise FedstillError(f"data.source: '{file}' holds {shown or 'nothing'}; expected {expected}")


def _arrays(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], file: Path) -> dict[str, np.ndarray]:
    """Return arrays of numbers or words in this machine's order of bytes, once all of them together fit."""
    on_disk, shown, cure = file.stat().st_size, f"'{file}'", "if it is sound, write it with numpy.savez, not compressed"
    check_size(sum(info.file_size for info in members.values()), on_disk, shown, cure)
    forms = {}
    for name, info in members.items():
        with archive.open(info) as member:
            forms[name] = _checked_form(member, name, info.file_size, file)
    rows = sum(form.shape[0] for form in forms.values())
    check_size(sum(form.memory for form in forms.values()) + OF_A_ROW * rows, on_disk, shown, cure)
    arrays = {}
    for name, info in members.items():
        with archive.open(info) as member:
            array = npy.read_array(member, allow_pickle=False)
        arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.kind == "U" and not _is_text(arrays[name]):
            raise FedstillError(f"data.source: array '{name}' of '{file}' holds words with signs that no text has")
    return arrays


def _is_text(words: np.ndarray) -> bool:
    """Return whether all signs are of Unicode and none is half of one; Python makes no word of others."""
    signs = np.frombuffer(words.tobytes(), np.uint32)
    halves = (signs >= 0xD800) & (signs <= 0xDFFF)
    return not (halves | (signs > sys.maxunicode)).any()


def _checked_form(member: IO[bytes], name: str, size: int, file: Path) -> _Form:
    where, version = f"array '{name}' of '{file}'", npy.read_magic(member)
    if version not in HEADERS:
        raise FedstillError(f"data.source: {where} must hold plain numbers, not structures")
    shape, _, dtype = HEADERS[version](member)
    if dtype.hasobject:
        raise FedstillError(
            f"data.source: {where} holds Python objects, and reading them would run code: store numbers, or words as "
            "numpy.array(words, dtype='U')"
        )
    if dtype.kind not in "biufU" or dtype.shape:
        raise FedstillError(f"data.source: {where} must hold real numbers, or labels as words (U), not {dtype}")
    if 0 in shape[1:]:
        raise FedstillError(f"data.source: {where} has the shape {shape}: there is nothing to learn from")
    if not shape or min(shape) < 0 or math.prod(shape) * dtype.itemsize > size:
        raise FedstillError(f"data.source: {where} has the shape {shape}, and its {size:,} bytes do not hold it")
    return _Form(shape, dtype)


def _frame(arrays: Mapping[str, np.ndarray], x: str, y: str, file: Path) -> Frame:
    samples, labels = arrays[x], arrays.get(y)
    if samples.dtype.kind == "U":
        raise FedstillError(f"data.source: array '{x}' of '{file}' must hold numbers, not words")
    if labels is None:
        return Frame({"x": samples})
    if len(labels) != len(samples):
        raise FedstillError(
            f"data.source: '{file}' has {len(samples):,} rows in '{x}' and {len(labels):,} in '{y}': they must belong "
            "together row by row"
        )
    if labels.size != len(labels):
        raise FedstillError(f"data.source: array '{y}' of '{file}' must hold one label a row, not {labels.shape}")
    labels = labels.reshape(len(labels))
    return Frame({"x": samples, "label": labels.astype(object) if labels.dtype.kind == "U" else labels})
