"""Augmentation as one batched device function, driven by 64 random bits a sample from the plan.

crop: zero-pad by 4 and cut back to size; flip: mirror half of the images; cutout: a 16 x 16 square (half the
side for images under 24 pixels) centred anywhere is set to zero after normalisation (DeVries & Taylor 2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, suggest

AUGMENTATIONS = ("crop", "cutout", "flip")
VIEWS = "views"  # two random views of a sample, side by side: for a server's pre-training; see views.py
PADDING = 4


def check_augmentations(names: tuple[str, ...], shape: tuple[int, ...], key: str = "local.augment") -> None:
    """Refuse unknown names, and images where there are none. `key`: where the names were set."""
    if VIEWS in names and key == "local.augment":
        raise FedstillError(f"{key}: '{VIEWS}' makes two images of one, which a classifier cannot read; leave it out")
    for name in (name for name in names if names != (VIEWS,)):
        if name not in AUGMENTATIONS:
            raise FedstillError(f"{key}: unknown augmentation '{name}'; {suggest(name, AUGMENTATIONS)}")
    if names and len(shape) != 3:
        raise FedstillError(f"{key}: {', '.join(names)} need images, but samples have shape {shape}; leave it out")


def _field(bits: Tensor, start: int, options: int) -> Tensor:
    """An integer in [0, options) from 12 of the 64 bits."""
    return ((bits >> start) & 0xFFF) % options


def gather_augmented(data: Tensor, index: Tensor, bits: Tensor, names: tuple[str, ...], blank: Tensor) -> Tensor:
    """Fetch images `data[index]` cropped and flipped in one gather; outside the image is `blank` (1, ch, 1, 1)."""
    height, width = data.shape[-2:]
    rows = torch.arange(height, device=data.device).expand(len(index), height)
    columns = torch.arange(width, device=data.device).expand(len(index), width)
    if "flip" in names:
        flip = _field(bits, 24, 2).unsqueeze(1).bool()
        columns = torch.where(flip, width - 1 - columns, columns)
    if "crop" not in names:
        return data[index[:, None, None, None], _channels(data), rows[:, None, :, None], columns[:, None, None, :]]
    # torchvision order: crop, then flip. A flipped crop reads its columns from the other end.
    rows = rows + (_field(bits, 0, 2 * PADDING + 1) - PADDING).unsqueeze(1)
    columns = columns + (_field(bits, 12, 2 * PADDING + 1) - PADDING).unsqueeze(1)
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    images = data[index[:, None, None, None], _channels(data), rows[:, None, :, None], columns[:, None, None, :]]
    return torch.where(inside, images, blank)


def _channels(data: Tensor) -> Tensor:
    return torch.arange(data.shape[1], device=data.device)[None, :, None, None]


def cutout(images: Tensor, bits: Tensor) -> Tensor:
    """Zero a square around a random centre; it may reach over the border, as in the reference code."""
    height, width = images.shape[-2:]
    side = min(height, width)
    half = (16 if side >= 24 else side // 2) // 2
    centre_row, centre_column = _field(bits, 32, height)[:, None], _field(bits, 44, width)[:, None]
    rows = torch.arange(height, device=images.device)[None, :]
    columns = torch.arange(width, device=images.device)[None, :]
    in_rows = (rows >= centre_row - half) & (rows < centre_row + half)
    in_columns = (columns >= centre_column - half) & (columns < centre_column + half)
    return images.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0.0)
