"""Tells before round 1 what a module cannot do, in which layer, and what to write instead."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_stream
from fedstill.core.tree import leaves, tree_map
from fedstill.core.types import Params
from fedstill.core.vmap_rules import why_not_under_vmap
from fedstill.models.layers import Step
from fedstill.models.stateless import Skeleton, canonical_names, weights_of


class _Follow:
    """Knows at any moment which layer of a module is running, and which layer drew random numbers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.running: list[tuple[str, Tensor]] = []  # outermost first; with the random state on entry
        self.drew: str | None = None
        for path, layer in module.named_modules():
            label = f"layer {path} ({type(layer).__name__})" if path else f"the module ({type(layer).__name__})"
            layer.register_forward_pre_hook(self._enter(label))
            layer.register_forward_hook(self._leave)

    def _enter(self, label: str) -> Any:
        return lambda *_: self.running.append((label, torch.random.get_rng_state()))

    def _leave(self, *_: Any) -> None:
        label, state = self.running.pop()
        if self.drew is None and not torch.equal(state, torch.random.get_rng_state()):
            self.drew = label

    @property
    def innermost(self) -> str:
        return self.running[-1][0] if self.running else f"the module ({type(self.module).__name__})"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_training(module: nn.Module, x: Tensor, *, name: str) -> None:
    """The module must run in train mode and may not draw from a global random stream (a run must repeat)."""
    skeleton = Skeleton(module, training=True, stored=canonical_names(module))
    follow = _Follow(skeleton.module)
    weights = weights_of(module)
    try:
        with torch_stream(0), torch.no_grad():
            skeleton({**weights.params, **weights.buffers}, x, Step(torch.ones(len(x)), torch.tensor(0)))
    except FedstillError:
        raise
    except Exception as error:
        where = f"model '{name}' cannot train on a batch of shape {tuple(x.shape)}, in {follow.innermost}"
        raise FedstillError(f"{where}: {first_line(error)}") from error
    if follow.drew is not None:
        raise FedstillError(
            f"model '{name}': {follow.drew} draws random numbers in forward, so that a run would not repeat: "
            "use nn.Dropout layers (fedstill draws their masks from the run's seed) or set its dropout to 0"
        )


def why_unbatchable(module: nn.Module, example_input: Tensor, *, fold: bool = True) -> str | None:
    """Why vmap cannot train the module for many clients at once, and what to do; None if it can.

    Tries it: two clients on the CPU, with padding and without, forward and backward, and in eval mode.
    `example_input` is a small batch (B, ...); fold: see layers.convert.
    """
    stored = canonical_names(module)
    for training in (True, False):
        skeleton = Skeleton(module, training=training, stored=stored, fold=fold)
        follow = _Follow(skeleton.module)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an operation that vmap runs client by client is slow, not wrong
                _try_two(module, skeleton, example_input)
        except Exception as error:
            return _explain(follow.innermost, first_line(error))
    return None


def _try_two(module: nn.Module, skeleton: Skeleton, example_input: Tensor) -> None:
    params, buffers = tree_map(lambda leaf: torch.stack([leaf, leaf]), weights_of(module))
    trained = [leaf.requires_grad_() for leaf in params.values()]
    x = torch.stack([example_input, example_input])

    def client(params: Params, buffers: Params, x: Tensor, seed: Tensor, *weight: Tensor) -> Any:
        return skeleton({**params, **buffers}, x, Step(weight[0] if weight else None, seed))

    padded = [[torch.ones(x.shape[:2])]] if skeleton.training else []
    for weight in [*padded, []]:
        result, _ = vmap(client)(params, buffers, x, torch.arange(2), *weight)
        total = torch.stack([leaf.sum() for leaf in leaves(result)]).sum()
        if total.requires_grad and skeleton.training:
            torch.autograd.grad(total, trained, allow_unused=True)


def _explain(layer: str, message: str) -> str:
    what, cure = why_not_under_vmap(message) or (f"fails under vmap ({message})", "see 'torch.func.vmap' limitations")
    return f"{layer} {what} and so cannot run for many clients at once: {cure}, or set engine.name = 'looped'"
