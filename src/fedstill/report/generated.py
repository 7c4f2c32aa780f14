"""What a generator on the server invented: pictures of it by class, and whether it copies training samples."""

from __future__ import annotations

import json
import logging
import os
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset, Federation, Samples, Seed
from fedstill.history import Result
from fedstill.report.nearest import Copies, inputs, look_for_copies
from fedstill.resume import log_to

COPIES_FILE = "generated.json"
SAMPLES_PICTURE = "generated.png"
PAIRS_PICTURE = "generated_closest.png"
GENERATOR_LOSS = "generator_loss"  # how a row's key ends where a generator was trained
COLUMNS = 10
MOST_CLASSES = 100
LONGEST_NAME = 20
LETTERS_AN_INCH = 12  # of a title
_log = logging.getLogger("fedstill.run")


def show_generated(result: Result, federation: Federation, folder: Path | None, *, seed: Seed) -> Result:
    """Of a run whose server invents samples: generated.json, and pictures where samples are images.

    Features that a generator invents instead of samples are no images, and nothing is written for them.
    """
    with log_to(folder):
        return _show(result, federation, folder, seed)


def _show(result: Result, federation: Federation, folder: Path | None, seed: Seed) -> Result:
    samples = as_stored(result.samples, federation.train)
    if result.samples is None and any(key.endswith(GENERATOR_LOSS) for row in result.history.rows[-1:] for key in row):
        _log.info("the generator of %s invents features, no samples: no %s", result.method, COPIES_FILE)
    if folder is None or samples is None:
        return result
    copies = look_for_copies(samples, federation, seed=seed)
    found = copies.as_dict(federation.train)
    _write(folder / COPIES_FILE, json.dumps(found, indent=2) + "\n")
    if is_pictured(federation.train):
        title = f"{result.method} on {federation.train.name}, round {len(result.history.rows)}"
        try:
            generated_picture(samples, federation.train, folder / SAMPLES_PICTURE, title=title)
            closest_picture(copies, federation.train, folder / PAIRS_PICTURE, title=title)
        except FedstillError as error:
            _log.warning("no pictures of generated samples: %s", error)
    return replace(result, generated=found)


def as_stored(samples: Samples | None, dataset: Dataset) -> Samples | None:
    """Generated samples in the shape of stored ones, on the CPU; None where they are no such samples."""
    if samples is None or not len(samples.y) or dataset.text:
        return None
    x, shape = samples.x.detach().float().cpu(), dataset.x.shape[1:]
    if x[0].numel() != shape.numel():
        values = x[0].numel()
        _log.info("generated samples of %d values are no samples of %s: no %s", values, dataset.name, COPIES_FILE)
        return None
    return Samples(x.reshape(-1, *shape), samples.y.cpu())


def is_pictured(dataset: Dataset) -> bool:
    """Whether stored samples are images that can be drawn: grey or RGB."""
    return dataset.x.ndim == 4 and dataset.x.shape[1] in (1, 3)


def pixels(x: Tensor, dataset: Dataset) -> np.ndarray:
    """Model inputs (n, channels, height, width) as (n, height, width, channels) from 0 to 1: x std + mean, cut there.

    Images that are not stored as bytes have no known black and white: theirs are the darkest and lightest of them all.
    """
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (dataset.mean, dataset.std))
    light = x * std + mean
    if dataset.x.is_floating_point():
        low, high = dataset.x.amin().float(), dataset.x.amax().float()
        light = (light - low) / (high - low).clamp_min(1e-12)
    return light.clamp(0.0, 1.0).permute(0, 2, 3, 1).numpy()


def generated_picture(samples: Samples, dataset: Dataset, path: Path, *, title: str) -> Path:
    """Rows of at most ten generated images for each class that was asked for, into a PNG."""
    images, asked = pixels(samples.x, dataset), samples.y.numpy()
    names = dataset.classes[:MOST_CLASSES]
    told = f"{title}: what the generator invents"
    if len(dataset.classes) > len(names):
        told += f" (first {len(names)} of {len(dataset.classes)} classes)"
    rows = [images[asked == one][:COLUMNS] for one in range(len(names))]
    return _draw(rows, [str(name) for name in names], path, title=told)


def closest_picture(copies: Copies, dataset: Dataset, path: Path, *, title: str) -> Path:
    """The generated images that are nearest to a training image, nearest first, and these training images below."""
    chosen = torch.tensor(copies.closest)
    stored = inputs(dataset.x[copies.to_training.row[chosen]], dataset)
    made = copies.samples.x[chosen].reshape(stored.shape)
    rows = [pixels(made, dataset), pixels(stored, dataset)]
    apart = [f"{one:.3g}" for one in copies.to_training.distance[chosen].tolist()]
    return _draw(rows, ["generated", "nearest in training"], path, title=f"{title}: {copies.line()}", below=apart)


def _draw(
    rows: Sequence[np.ndarray], names: Sequence[str], path: Path, *, title: str, below: Sequence[str] = ()
) -> Path:
    """Rows of images with a name beside each; `below` stands under the columns."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    sheet, (high, wide), gap = _sheet(rows)
    cell = 0.55 if len(rows) <= 30 else 0.3  # inches
    size = (2.2 + cell * COLUMNS, 1.0 + cell * len(rows) * high / wide)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(sheet, interpolation="nearest", aspect="equal")
    axes.set_anchor("W")  # names and images at the left, where the title begins; what is empty is cut off below
    short = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    axes.set_yticks([high * one + (high - gap - 1) / 2 for one in range(len(rows))], labels=short, fontsize=8)
    axes.set_xticks([wide * one + (wide - gap - 1) / 2 for one in range(len(below))], labels=list(below), fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(LETTERS_AN_INCH * size[0])), x=0.01, ha="left", fontsize=9)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.08)
    return path


def _sheet(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, tuple[int, int], int]:
    """All images in one, white where there is none; height and width of a cell, and the gap that is part of it."""
    _, height, width, channels = rows[0].shape
    gap = max(1, min(height, width) // 16)
    high, wide = height + gap, width + gap
    sheet = np.ones((len(rows) * high - gap, COLUMNS * wide - gap, 3), np.float32)
    for down, images in enumerate(rows):
        for across, image in enumerate(images[:COLUMNS]):
            shown = np.repeat(image, 3, axis=2) if channels == 1 else image
            sheet[down * high : down * high + height, across * wide : across * wide + width] = shown
    return sheet, (high, wide), gap


def _write(path: Path, text: str) -> None:
    """All of the text or nothing, whenever the process ends."""
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
