"""Samples on the device, ready to be gathered by index: normalised once if they fit, else step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.types import Dataset
from fedstill.engine.augment import VIEWS, cutout, gather_augmented
from fedstill.engine.memory import free_memory
from fedstill.engine.views import random_views

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
