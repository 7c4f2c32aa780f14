"""Samples on the device, ready to be gathered by index: normalised once if they fit, else step by step; augmented.

Random views of images for contrastive learning are made for a whole batch at once: crop and resize, mirror, colours,
grey. As torchvision's RandomResizedCrop, RandomHorizontalFlip, ColorJitter and RandomGrayscale on float images in
[0, 1], in this order (Chen et al., ICML 2020, without blur). Every number is a function of a sample's 64 bits. Shapes
do not depend on what is drawn and nothing is read back, so that a CUDA graph can hold it. Images of one channel have
neither saturation nor hue nor grey.

Differs from torchvision: brightness, contrast and saturation come in random order and the hue last (there the hue's
place is random too, which would cost its 20 kernels four times); no rounding to bytes in between.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.seeds import uniforms
from fedstill.core.types import Dataset

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
        # index_select is seven times as fast as an index on a CPU
        x = self.x.index_select(0, index) if isinstance(index, Tensor) else self.x[index]
        if self.ids:
            return x.long()
        return x if self.normalised else self._normalise(x)

    def batch(self, index: Tensor, bits: Tensor, augment: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """(x, y) for an index of any shape (..., B); the leading dimensions are kept."""
        flat = index.reshape(-1)
        y = self.y.index_select(0, flat).reshape(*index.shape, *self.y.shape[1:])
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
VIEWS = "views"  # two random views of a sample, side by side: for a server's pre-training; see `random_views`
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
    inside = None
    if "crop" in names:  # torchvision order: crop, then flip. A flipped crop reads its columns from the other end.
        rows = rows + (_field(bits, 0, 2 * PADDING + 1) - PADDING).unsqueeze(1)
        columns = columns + (_field(bits, 12, 2 * PADDING + 1) - PADDING).unsqueeze(1)
        in_rows, in_columns = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
        inside = in_rows[:, None, :, None] & in_columns[:, None, None, :]
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    channels = torch.arange(data.shape[1], device=data.device)[None, :, None, None]
    images = data[index[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None, :]]
    return images if inside is None else torch.where(inside, images, blank)


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


ATTEMPTS = 10  # at a crop that fits, before it is the largest in the middle
OTHER_DRAWS = 10  # top, left, flip, jitter, brightness, contrast, saturation, hue, order, grey
RED, GREEN, BLUE = 0.2989, 0.587, 0.114  # of the grey value


@dataclass(frozen=True)
class Strength:
    """How far a view goes from its image. Shares of area, ratios of width to height, probabilities, half ranges."""

    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3.0 / 4.0, 4.0 / 3.0)
    flip: float = 0.5
    jitter: float = 0.8  # probability of the next four
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey: float = 0.2


SIMCLR = Strength()


class Boxes(NamedTuple):
    """Crops in pixels; each (...)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def random_views(
    data: Tensor,
    index: Tensor,
    bits: Tensor,
    unit: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    strength: Strength = SIMCLR,
    count: int = 2,
) -> Tensor:
    """(B, count, channels, H, W) on the scale from 0 to 1: views of the images `data[index]`, each with its own draws.

    `unit` takes stored values (as `dtype`) to that scale.
    """
    size = (data.shape[-2], data.shape[-1])
    draws = uniforms(bits, count * (2 * ATTEMPTS + OTHER_DRAWS)).reshape(len(bits), count, -1)
    tries, draws = draws[..., : 2 * ATTEMPTS], draws[..., 2 * ATTEMPTS :]
    boxes = random_boxes(tries[..., :ATTEMPTS], tries[..., ATTEMPTS:], draws[..., 0], draws[..., 1], size, strength)
    cut = unit(resized_crops(data, index, boxes, draws[..., 2] < strength.flip, dtype))
    return recoloured(cut, draws[..., 3:], strength)


def random_boxes(area: Tensor, ratio: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], how: Strength) -> Boxes:
    """torchvision's RandomResizedCrop.get_params; `area` and `ratio` (..., ATTEMPTS) are draws from U[0, 1)."""
    full_height, full_width = size
    share = how.area[0] + (how.area[1] - how.area[0]) * area
    log_low, log_high = math.log(how.ratio[0]), math.log(how.ratio[1])
    shape = torch.exp(log_low + (log_high - log_low) * ratio)
    pixels = full_height * full_width * share
    width, height = torch.sqrt(pixels * shape).round().long(), torch.sqrt(pixels / shape).round().long()
    fits = (width > 0) & (width <= full_width) & (height > 0) & (height <= full_height)
    first = fits.int().argmax(-1, keepdim=True)
    any_fits = fits.any(-1)
    middle_height, middle_width = largest_box(size, how)
    height = torch.where(any_fits, height.gather(-1, first).squeeze(-1), middle_height)
    width = torch.where(any_fits, width.gather(-1, first).squeeze(-1), middle_width)
    free_rows, free_columns = full_height - height, full_width - width
    row = torch.where(any_fits, (top * (free_rows + 1)).long(), free_rows // 2)
    column = torch.where(any_fits, (left * (free_columns + 1)).long(), free_columns // 2)
    return Boxes(row, column, height, width)


def largest_box(size: tuple[int, int], how: Strength) -> tuple[int, int]:
    """Height and width of the largest crop in the middle whose ratio is allowed."""
    height, width = size
    if width / height < how.ratio[0]:
        return round(width / how.ratio[0]), width
    if width / height > how.ratio[1]:
        return height, round(height * how.ratio[1])
    return height, width


def resized_crops(data: Tensor, index: Tensor, boxes: Boxes, mirrored: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, V, channels, H, W): crops (B, V) of `data[index]`, stretched to the image's size, some of them mirrored.

    Bilinear between pixel centres, F.interpolate(align_corners=False); a crop is never larger than the image, so that
    there is nothing to smooth. Rows first, which are read whole.
    """
    height, width = data.shape[-2:]
    channel = torch.arange(data.shape[1], device=data.device)[:, None]
    upper, lower, share = _taps(boxes.top, boxes.height, height)
    image, channel = index[:, None, None, None], channel[None, None]
    rows = torch.lerp(
        data[image, channel, upper[:, :, None]].to(dtype),
        data[image, channel, lower[:, :, None]].to(dtype),
        share.to(dtype)[:, :, None, :, None],
    )
    taps = _taps(boxes.left, boxes.width, width)
    left, right, share = (torch.where(mirrored[..., None], tap.flip(-1), tap)[:, :, None, None] for tap in taps)
    return torch.lerp(
        rows.gather(-1, left.expand(rows.shape)), rows.gather(-1, right.expand(rows.shape)), share.to(dtype)
    )


def _taps(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `size` places: the two pixels of [start, start + length) that it lies between, and how far."""
    places = torch.arange(size, device=start.device)
    length = length[..., None]
    position = ((places + 0.5) * (length / size) - 0.5).clamp_min(0.0)
    before = position.floor().long()
    after = torch.minimum(before + 1, length - 1)
    return start[..., None] + before, start[..., None] + after, position - before


def recoloured(x: Tensor, draws: Tensor, how: Strength = SIMCLR) -> Tensor:
    """Jitter and grey for images (..., channels, H, W) in [0, 1]; draws (..., 7) from U[0, 1)."""
    jittered, brightness, contrast, saturation, hue, order, grey = (
        draw.to(x.dtype)[..., None, None, None] for draw in draws.unbind(-1)
    )
    on = (jittered < how.jitter).to(x.dtype)
    factors = [
        1.0 + on * strength * (2.0 * draw - 1.0)
        for draw, strength in ((brightness, how.brightness), (contrast, how.contrast), (saturation, how.saturation))
    ]
    for kind in _orders(order):
        x = _blended(x, kind, factors)
    if x.shape[-3] != 3:
        return x
    x = shifted_hue(x, on * how.hue * (2.0 * hue - 1.0))
    return torch.where(grey < how.grey, grey_of(x), x)


def _orders(draw: Tensor) -> list[Tensor]:
    """The three blends (0 brightness, 1 contrast, 2 saturation) in one of their six orders."""
    number = (draw * 6.0).floor()
    first, swap = (number / 2.0).floor(), number % 2.0
    return [first, (first + 1.0 + swap) % 3.0, (first + 2.0 - swap) % 3.0]


def _blended(x: Tensor, kind: Tensor, factors: list[Tensor]) -> Tensor:
    """f x + (1 - f) base, cut to [0, 1]; base: black (brightness), the mean grey (contrast), the grey image."""
    brightness, contrast, saturation = factors
    factor = torch.where(kind == 0, brightness, torch.where(kind == 1, contrast, saturation))
    grey = grey_of(x)
    base = torch.where(kind == 1, grey.mean((-3, -2, -1), keepdim=True), grey) * (kind > 0)
    return torch.lerp(base, x, factor).clamp(0.0, 1.0)


def grey_of(x: Tensor) -> Tensor:
    """(..., 1, H, W)."""
    if x.shape[-3] != 3:
        return x
    red, green, blue = x.unbind(-3)
    return (RED * red).add(green, alpha=GREEN).add(blue, alpha=BLUE).unsqueeze(-3)


def shifted_hue(x: Tensor, shift: Tensor) -> Tensor:
    """The hue (in turns) moved by `shift`, saturation and value kept; no shift changes no bit.

    With the largest and smallest channel M and m and the hue h: channel c = M - (M - m) min(max(min(k, 4 - k), 0), 1),
    k = (n_c + 6 h) mod 6, n = (5, 3, 1).
    """
    red, green, blue = x.unbind(-3)
    top, bottom = x.amax(-3), x.amin(-3)
    chroma = top - bottom
    scale = torch.where(chroma > 0, chroma, 1.0)
    sector = torch.where(
        top == red,
        (green - blue) / scale,
        torch.where(top == green, 2.0 + (blue - red) / scale, 4.0 + (red - green) / scale),
    )
    offsets = (5 - 2 * torch.arange(3, device=x.device))[:, None, None]
    place = (offsets + sector.unsqueeze(-3) + 6.0 * shift) % 6.0
    falloff = torch.minimum(place, 4.0 - place).clamp(0.0, 1.0)
    turned = top.unsqueeze(-3) - chroma.unsqueeze(-3) * falloff
    return torch.where(shift == 0, x, turned)
