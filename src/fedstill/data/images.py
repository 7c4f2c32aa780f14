"""Decode images into one uint8 array (n, channels, height, width), in threads, because pillow leaves the GIL."""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.data.bounds import check_size
from fedstill.data.source import first_line, require_extra
from fedstill.storage.files import read_bytes

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "PPM", "TIFF")  # no other reader of pillow sees a file
CHUNK = 256  # images a task: a task costs more than a small image
MOST_PIXELS = 50_000_000  # of one image
LARGE = 4_000_000  # pixels; such images are decoded one at a time, because each takes up to 15 bytes a pixel
RESIZED_AT_ONCE = 2048
MOST_SCANS = 100  # of a JPEG; programs write about ten, and the decoder takes each over all pixels


def decode_images(
    blobs: Sequence[bytes | Path] | np.ndarray, *, where: str, shape: tuple[int, int] | None = None, skip: bool = False
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return (uint8 images (n, channels, height, width), rows that cannot be read); such rows hold zeros.

    One RGB image makes the whole set RGB, otherwise it is grey. Alpha is dropped, 16 bits become 8. `shape` (height,
    width) cuts each image to the centre of these proportions and resizes it (bilinear, antialiased). Without `shape`
    images of different size are an error. Without `skip` an image that cannot be read is an error.
    """
    require_extra("PIL")
    on_disk = sum(len(blob) if isinstance(blob, bytes) else _size_of(blob) for blob in blobs)
    taken = _Tally(on_disk, where)

    def decode(start: int) -> list[np.ndarray | None]:
        pixels: list[np.ndarray | None] = []
        for row, blob in enumerate(blobs[start : start + CHUNK], start):
            try:
                image = image_pixels(blob, row, shape, where)
                taken.add(image.nbytes)
                pixels.append(image)
            except FedstillError as error:
                if not skip or isinstance(error, _TooMuch):
                    raise
                pixels.append(None)
        return pixels

    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")  # pillow's, about broken metadata of images that it can read
        decoded = [pixels for chunk in pool.map(decode, range(0, len(blobs), CHUNK)) for pixels in chunk]
    readable = [pixels for pixels in decoded if pixels is not None]
    if not readable:
        raise FedstillError(f"data.source: {where} holds no readable image ({len(blobs)} tried)")
    sizes = sorted({pixels.shape[:2] for pixels in readable})
    if len(sizes) > 1:
        (low_h, low_w), (high_h, high_w) = sizes[0], sizes[-1]
        raise FedstillError(
            f"data.size: images of {where} differ in size (from {low_w}x{low_h} to {high_w}x{high_h}); "
            "set data.size to the side they shall all have"
        )
    images = np.zeros((len(decoded), max(pixels.shape[2] for pixels in readable), *sizes[0]), np.uint8)
    for row, pixels in enumerate(decoded):
        if pixels is not None:
            images[row] = pixels.transpose(2, 0, 1)  # a grey image broadcasts over RGB
    return images, tuple(row for row, pixels in enumerate(decoded) if pixels is None)


class _TooMuch(FedstillError):
    """Images that would fill the memory: no rule about single rows helps."""


class _Tally:
    """Counts the bytes of decoded images, so that files of a few bytes cannot fill the memory."""

    def __init__(self, on_disk: int, where: str) -> None:
        self._on_disk, self._where, self._taken, self._lock = on_disk, where, 0, threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._taken += size
            try:
                check_size(
                    self._taken, self._on_disk, f"the images of {self._where}", "set data.size to a smaller side"
                )
            except FedstillError as error:
                raise _TooMuch(*error.lines) from None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # an image that cannot be read
        return 0


def fit_images(x: Tensor, height: int, width: int) -> Tensor:
    """Cut images (n, channels, h, w) to the centre and resize them as `decode_images` does; bytes stay bytes."""
    (left, right), (top, bottom) = _centre(x.shape[3], x.shape[2], height, width)
    x = x[:, :, top:bottom, left:right]
    if x.shape[2:] == (height, width):
        return x.contiguous()
    parts = []
    for part in torch.split(x, RESIZED_AT_ONCE):
        resized = F.interpolate(part.float(), (height, width), mode="bilinear", antialias=True, align_corners=False)
        parts.append(resized.round().clamp(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else resized)
    return torch.cat(parts).contiguous()


def image_pixels(blob: bytes | Path, row: int, shape: tuple[int, int] | None, where: str) -> np.ndarray:
    """Return one image as uint8 (height, width, channels), brought to a shape if one is given."""
    from PIL import Image, ImageOps

    try:
        # in memory, because the decoder takes memory for as many bytes as a head names before it reads a file
        file = io.BytesIO(blob if isinstance(blob, bytes) else read_bytes(blob))
        with ExitStack() as held, Image.open(file, formats=FORMATS) as opened:
            if opened.format in ("JPEG", "MPO") and _scans(file) > MOST_SCANS:
                raise ValueError(f"a JPEG of more than {MOST_SCANS} scans")
            pixels = opened.width * opened.height
            if pixels > MOST_PIXELS:
                raise ValueError(f"{opened.width} x {opened.height} pixels, more than {MOST_PIXELS:,}")
            if pixels > LARGE:
                held.enter_context(_one_large)
            image = ImageOps.exif_transpose(opened) if "exif" in opened.info else opened
            image = _eight_bit(image)
            if shape is not None and image.size != (shape[1], shape[0]):
                (left, right), (top, bottom) = _centre(image.width, image.height, *shape)
                part = image.crop((left, top, right, bottom))  # ImageOps.fit would blend in the parts that are cut off
                image = part.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
            array = np.asarray(image)
    except Exception as error:  # pillow's decoders raise any error (EOFError, struct.error, ...) on broken files
        place = f"row {row}" if isinstance(blob, bytes) else str(blob)
        raise FedstillError(f"data.source: {place} of {where} is not a readable image ({first_line(error)})") from error
    return array[:, :, None] if array.ndim == 2 else array


_one_large = threading.Lock()


def _scans(file: IO[bytes]) -> int:
    """Return how many scans a JPEG has, at most."""
    place = file.seek(0, io.SEEK_CUR)
    file.seek(0)
    count = sum(piece.count(b"\xff\xda") for piece in iter(lambda: file.read(1 << 20), b""))
    file.seek(place)
    return count


def _centre(width: int, height: int, wanted_height: int, wanted_width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (left, right), (top, bottom) of the largest centred part with the wanted proportions.

    >>> _centre(8, 4, 2, 2)
    ((2, 6), (0, 4))
    """
    cut_width = min(width, max(1, round(height * wanted_width / wanted_height)))
    cut_height = min(height, max(1, round(width * wanted_height / wanted_width)))
    left, top = (width - cut_width) // 2, (height - cut_height) // 2
    return (left, left + cut_width), (top, top + cut_height)


def _eight_bit(image: Any) -> Any:
    """Return an image as grey ('L') or RGB."""
    from PIL import Image

    if image.mode in ("L", "RGB"):
        return image
    if image.mode in ("1", "LA", "La"):
        return image.convert("L")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixel type {image.mode} is neither 8 nor 16 bits")
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
