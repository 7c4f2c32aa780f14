"""What a generator on the server invented: pictures of it by class, and whether it copies training samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Dataset, Federation, Samples, Seed
from fedstill.engine.device_data import Feed
from fedstill.loop.history import Result
from fedstill.loop.resume import log_to
from fedstill.report import counted, draw_all, drawn, new_figure, shortened
from fedstill.storage.files import write_whole

COPIES_FILE = "generated.json"
SAMPLES_PICTURE = "generated.png"
PAIRS_PICTURE = "generated_closest.png"
COLUMNS = 10
MOST_CLASSES = 100
LONGEST_NAME = 20
LETTERS_AN_INCH = 12  # of a title
NUMBERS_AT_ONCE = 1 << 20  # of stored samples as inputs: 4 MiB
HELD_OUT = 500  # at least, where there are so many: the nearest 1 % of 100 would be a single sample
PERCENT = 1.0
PAIRS = 10
DISTANCE = "root mean square difference of two samples' values, normalised as the model reads them"
SHOWS = (
    "Shows: whether generated samples lie nearer to training samples than samples do that nobody trained on. Those as "
    "near as the nearest 1 % of held-out samples are counted, and the closest pairs are listed to be looked at."
)
SHOWS_NOT = (
    "Does not show: that nothing about the training data is revealed. It finds copies in this distance, of the samples "
    "that were kept; not copies that are shifted, mirrored or recoloured, nor what a class or a client has in common, "
    "and it is no guarantee of privacy. A pale or blurred sample is near to many training samples without being one."
)
WHO = "Who can do it: a simulation, which holds all data. In a real federation only clients could, each for its own."
_log = logging.getLogger("fedstill.run")


def show_generated(result: Result, federation: Federation, folder: Path, *, seed: Seed, closed: bool = False) -> Result:
    """Write generated.json about the samples that a run's server invented, and pictures where samples are images.

    Features that a generator invents instead of samples are no images, and nothing is written for them.

    closed: only the picture of the samples themselves, because the rest shows training samples and distances to them;
    see loop/closed_folder.py.
    """
    with nullcontext() if closed else log_to(folder):
        train, rows = federation.train, result.history.rows
        samples = as_stored(result.samples, train)
        if samples is None:
            return result
        title = f"{result.method} on {train.name}, round {len(rows)}"
        pictures: dict[str, Callable[[Path], Path]] = {
            SAMPLES_PICTURE: lambda path: generated_picture(samples, train, path, title=title)
        }
        if closed:
            draw_all(pictures if is_pictured(train) else {}, folder)
            return result
        if not len(federation.indices):
            _log.info("the clients' rows are not here, and nobody can compare generated samples: no %s", COPIES_FILE)
            return result
        copies = look_for_copies(samples, federation, seed=seed)
        facts = copies.as_dict(train)
        write_whole(folder / COPIES_FILE, json.dumps(facts, indent=2) + "\n")
        if is_pictured(train):
            pictures[PAIRS_PICTURE] = lambda path: closest_picture(copies, train, path, title=title)
            draw_all(pictures, folder)
        return replace(result, generated=facts)


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
    """Tell whether stored samples are images that can be drawn: grey or RGB."""
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
    heading = f"{title}: what the generator invents"
    if len(dataset.classes) > len(names):
        heading += f" (first {len(names)} of {len(dataset.classes)} classes)"
    rows = [images[asked == label][:COLUMNS] for label in range(len(names))]
    return _draw(rows, [str(name) for name in names], path, title=heading)


def closest_picture(copies: Copies, dataset: Dataset, path: Path, *, title: str) -> Path:
    """The generated images that are nearest to a training image, nearest first, and these training images below."""
    chosen = torch.tensor(copies.closest)
    stored = inputs(dataset.x[copies.to_training.row[chosen]], dataset)
    made = copies.samples.x[chosen].reshape(stored.shape)
    rows = [pixels(made, dataset), pixels(stored, dataset)]
    apart = [f"{distance:.3g}" for distance in copies.to_training.distance[chosen].tolist()]
    return _draw(rows, ["generated", "nearest in training"], path, title=f"{title}: {copies.line()}", below=apart)


def _draw(
    rows: Sequence[np.ndarray], names: Sequence[str], path: Path, *, title: str, below: Sequence[str] = ()
) -> Path:
    """Draw rows of images with a name beside each; `below` stands under the columns."""
    _, height, width, channels = rows[0].shape
    gap = max(1, min(height, width) // 16)
    high, wide = height + gap, width + gap
    sheet = np.ones((len(rows) * high - gap, COLUMNS * wide - gap, 3), np.float32)  # white where there is no image
    for down, images in enumerate(rows):
        for across, image in enumerate(images[:COLUMNS]):
            shown = np.repeat(image, 3, axis=2) if channels == 1 else image
            sheet[down * high : down * high + height, across * wide : across * wide + width] = shown
    cell = 0.55 if len(rows) <= 30 else 0.3  # inches
    size = (2.2 + cell * COLUMNS, 1.0 + cell * len(rows) * high / wide)
    figure = new_figure(*size, title, letters=int(LETTERS_AN_INCH * size[0]), size=9)
    axes = figure.subplots()
    axes.imshow(sheet, interpolation="nearest", aspect="equal")
    axes.set_anchor("W")  # names and images at the left, where the title begins; the empty space is cut off below
    short, below = [drawn(shortened(name, LONGEST_NAME)) for name in names], list(map(drawn, below))
    axes.set_yticks([high * row + (height - 1) / 2 for row in range(len(rows))], labels=short, fontsize=8)
    axes.set_xticks([wide * column + (width - 1) / 2 for column in range(len(below))], labels=below, fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.08)
    return path


class Nearest(NamedTuple):
    """For each of n samples the nearest of some stored ones."""

    distance: Tensor  # (n,) see DISTANCE
    row: Tensor  # (n,) int64, where it is stored

    def facts(self, among: int) -> dict[str, float]:
        low, middle = float(self.distance.min()), float(self.distance.quantile(0.5))
        return {"of": len(self.row), "among": among, "median": middle, "minimum": low}


@dataclass(frozen=True)
class Copies:
    """Distances of generated samples, beside the distances of samples that nobody trained on."""

    samples: Samples
    to_training: Nearest  # of the generated ones
    to_held_out: Nearest  # of the generated ones
    held_out: Nearest  # of held-out samples, to the training samples
    sizes: dict[str, int]  # how many training and held-out samples there are to be near to

    @property
    def bound(self) -> float:
        """The distance within which the nearest 1 % of the held-out samples lie to a training sample."""
        return float(self.held_out.distance.quantile(PERCENT / 100, interpolation="lower"))

    @property
    def near(self) -> int:
        """Generated samples within that distance of a training sample; of copies all, of others about 1 % or fewer."""
        return int((self.to_training.distance <= self.bound).sum())

    @property
    def closest(self) -> list[int]:
        """The generated samples that are nearest to a training sample, nearest first."""
        return self.to_training.distance.argsort(stable=True)[:PAIRS].tolist()

    def line(self) -> str:
        """Return the short form, for a terminal and above a picture."""
        samples, least = counted(len(self.samples.y), "generated sample"), float(self.to_training.distance.min())
        verdict = f"{self.near} of {samples} may be copied" if self.near else f"no copies found among {samples}"
        return f"{verdict}: nearest training sample at {least:.3g} (a copy: {self.bound:.3g} or less)"

    def text(self) -> str:
        """Return the words of `line`, with the meaning of its bound."""
        count, least = len(self.samples.y), float(self.to_training.distance.min())
        return (
            f"{self.near} of {count} generated samples are as near to a training sample as the nearest {PERCENT:g} % "
            f"of held-out samples are (at {self.bound:.3g} or less); the nearest is at {least:.3g}"
        )

    def as_dict(self, train: Dataset) -> dict[str, Any]:
        """Return the content of generated.json; rows count in the training set."""
        pairs = [(sample, int(self.to_training.row[sample])) for sample in self.closest]
        return {
            "line": self.line(),
            "text": self.text(),
            "samples": len(self.samples.y),
            "distance": DISTANCE,
            "generated_to_training": self.to_training.facts(self.sizes["training"]),
            "held_out_to_training": self.held_out.facts(self.sizes["training"]),
            "generated_to_held_out": self.to_held_out.facts(self.sizes["held_out"]),
            "percent": PERCENT,
            "within": self.bound,
            "as_near": self.near,
            "share_as_near": self.near / len(self.samples.y),
            "closest": [
                {
                    "sample": sample,
                    "class": train.classes[int(self.samples.y[sample])],
                    "training_row": row,
                    "training_class": train.classes[int(train.y[row])],
                    "distance": float(self.to_training.distance[sample]),
                }
                for sample, row in pairs
            ],
            "about": [SHOWS, SHOWS_NOT, WHO],
        }


def look_for_copies(samples: Samples, federation: Federation, *, seed: Seed) -> Copies:
    """How near generated samples (values as many as a stored sample's) are to what the clients trained on.

    seed: of the choice of held-out samples: as many as generated ones, and at least 500 where there are so many.
    """
    train, test = federation.train, federation.test
    x = samples.x.detach().float().cpu().flatten(1)
    held = torch.unique(federation.indices.cpu())  # nobody's rows train nothing
    everything = torch.arange(len(test.y))
    drawn = numpy_generator(seed_for(seed, "held-out samples")).permutation(len(test.y))[: max(len(x), HELD_OUT)]
    apart = inputs(test.x[torch.from_numpy(drawn)], train).flatten(1)
    both = nearest(torch.cat([x, apart]), train.x, held, train)  # one pass over the training samples
    return Copies(
        samples=Samples(x, samples.y.cpu()),
        to_training=Nearest(*(part[: len(x)] for part in both)),
        to_held_out=nearest(x, test.x, everything, train),
        held_out=Nearest(*(part[len(x) :] for part in both)),
        sizes={"training": len(held), "held_out": len(everything)},
    )


def inputs(x: Tensor, dataset: Dataset) -> Tensor:
    """Stored samples as the model reads them: normalised by the dataset's constants."""
    labels = torch.zeros(len(x), dtype=torch.int64)
    return Feed(x.cpu(), labels, dataset, torch.device("cpu"), torch.float32).inputs(slice(None))


def nearest(x: Tensor, stored: Tensor, rows: Tensor, dataset: Dataset) -> Nearest:
    """Of some rows of `stored` the nearest to each of x (n, D), which are inputs already.

    Memory: a piece of NUMBERS_AT_ONCE numbers. |a - b|^2 = |a|^2 + |b|^2 - 2 ab finds the row at the speed of a matrix
    product, and loses half of the digits for a copy; so the distance itself is taken from the difference.
    """
    best, closest = x.new_full((len(x),), torch.inf), torch.zeros(len(x), dtype=torch.int64)
    size = max(1, NUMBERS_AT_ONCE // max(x.shape[1], len(x)))
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        piece = inputs(stored[some], dataset).flatten(1)
        least, at = torch.addmm(piece.square().sum(1), x, piece.T, alpha=-2.0).min(dim=1)
        closest = torch.where(least < best, some[at], closest)
        best = torch.minimum(best, least)
    pieces = [slice(first, first + size) for first in range(0, len(x), size)]
    gaps = [x[some] - inputs(stored[closest[some]], dataset).flatten(1) for some in pieces]
    return Nearest(torch.cat([gap.square().mean(1).sqrt() for gap in gaps]), closest)
