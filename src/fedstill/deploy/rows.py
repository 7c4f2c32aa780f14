"""A site's own rows, read by the agreed form; everything in which they differ from it is named at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset
from fedstill.data import load
from fedstill.data.files import files_of, read_files
from fedstill.data.images import IMAGE_SUFFIXES
from fedstill.data.source import Reading, statistics
from fedstill.data.tables import Frame
from fedstill.data.tokens import as_tokens
from fedstill.experiment.build import agreed_data, in_shape, reading_options
from fedstill.experiment.config import Experiment

FAR = 3.0  # agreed deviations between the agreed mean and a site's, beyond which a unit is doubted
WIDE = 5.0  # times the agreed deviation, or a fifth of it
FEW = 5  # rows, too few to doubt a unit by
SHOWN = 8  # columns in one line


class Rows(NamedTuple):
    """All rows of a site in the agreed form, and what its people should know of them."""

    data: Dataset
    notes: tuple[str, ...]  # how they were read
    doubts: tuple[str, ...]  # what looks different here: a unit, a class that is missing


def read_rows(experiment: Experiment, place: str) -> Rows:
    """Read all rows of a table, a folder of images, texts or an npz file by the agreed form.

    A FedstillError names every difference that keeps the rows from being read. Nothing is fitted to them: classes,
    words, gaps and scale are the agreed ones.
    """
    if not place:
        raise FedstillError("no data yet: name this site's file or folder as `data` in site.toml")
    agreed = agreed_data(experiment)
    mistakes, doubts = _differences(experiment, place)
    if mistakes:
        raise FedstillError(*mistakes)
    try:
        reading = _reading(experiment)
        if agreed.tokenizer is not None:  # the only column of text may have another name, and texts may be files
            reading = replace(reading, like=agreed.columns)
        source = load(place, replace(reading, held_out=0.0))
    except FedstillError as error:
        raise FedstillError(*(_of_site(line) for line in error.lines)) from None
    if agreed.tokenizer is not None:
        source = as_tokens(source, agreed.tokenizer)
    elif experiment.data.shape:
        source = in_shape(source, experiment.data.shape)
    parts = [part for part in (source.train, source.test) if len(part.y)]
    x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
    if x.shape[1:] != agreed.x.shape[1:] or x.dtype != agreed.x.dtype:
        raise FedstillError(
            f"data: samples are {tuple(x.shape[1:])} {x.dtype}, the agreed ones {tuple(agreed.x.shape[1:])} "
            f"{agreed.x.dtype}"
        )
    data = replace(agreed, x=x, y=y)
    notes = tuple(_of_site(note) for note in source.notes if "test split" not in note)
    return Rows(data, notes, (*doubts, *_doubts(data)))


def _reading(experiment: Experiment) -> Reading:
    return replace(Reading(**reading_options(experiment)), keys=())


def _of_site(line: str) -> str:
    """Return a reader's line in the words of a site, whose people have no experiment file to change."""
    for key in ("source", "inputs", "label", "classes"):
        line = line.replace(f"data.{key}: ", "data: ")
    line = line.replace("the task's", "the agreed one's").replace("as the task does", "as agreed")
    return line.replace("that the train rows do not have", "that is not agreed").replace("in the train rows", "agreed")


def _differences(experiment: Experiment, place: str) -> tuple[list[str], list[str]]:
    """Return where a table differs from the agreed form, a line each; of other data the reader says it.

    First the mistakes, which keep the rows from being read, then the doubts, which do not.
    """
    data, root = experiment.data, Path(place).expanduser()
    if not root.exists():
        return [f"data: no such file or folder: '{place}': name this site's data as `data` in site.toml"], []
    if not data.columns or (root.is_dir() and _holds_images(root)):
        return [], []
    reading = _reading(experiment)
    frames, _ = read_files(files_of(root.resolve(), reading), root.resolve(), reading)
    lines: list[str] = []
    present = list(dict.fromkeys(name for frame in frames.values() for name in frame.columns))
    wanted = [*data.columns, *([data.label] if data.label else [])]
    for name in (name for name in wanted if name not in present):
        near = get_close_matches(name, [other for other in present if other not in wanted], n=1)
        kind = "label column" if name == data.label else "column"
        lines.append(f"data: {kind} '{name}' is missing in {root.name}{f'; is it {near[0]!r}?' if near else ''}")
    others = _other_words(experiment, frames)
    if data.unknown == "refuse":
        return [*lines, *(f"data: {line}" for line in others)], []
    return lines, [f"{line}: the others count as no word" for line in others]


def _other_words(experiment: Experiment, frames: Mapping[str, Frame]) -> list[str]:
    """Return the words of a table that nobody agreed on, a line for each column that has some."""
    lines = []
    for name, form in experiment.data.columns.items():
        if not isinstance(form, tuple):
            continue
        cells = [frame.columns[name] for frame in frames.values() if name in frame.columns]
        words = {str(cell) for column in cells for cell in column.tolist() if str(cell).strip() and cell == cell}
        if others := sorted(words - set(form)):
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            lines.append(
                f"column '{name}' holds {', '.join(map(repr, others[:SHOWN]))}{more}, and agreed are the words "
                f"{', '.join(form[:20])}"
            )
    return lines


def _holds_images(root: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in root.rglob("*"))


def _doubts(data: Dataset) -> list[str]:
    """Return what looks different from the agreed form without breaking it."""
    lines, counts = [], np.bincount(data.y.numpy(), minlength=len(data.classes))
    if absent := [name for name, count in zip(data.classes, counts, strict=True) if not count]:
        shown = ", ".join(absent[:SHOWN]) + (" and more" if len(absent) > SHOWN else "")
        lines.append(f"no row here has the class {shown}; that is allowed, look whether it is meant")
    if data.text or len(data.y) < FEW:
        return lines
    width = data.x.shape[1]
    mean, std = (values * width if len(values) == 1 else values for values in (data.mean, data.std))
    here = statistics(data.x.numpy())
    constant = data.x.ndim == 2 and [bool((data.x[:, place] == data.x[0, place]).all()) for place in range(width)]
    names = [""] * width if not data.columns else _names_of_numbers(data)
    for place, name in enumerate(names):
        if data.columns and not name:  # a word, or a mark of gaps
            continue
        away = abs(here[0][place] - mean[place]) / std[place]
        times = here[1][place] / std[place]
        subject = f"column '{name}'" if name else f"channel {place} of the images"
        if constant and constant[place]:
            lines.append(f"{subject} is {data.x[0, place]:g} in every row here: is it filled in?")
        elif away > FAR or not 1 / WIDE <= times <= WIDE:
            lines.append(
                f"{subject} looks different: mean {here[0][place]:.4g} and deviation {here[1][place]:.4g}, and agreed "
                f"are {mean[place]:.4g} and {std[place]:.4g}: is it in another unit?"
            )
    return lines


def _names_of_numbers(data: Dataset) -> list[str]:
    """Return the column of each feature that is a number; empty where it is a word or a mark."""
    names: list[str] = []
    for column in data.columns:
        marks = int(column.flag)
        names += [""] * column.width if column.words else [column.name] * (column.width - marks) + [""] * marks
    return names
