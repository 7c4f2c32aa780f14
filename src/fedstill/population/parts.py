"""The part of an upload that travels: the client's own network, and of it only the tensors that the client trains."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedstill.compose.groups import only
from fedstill.compose.moving import frozen_names, moving
from fedstill.core.tree import tree_map
from fedstill.core.types import Model, Params, Training, Tree, Uploads, Weights
from fedstill.population.wire import digest_of, pack_tree


def travelling(upload: Uploads, client: int, model: Model, training: Training) -> Uploads:
    """Return one client's upload without the tensors that the server has already."""
    network = model.network_of(client)
    weights = moving(only(upload.weights, network), model, training.part)
    extra = {name: slots for name, slots in upload.extra.items() if not network or name == network}
    return upload._replace(weights=weights, extra=extra)


def base_digest(weights: Weights, model: Model) -> str:
    """Return a name for the tensors that no training moves and nobody sends; empty where there are none."""
    frozen = {name: leaf for name, leaf in weights.buffers.items() if name in frozen_names(model)}
    return digest_of(pack_tree(frozen)) if frozen else ""


def completed(sent: Uploads, start: Weights, whole: Uploads) -> Tree:
    """Return an upload in the form of `whole`: other networks' tensors are the server's own, extra slots are 0."""

    def filled(kind: str, tensors: Params, given: Params) -> dict[str, Tensor]:
        return {name: tensors[name] if name in tensors else given[name].cpu() for name in getattr(whole.weights, kind)}

    tree: Tree = {name: getattr(sent, name) for name in ("size", "steps", "travel", "loss")}
    tree["params"] = filled("params", sent.weights.params, start.params)
    tree["buffers"] = filled("buffers", sent.weights.buffers, start.buffers)
    tree["extra"] = _with_zeros(sent.extra, whole.extra)
    return tree if sent.label_counts is None else {**tree, "label_counts": sent.label_counts}


def _with_zeros(sent: Mapping[str, Tree], whole: Tree) -> Tree:
    def zeros(leaf: Tensor) -> Tensor:
        return torch.zeros(leaf.shape, dtype=leaf.dtype)

    return {name: sent[name] if name in sent else tree_map(zeros, slots) for name, slots in whole.items()}
