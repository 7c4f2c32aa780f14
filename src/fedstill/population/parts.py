"""The part of an upload that travels: the client's own network, and of it only the tensors that the client trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedstill.compose.groups import only
from fedstill.compose.head_only import head_names, head_of
from fedstill.core.tree import tree_map
from fedstill.core.types import Model, Params, Training, Tree, Uploads, Weights


def travelling(upload: Uploads, client: int, model: Model, training: Training) -> Uploads:
    """Return one client's upload without the tensors that the server has already."""
    network = model.network_of(client)
    weights = only(upload.weights, network)
    if training.part == "head":
        weights = head_of(weights, tuple(name for name in head_names(model) if name in weights.params))
    extra = {name: slots for name, slots in upload.extra.items() if not network or name == network}
    return upload._replace(weights=weights, extra=extra)


def completed(sent: Uploads, start: Weights, whole: Uploads) -> Tree:
    """Return an upload in the form of `whole`: tensors that did not travel are the server's own, extra slots are 0."""

    def filled(kind: str, own: Params, given: Params) -> dict[str, Tensor]:
        return {name: own[name] if name in own else given[name].cpu() for name in getattr(whole.weights, kind)}

    tree: Tree = {name: getattr(sent, name) for name in ("size", "steps", "travel", "loss")}
    tree["params"] = filled("params", sent.weights.params, start.params)
    tree["buffers"] = filled("buffers", sent.weights.buffers, start.buffers)
    tree["extra"] = _with_zeros(sent.extra, whole.extra)
    return tree if sent.label_counts is None else {**tree, "label_counts": sent.label_counts}


def _with_zeros(own: Mapping[str, Tree], whole: Tree) -> Tree:
    def zeros(leaf: Tensor) -> Tensor:
        return torch.zeros(leaf.shape, dtype=leaf.dtype)

    return {name: own[name] if name in own else tree_map(zeros, slots) for name, slots in whole.items()}
