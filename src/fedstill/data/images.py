"""Encoded images to one uint8 array (n, channels, height, width), in threads (pillow decodes outside the GIL)."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.data.source import first_line, require_extra

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
CHUNK = 256  # images a task: a task costs more than a small image
RESIZED_AT_ONCE = 2048


def decode_images(
    blobs: Sequence[bytes | Path], *, where: str, size: int | None = None, mixed_size: int | None = None
) -> np.ndarray:
    """Decode all; one RGB image makes the whole set RGB, else it is grey. Alpha is dropped, 16 bits become 8.

    `size` cuts each image to its centred square and resizes it (bilinear, antialiased) to size x size;
    `mixed_size` does so only when the images differ in size, which is an error otherwise.
    """
    require_extra("PIL")

    def decode(start: int) -> tuple[np.ndarray | None, set[tuple[int, int]]]:
        return _decode_chunk(blobs[start : start + CHUNK], start, size, where)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(decode, range(0, len(blobs), CHUNK)))
    shapes = sorted(set().union(*(found for _, found in results)))
    if len(shapes) > 1:
        if mixed_size is not None:
            return decode_images(blobs, where=where, size=mixed_size)
        (low_h, low_w), (high_h, high_w) = shapes[0], shapes[-1]
        raise FedstillError(
            f"data.size: images of {where} differ in size (from {low_w}x{low_h} to {high_w}x{high_h}); "
            "set data.size to the side they shall all have"
        )
    chunks = [chunk for chunk, _ in results if chunk is not None]
    channels = max(chunk.shape[1] for chunk in chunks)
    images = np.empty((len(blobs), channels, *shapes[0]), np.uint8)
    for i, chunk in enumerate(chunks):
        images[i * CHUNK : i * CHUNK + len(chunk)] = chunk  # a grey chunk broadcasts over RGB
    return images


def resize_images(x: Tensor, height: int, width: int) -> Tensor:
    """(n, channels, height, width) by bilinear interpolation with antialiasing; bytes stay bytes."""
    if x.shape[2:] == (height, width):
        return x
    return torch.cat([_resize(chunk, height, width) for chunk in torch.split(x, RESIZED_AT_ONCE)])


def _resize(x: Tensor, height: int, width: int) -> Tensor:
    resized = F.interpolate(x.float(), size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8) if x.dtype == torch.uint8 else resized


def centre_square(x: np.ndarray, size: int) -> np.ndarray:
    """What `size` does to encoded images, for arrays (n, channels, h, w)."""
    side = min(x.shape[2:])
    top, left = (x.shape[2] - side) // 2, (x.shape[3] - side) // 2
    square = np.ascontiguousarray(x[:, :, top : top + side, left : left + side])
    return resize_images(torch.from_numpy(square), size, size).numpy()


def _decode_chunk(
    blobs: Sequence[bytes | Path], start: int, size: int | None, where: str
) -> tuple[np.ndarray | None, set[tuple[int, int]]]:
    """(k, channels, h, w) and the one size, or None and all sizes found."""
    pixels = [_decode_one(blob, start + i, size, where) for i, blob in enumerate(blobs)]
    shapes = {(image.shape[0], image.shape[1]) for image in pixels}
    if len(shapes) > 1:
        return None, shapes
    channels = max(image.shape[2] for image in pixels)
    stacked = np.empty((len(pixels), *next(iter(shapes)), channels), np.uint8)
    for i, image in enumerate(pixels):
        stacked[i] = image
    return stacked.transpose(0, 3, 1, 2), shapes


def _decode_one(blob: bytes | Path, row: int, size: int | None, where: str) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(blob) if isinstance(blob, bytes) else blob) as opened:
            image = ImageOps.exif_transpose(opened) if "exif" in opened.info else opened
            image = _eight_bit(image)
            if size is not None and image.size != (size, size):
                side, (width, height) = min(image.size), image.size
                left, top = (width - side) // 2, (height - side) // 2
                square = image.crop((left, top, left + side, top + side))  # ImageOps.fit would blend in what is cut off
                image = square.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = f"row {row}" if isinstance(blob, bytes) else str(blob)
        raise FedstillError(f"data.source: {what} of {where} is not a readable image ({first_line(error)})") from error
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _eight_bit(image: Any) -> Any:
    """Grey ('L') or RGB."""
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
