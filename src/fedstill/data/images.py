"""Decode images into one uint8 array (n, channels, height, width), in threads, because pillow leaves the GIL."""

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
    blobs: Sequence[bytes | Path] | np.ndarray, *, where: str, shape: tuple[int, int] | None = None, skip: bool = False
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return (uint8 images (n, channels, height, width), rows that cannot be read); such rows hold zeros.

    One RGB image makes the whole set RGB, otherwise it is grey. Alpha is dropped, 16 bits become 8. `shape` (height,
    width) cuts each image to the centre of these proportions and resizes it (bilinear, antialiased). Without `shape`
    images of different size are an error. Without `skip` an image that cannot be read is an error.
    """
    require_extra("PIL")

    def decode(start: int) -> list[np.ndarray | None]:
        pixels: list[np.ndarray | None] = []
        for row, blob in enumerate(blobs[start : start + CHUNK], start):
            try:
                pixels.append(image_pixels(blob, row, shape, where))
            except FedstillError:
                if not skip:
                    raise
                pixels.append(None)
        return pixels

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
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
        with Image.open(io.BytesIO(blob) if isinstance(blob, bytes) else blob) as opened:
            image = ImageOps.exif_transpose(opened) if "exif" in opened.info else opened
            image = _eight_bit(image)
            if shape is not None and image.size != (shape[1], shape[0]):
                (left, right), (top, bottom) = _centre(image.width, image.height, *shape)
                part = image.crop((left, top, right, bottom))  # ImageOps.fit would blend in the parts that are cut off
                image = part.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except Exception as error:  # pillow's decoders raise any error (EOFError, struct.error, ...) on broken files
        place = f"row {row}" if isinstance(blob, bytes) else str(blob)
        raise FedstillError(f"data.source: {place} of {where} is not a readable image ({first_line(error)})") from error
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


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
