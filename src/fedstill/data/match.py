"""Samples of another source in the form of the task's: pixels, columns and classes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.types import Dataset
from fedstill.data.images import fit_images
from fedstill.data.load import load
from fedstill.data.source import Reading, Source
from fedstill.data.tokens import as_tokens

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as pillow turns RGB to grey


def load_like(
    place: str | Path, task: Source, *, key: str, labelled: bool, label: str | None = None, cache_dir: str | None = None
) -> Source:
    """Another source: images in the task's size, a table by its columns, texts as the task's tokens.

    `key` asked, and stands before complaints. Of a task whose texts are not tokens yet they come as texts too.
    """
    reading = replace(reading_like(task, labelled=labelled), label=label)
    if task.train.text and not reading.text:
        raise FedstillError(
            f"{key}: '{place}' cannot be matched with a task that reads characters (data.window); images, tables and "
            "tokens (data.tokens) can"
        )
    try:
        other = load(place, reading, cache_dir=cache_dir)
    except FedstillError as error:
        raise FedstillError(re.sub(r"^data\.\w+:", f"{key}:", str(error))) from error
    return other if task.train.tokenizer is None else as_tokens(other, task.train.tokenizer)


def reading_like(task: Source, *, labelled: bool) -> Reading:
    x, columns = task.train.x, task.columns
    fit = (x.shape[2], x.shape[3]) if x.ndim == 4 else None
    text = task.texts is not None or task.train.tokenizer is not None
    names = tuple(column.name for column in columns)
    return Reading(inputs=names, like=columns, fit=fit, labelled=labelled, text=text)


def match_classes(data: Dataset, task: Source, *, some: bool = False) -> Tensor | None:
    """Labels by the task's numbers; None unless the classes have the same names, in whatever order.

    some: it is enough that every class is one of the task's.
    """
    wanted = task.train.classes
    if data.classes == wanted:
        return data.y
    if not (set(data.classes) <= set(wanted) if some else sorted(data.classes) == sorted(wanted)):
        return None
    return torch.tensor([wanted.index(name) for name in data.classes])[data.y]


def match_storage(x: Tensor, like: Tensor, *, where: str = "the unlabeled set", key: str = "data.unlabeled") -> Tensor:
    """x recoloured (grey <-> RGB), cut to the proportions of `like` and resized to it (bilinear, antialiased)."""
    if x.shape[1:] == like.shape[1:] and x.dtype == like.dtype:
        return x
    if x.ndim != like.ndim or (x.ndim != 4 and x.shape[1:] != like.shape[1:]):
        raise FedstillError(
            f"{key}: samples of {where} are {tuple(x.shape[1:])}, the task's {tuple(like.shape[1:])}; "
            "only images can be brought to another shape"
        )
    if x.ndim != 4:
        return x.to(like.dtype)
    if x.dtype != like.dtype:
        floats, of = (like, "the task") if x.dtype == torch.uint8 else (x, where)
        low, high = (value.item() for value in torch.aminmax(floats))
        if low < 0.0 or high > 1.0:  # only 0 to 1 is known to mean 0 to 255
            raise FedstillError(
                f"{key}: pixels of {of} are floats from {low:g} to {high:g}, the others are bytes; "
                "scale them to [0, 1] or give bytes (uint8)"
            )
    if x.shape[1] == 3 and like.shape[1] == 1:
        luma = torch.einsum("nchw,c->nhw", x.float(), torch.tensor(LUMA))[:, None]
        recoloured = luma.round().to(torch.uint8) if x.dtype == torch.uint8 else luma
    else:
        recoloured = x if x.shape[1] == like.shape[1] else x[:, :1].expand(-1, like.shape[1], -1, -1)
    resized = fit_images(recoloured, like.shape[2], like.shape[3])
    if like.dtype == x.dtype:
        return resized
    if x.dtype == torch.uint8:
        return resized.to(like.dtype) / 255.0
    return (resized * 255.0).round().clamp(0, 255).to(like.dtype)
