"""Whether generated samples are copies: how near they are to training samples, and how near held-out samples are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Dataset, Federation, Samples, Seed
from fedstill.engine.feed import Feed
from fedstill.report.table import counted

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


class Nearest(NamedTuple):
    """For each of n samples the nearest of some stored ones."""

    distance: Tensor  # (n,) see DISTANCE
    row: Tensor  # (n,) int64, where it is stored


@dataclass(frozen=True)
class Copies:
    """Distances of generated samples, beside those of samples that nobody trained on."""

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
        """The short form, for a terminal and above a picture."""
        count, least = len(self.samples.y), float(self.to_training.distance.min())
        found = f"no copies found among {counted(count, 'generated sample')}"
        if self.near:
            found = f"{self.near} of {counted(count, 'generated sample')} may be copied"
        return f"{found}: nearest training sample at {least:.3g} (a copy: {self.bound:.3g} or less)"

    def text(self) -> str:
        """What `line` says, with what its bound is."""
        count, least = len(self.samples.y), float(self.to_training.distance.min())
        return (
            f"{self.near} of {count} generated samples are as near to a training sample as the nearest {PERCENT:g} % "
            f"of held-out samples are (at {self.bound:.3g} or less); the nearest is at {least:.3g}"
        )

    def as_dict(self, train: Dataset) -> dict[str, Any]:
        """What generated.json holds; rows are those of the training set."""
        pairs = [(one, int(self.to_training.row[one])) for one in self.closest]
        return {
            "line": self.line(),
            "text": self.text(),
            "samples": len(self.samples.y),
            "distance": DISTANCE,
            "generated_to_training": _facts(self.to_training, self.sizes["training"]),
            "held_out_to_training": _facts(self.held_out, self.sizes["training"]),
            "generated_to_held_out": _facts(self.to_held_out, self.sizes["held_out"]),
            "percent": PERCENT,
            "within": self.bound,
            "as_near": self.near,
            "share_as_near": self.near / len(self.samples.y),
            "closest": [
                {
                    "sample": one,
                    "class": train.classes[int(self.samples.y[one])],
                    "training_row": row,
                    "training_class": train.classes[int(train.y[row])],
                    "distance": float(self.to_training.distance[one]),
                }
                for one, row in pairs
            ],
            "about": [SHOWS, SHOWS_NOT, WHO],
        }


def _facts(found: Nearest, among: int) -> dict[str, float]:
    low, middle = float(found.distance.min()), float(found.distance.quantile(0.5))
    return {"of": len(found.row), "among": among, "median": middle, "minimum": low}


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
    best, found = x.new_full((len(x),), torch.inf), torch.zeros(len(x), dtype=torch.int64)
    size = max(1, NUMBERS_AT_ONCE // max(x.shape[1], len(x)))
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        piece = inputs(stored[some], dataset).flatten(1)
        least, at = torch.addmm(piece.square().sum(1), x, piece.T, alpha=-2.0).min(dim=1)
        found = torch.where(least < best, some[at], found)
        best = torch.minimum(best, least)
    pieces = [slice(first, first + size) for first in range(0, len(x), size)]
    return Nearest(torch.cat([_apart(x[some], stored[found[some]], dataset) for some in pieces]), found)


def _apart(x: Tensor, stored: Tensor, dataset: Dataset) -> Tensor:
    return (x - inputs(stored, dataset).flatten(1)).square().mean(1).sqrt()
