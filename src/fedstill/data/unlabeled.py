"""Inputs for the server without labels: none, held out of train, the test inputs, or those of another dataset."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import numpy_generator, seed_for
from fedstill.core.types import Dataset
from fedstill.data.datasets import load_as
from fedstill.data.images import resize_images
from fedstill.data.source import Reading, Source

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as pillow turns RGB to grey


def split_unlabeled(
    source: Source, choice: str | int, *, seed: int, limit: int | None = None, cache_dir: str | None = None
) -> tuple[Source, Tensor | None]:
    """(what is left of the source, the server's unlabeled inputs in the task's storage form).

    choice: 'none'; 'test' (transductive: the test inputs); a number of train rows, taken away from the clients
    before they are shared out; or another source, all of whose inputs are brought to the task's shape.
    limit keeps a random part of that size.
    """
    if isinstance(choice, str) and choice.lstrip("-").isdigit():
        choice = int(choice)
    if choice in ("none", "", 0):
        return source, None
    if isinstance(choice, int):
        rest, inputs = _hold_out(source, choice, seed)
    elif choice == "test":
        rest, inputs = source, source.test.x
    else:
        rest, inputs = source, _other_inputs(source, choice, cache_dir)
    if limit is not None and limit < len(inputs):
        rows = numpy_generator(seed_for(seed, "unlabeled", "limit")).choice(len(inputs), limit, replace=False)
        inputs = inputs[torch.from_numpy(np.sort(rows))]
    return rest, inputs


def _hold_out(source: Source, count: int, seed: int) -> tuple[Source, Tensor]:
    rows = len(source.train.y)
    if isinstance(count, bool) or not 0 < count < rows:
        raise FedstillError(f"data.unlabeled: cannot hold out {count} of {rows} train rows; give 1 to {rows - 1}")
    order = numpy_generator(seed_for(seed, "unlabeled")).permutation(rows)
    taken, kept = np.sort(order[:count]), np.sort(order[count:])
    rest = source._replace(
        train=_rows_of(source.train, kept), keys={key: values[kept] for key, values in source.keys.items()}
    )
    return rest, source.train.x[torch.from_numpy(taken)]


def _rows_of(dataset: Dataset, rows: np.ndarray) -> Dataset:
    index = torch.from_numpy(rows)
    return replace(dataset, x=dataset.x[index], y=dataset.y[index])


def _other_inputs(source: Source, choice: str, cache_dir: str | None) -> Tensor:
    side = max(source.train.x.shape[2:], default=None)
    try:
        other = load_as(choice, Reading(labelled=False, mixed_size=side), cache_dir=cache_dir)
    except FedstillError as error:
        raise FedstillError(str(error).replace("data.source:", "data.unlabeled:", 1)) from error
    if other.origin == source.origin:
        raise FedstillError(
            f"data.unlabeled: '{choice}' is the clients' own dataset; give a number of its rows to hold out, or 'test'"
        )
    if source.train.x.ndim != 4:
        raise FedstillError(
            f"data.unlabeled: the columns of '{choice}' cannot be matched with the task's; "
            "give a number of rows to hold out, or 'test' (another source works for images)"
        )
    return match_storage(other.train.x, source.train.x, where=choice)


def match_storage(x: Tensor, like: Tensor, *, where: str = "the unlabeled set") -> Tensor:
    """x recoloured (grey <-> RGB) and resized (bilinear, antialiased) to the shape and type of `like`."""
    if x.shape[1:] == like.shape[1:] and x.dtype == like.dtype:
        return x
    if x.ndim != like.ndim or (x.ndim != 4 and x.shape[1:] != like.shape[1:]):
        raise FedstillError(
            f"data.unlabeled: samples of {where} are {tuple(x.shape[1:])}, the task's {tuple(like.shape[1:])}; "
            "only images can be brought to another shape"
        )
    if x.ndim != 4:
        return x.to(like.dtype)
    resized = resize_images(_recolour(x, like.shape[1]), like.shape[2], like.shape[3])
    if like.dtype == x.dtype:
        return resized
    if x.dtype == torch.uint8:
        return resized.to(like.dtype) / 255.0
    return (resized * 255.0).round().clamp(0, 255).to(like.dtype)


def _recolour(x: Tensor, channels: int) -> Tensor:
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 3 and channels == 1:
        luma = torch.einsum("nchw,c->nhw", x.float(), torch.tensor(LUMA))[:, None]
        return luma.round().to(torch.uint8) if x.dtype == torch.uint8 else luma
    return x[:, :1].expand(-1, channels, -1, -1)
