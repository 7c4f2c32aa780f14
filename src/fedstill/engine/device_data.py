"""Samples on the device, ready to be gathered by index: normalised once if they fit, else step by step."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Dataset
from fedstill.engine.contrastive_views import random_views

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device, *, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that are free on a GPU; for the CPU, what the system could give.

    A container's limit counts where it is seen at the root of the control groups, version 2.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(meminfo), _left_in(cgroup))


def _available(meminfo: Path) -> int:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in(cgroup: Path) -> int:
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # none, or the limit is "max"
        return 1 << 62
    return max(0, limit - used + int(rows.get("inactive_file", 0)))  # files that were read can be dropped


CPU_FLOAT_BYTES = 1 << 30  # a normalised float copy above this stays uint8 on the CPU


class Feed:
    """x (n, ...) and y on one device; `batch` gathers and augments in a few kernels."""

    def __init__(self, x: Tensor, y: Tensor, dataset: Dataset, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        shape = (1, -1) + (1,) * (x.ndim - 2)
        self.mean = torch.tensor(dataset.mean, dtype=dtype, device=device).reshape(shape)
        self.std = torch.tensor(dataset.std, dtype=dtype, device=device).reshape(shape)
        self.ids = dataset.text
        self.stored_as_bytes = x.dtype == torch.uint8
        self.blank = (0.0 - self.mean) / self.std  # a black pixel, normalised
        self.y = y.to(device)
        self.x = x.to(device)
        self.normalised = x.is_floating_point() or self.fits(x.numel())
        if self.normalised and not self.ids and x.dtype in (torch.uint8, torch.float32, torch.float64):
            self.x = self._normalise(self.x)

    def fits(self, numbers: int) -> bool:
        """Whether so many numbers can be kept beside the samples."""
        wanted = numbers * self.dtype.itemsize
        if self.device.type == "cuda":
            return wanted < free_memory(self.device) // 4
        return wanted <= CPU_FLOAT_BYTES

    def _normalise(self, x: Tensor) -> Tensor:
        scaled = x.to(self.dtype).div_(255.0) if self.stored_as_bytes else x.to(self.dtype)
        return (scaled - self.mean) / self.std

    def inputs(self, index: Tensor | slice) -> Tensor:
        """Model inputs of some rows, without augmentation."""
        x = self.x[index]
        if self.ids:
            return x.long()
        return x if self.normalised else self._normalise(x)

    def batch(self, index: Tensor, bits: Tensor, augment: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """(x, y) for an index of any shape (..., B); the leading dimensions are kept."""
        flat = index.reshape(-1)
        y = self.y[flat].reshape(*index.shape, *self.y.shape[1:])
        if VIEWS in augment:
            x = self._views(flat, bits.reshape(-1))
        elif "crop" in augment or "flip" in augment:
            blank = self.blank if self.normalised else torch.zeros((), dtype=self.x.dtype, device=self.device)
            x = gather_augmented(self.x, flat, bits.reshape(-1), augment, blank)
            x = x if self.normalised else self._normalise(x)
        else:
            x = self.inputs(flat)
        if "cutout" in augment:
            x = cutout(x, bits.reshape(-1))
        return x.reshape(*index.shape, *x.shape[1:]), y

    def _views(self, flat: Tensor, bits: Tensor) -> Tensor:
        """Two views of every sample, (B, 2 channels, H, W); colours change on the scale from 0 to 1."""

        def unit(x: Tensor) -> Tensor:
            return torch.addcmul(self.mean, x, self.std) if self.normalised else x / 255.0

        views = (random_views(self.x, flat, bits, unit, self.dtype) - self.mean) / self.std
        return views.flatten(1, 2)


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
