"""How inputs are scaled: by whose mean and deviation, and which facts of the clients' data that makes public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedstill.core.errors import FedstillError, suggest
from fedstill.data.load import is_embedded
from fedstill.data.source import Source, Unlabeled, published_statistics, statistics

SCALES = ("train", "unlabeled", "none")
CLIENTS_STATISTICS = "mean and deviation of all clients' inputs (data.scale can change that)"

Constants = tuple[tuple[float, ...], tuple[float, ...]]  # mean, std


def scale_inputs(
    source: Source,
    unlabeled: Unlabeled | Tensor | None = None,
    how: str = "train",
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Source:
    """The source with another mean and deviation for all its inputs; the stored samples stay as they are.

    how: 'train' (as it was loaded: by the train rows, or published constants), 'unlabeled' (by the server's own set,
    so that no client's row moves another client's inputs) or 'none' (inputs as they are, images from 0 to 1).
    mean, std: numbers instead, known beforehand: one for all channels or columns, or one for each.
    """
    if how not in SCALES:
        raise FedstillError(f"data.scale = '{how}' is unknown: {suggest(how, SCALES)}")
    width = source.train.x.shape[1]
    if mean or std:
        _check_numbers(source, mean, std, width)
        return _scaled(source, (tuple(mean), tuple(std)), "given")
    if how == "unlabeled":
        return _scaled(source, _of_unlabeled(source, unlabeled), how)
    if how == "none" and not source.train.text:
        return _scaled(source, ((0.0,) * width, (1.0,) * width), how)
    return source


def public_facts(source: Source) -> tuple[str, ...]:
    """Facts about the clients' data that everybody knows because of how they were read, in words."""
    data = source.train
    open_data = is_embedded(source.origin) or (data.mean, data.std) == published_statistics(data.name)
    if data.text or source.scale != "train" or open_data:
        return source.public_facts
    return (*source.public_facts, CLIENTS_STATISTICS)


def _scaled(source: Source, constants: Constants, how: str) -> Source:
    mean, std = constants
    train, test = (replace(part, mean=mean, std=std) for part in (source.train, source.test))
    return source._replace(train=train, test=test, scale=how)


def _of_unlabeled(source: Source, unlabeled: Unlabeled | Tensor | None) -> Constants:
    wanted, key = source.train.x, "data.scale = 'unlabeled'"
    if source.train.text:
        raise FedstillError(f"{key}: {source.train.name} is read as text, which is not scaled; leave data.scale out")
    x = unlabeled.x if isinstance(unlabeled, Unlabeled) else unlabeled
    if x is None or not len(x):
        raise FedstillError(
            f"{key}: the server has no unlabeled set to take mean and deviation from; set data.unlabeled (a number of "
            "rows, a folder or a file), or data.scale = 'none'"
        )
    if x.shape[1:] != wanted.shape[1:] or x.dtype != wanted.dtype:
        raise FedstillError(
            f"{key}: unlabeled samples are {tuple(x.shape[1:])} {x.dtype}, the task's are {tuple(wanted.shape[1:])} "
            f"{wanted.dtype}; give samples of the same kind, or data.scale = 'none'"
        )
    return statistics(x.numpy())


def _check_numbers(source: Source, mean: Sequence[float], std: Sequence[float], width: int) -> None:
    if source.train.text:
        raise FedstillError(f"data.mean: {source.train.name} is read as text, which is not scaled; leave it out")
    for key, numbers in (("data.mean", mean), ("data.std", std)):
        if len(numbers) not in (1, width):
            wanted = "1" if width == 1 else f"1 or {width}"
            unit = "channels" if source.train.x.ndim > 2 else "columns (a word of a column counts as one)"
            raise FedstillError(
                f"{key} has {len(numbers)} numbers, {source.train.name} has {width} {unit}: give {wanted}"
            )
    if min(std) <= 0:
        raise FedstillError(f"data.std holds {min(std):g}; deviations are above 0")
