"""Random views of images for contrastive learning, for a whole batch at once: crop and resize, mirror, colours, grey.

As torchvision's RandomResizedCrop, RandomHorizontalFlip, ColorJitter and RandomGrayscale on float images in [0, 1], in
this order (Chen et al., ICML 2020, without blur). Every number is a function of a sample's 64 bits. Shapes do not
depend on what is drawn and nothing is read back, so that a CUDA graph can hold it. Images of one channel have neither
saturation nor hue nor grey.

Differs from torchvision: brightness, contrast and saturation come in random order and the hue last (there the hue's
place is random too, which would cost its 20 kernels four times); no rounding to bytes in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core.seeds import uniforms

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
    found = fits.any(-1)
    middle_height, middle_width = largest_box(size, how)
    height = torch.where(found, height.gather(-1, first).squeeze(-1), middle_height)
    width = torch.where(found, width.gather(-1, first).squeeze(-1), middle_width)
    free_rows, free_columns = full_height - height, full_width - width
    row = torch.where(found, (top * (free_rows + 1)).long(), free_rows // 2)
    column = torch.where(found, (left * (free_columns + 1)).long(), free_columns // 2)
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
