"""What is learnt from, and who holds it: types only. `core.types` hands them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

GIVEN = "(given from Python)"  # stands in a run's files for data or a network that somebody handed over in Python
AT_SITES = "(at the sites)"  # stands there for data that stay with the parties of a deployment
PAD = 0  # the id that fills a text up to the common length; never read, never to be told


@dataclass(frozen=True)
class Tokenizer:
    """How a text becomes ids; id 0 fills what is shorter."""

    file: str  # what a tokenizer.json of the tokenizers package holds
    length: int  # ids of one text
    size: int  # different ids
    mask: int | None = None  # the id of [MASK], where it has one
    first_word: int = PAD + 1  # smaller ids are marks: [CLS], [SEP], places that were left free


class InputColumn(NamedTuple):
    """A column of a table that is learnt from, and the features it became."""

    name: str
    width: int  # features: 1 for a number, more for a vector or for words
    words: tuple[str, ...] = ()  # one feature each, in this order; none for numbers
    missing: str = "refuse"  # the rule data.missing for a cell without a value: "refuse", "skip" the row, or "mean"
    fill: float = 0.0  # with "mean", the number for a cell without one: the mean of the train rows
    flag: bool = False  # whether a second feature says, by 1, which numbers were filled in
    unknown: str = "refuse"  # the rule data.unknown for a word that is not among `words`: "refuse", or all "zeros"


@dataclass(frozen=True, repr=False)
class Dataset:
    """Samples in storage form: images uint8 (n, channels, height, width), text as integer ids (n, length), anything
    else float32.

    The engine turns them into model input: (x / 255 if uint8 - mean) / std, per channel (or feature); ids as int64.
    """

    name: str
    x: Tensor
    y: Tensor  # (n,) int64
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    tokenizer: Tokenizer | None = None  # of text whose ids are tokens; characters have none
    columns: tuple[InputColumn, ...] = ()  # of a table, in the order of its features; none for images and text
    label: str = ""  # the column of the labels; empty where there is none

    def __repr__(self) -> str:
        kind = f"{tuple(self.x.shape[1:])} {str(self.x.dtype).removeprefix('torch.')}"
        return f"Dataset('{self.name}', {len(self.x):,} samples of {kind}, {len(self.classes)} classes)"

    @property
    def text(self) -> bool:
        return self.x.ndim == 2 and not self.x.is_floating_point()


@dataclass(frozen=True, repr=False)
class Federation:
    """Who holds what: client k owns train rows indices[offsets[k]:offsets[k + 1]]."""

    train: Dataset
    test: Dataset
    indices: Tensor  # (sum of sizes,) int64 rows of train
    offsets: Tensor  # (N + 1,) int64
    unlabeled: Tensor | None = None  # (M, ...) same storage form as train.x
    unlabeled_truth: Tensor | None = None  # (M,) labels that only a simulation knows; no method sees them
    unlabeled_ids: tuple[str, ...] | None = None  # a name for each unlabeled row: file, or row of a table
    unlabeled_skipped: tuple[str, ...] = ()  # names of what could not be read of them
    validation: tuple[Tensor, Tensor] | None = None  # labeled rows that the server holds, none of them a client's
    client_test: tuple[Tensor, Tensor] | None = None  # train rows that nobody trains on, offsets: client k tests on its
    names: tuple[str, ...] = ()  # of the clients; empty: they have none
    partition: str = ""  # how it was split, for people
    built_from: str = ""  # the settings that it follows from, as JSON; empty: somebody made it in Python
    public_facts: tuple[str, ...] = ()  # what of the clients' data everybody knows by how they were read, for people

    def __repr__(self) -> str:
        server = "" if self.unlabeled is None else f", {len(self.unlabeled):,} unlabeled on the server"
        split = f", {self.partition}" if self.partition else ""
        held = f"{self.population:,} clients with {len(self.indices):,} samples, {len(self.test.x):,} for the test"
        return f"Federation('{self.train.name}', {held}{server}{split})"

    @property
    def population(self) -> int:
        return len(self.offsets) - 1
