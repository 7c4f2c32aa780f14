"""Arithmetic on trees: nested dicts (and tuples such as Weights) with tensors at the leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.types import Params, Tree, Uploads, Weights

T = TypeVar("T")


def tree_map(function: Callable[..., Any], tree: T, *others: T) -> T:
    """Apply `function` leaf by leaf; all trees have the same shape."""
    if isinstance(tree, dict):
        return {k: tree_map(function, v, *(o[k] for o in others)) for k, v in tree.items()}  # type: ignore[index,return-value]
    if isinstance(tree, tuple):
        mapped = [tree_map(function, *leaves) for leaves in zip(tree, *others, strict=True)]  # type: ignore[arg-type]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)  # type: ignore[return-value]
    return function(tree, *others)  # type: ignore[no-any-return]


def leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def stack(trees: list[T]) -> T:
    """Put equal trees side by side: every leaf gains a first dimension."""
    return tree_map(lambda *rows: torch.stack(rows), *trees)


def concatenate(trees: list[T]) -> T:
    """Join stacked trees along their first dimension."""
    return tree_map(lambda *rows: torch.cat(rows), *trees)


def rows(tree: T, index: Any) -> T:
    """Select along the first dimension of every leaf (an int drops it)."""
    return tree_map(lambda leaf: leaf[index], tree)


def clone(tree: T) -> T:
    return tree_map(lambda leaf: leaf.detach().clone(), tree)


def to_device(tree: T, device: torch.device | str) -> T:
    return tree_map(lambda leaf: leaf.to(device), tree)


def zeros_like(tree: T) -> T:
    return tree_map(torch.zeros_like, tree)


def add(a: Params, b: Params, scale: float | Tensor = 1.0) -> Params:
    """a + scale * b, name by name."""
    return {name: a[name] + scale * b[name] for name in a}


def subtract(a: Params, b: Params) -> Params:
    return {name: a[name] - b[name] for name in a}


def dot(a: Params, b: Params) -> Tensor:
    """<a, b> over all names of `a`."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def squared_distance(a: Params, b: Params) -> Tensor:
    """||a - b||^2 over all names of `a`; mse_loss makes fewer passes over the weights than .square().sum()."""
    return torch.stack([F.mse_loss(a[name], b[name], reduction="sum") for name in a]).sum()


def interpolate(a: Weights, b: Weights, share: float) -> Weights:
    """share * a + (1 - share) * b; integer buffers are taken from `a`; share 1 or 0 is exact."""
    if share in (0.0, 1.0):
        return a if share == 1.0 else b

    def mix(x: Tensor, y: Tensor) -> Tensor:
        return share * x + (1.0 - share) * y if x.is_floating_point() else x

    return tree_map(mix, a, b)


def flatten(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """One flat dict with '/' between levels (for safetensors); names themselves may contain dots."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    items = tree._asdict().items() if hasattr(tree, "_asdict") else tree.items()
    flat: dict[str, Tensor] = {}
    for key, value in items:
        flat.update(flatten(value, f"{prefix}/{key}" if prefix else str(key)))
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    tree: Tree = {}
    for path, leaf in flat.items():
        node = tree
        *parents, name = path.split("/")
        for part in parents:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def byte_size(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def as_tree(uploads: Uploads) -> Tree:
    """Uploads as a plain tree; label counts that were not sent are not a leaf."""
    tree: Tree = {
        "params": uploads.weights.params,
        "buffers": uploads.weights.buffers,
        "extra": uploads.extra,
        "size": uploads.size,
        "steps": uploads.steps,
        "travel": uploads.travel,
        "loss": uploads.loss,
        "ids": uploads.ids,
    }
    if uploads.label_counts is not None:
        tree["label_counts"] = uploads.label_counts
    return tree


def from_tree(tree: Tree) -> Uploads:
    return Uploads(
        weights=Weights(tree["params"], tree["buffers"]),
        size=tree["size"],
        steps=tree["steps"],
        travel=tree["travel"],
        loss=tree["loss"],
        extra=tree["extra"],
        label_counts=tree.get("label_counts"),
        ids=tree["ids"],
    )


def select(uploads: Uploads, index: Any) -> Uploads:
    """Some clients of a cohort; an int gives one client's upload without the first dimension."""
    return from_tree(tree_map(lambda leaf: leaf[index], as_tree(uploads)))


def full_precision(x: Tensor) -> Tensor:
    """`x` in float32, or in its own type where that is finer.

    Softmax and KL of half-precision logits are wrong in the third digit.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
