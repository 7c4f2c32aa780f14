"""Modules as pure functions: weights are lent for one call, layers draw from a seed and ignore padded rows.

Dropout draws its mask from the step's seed, not from a global stream; BatchNorm takes its statistics over real
rows only. `Step` brings row weights and the seed to these layers, because a module does not take them as arguments.

Weights are lent by the technique of torch.func.functional_call (tensors are put into the module's own tables and taken
out again), with the places looked up once instead of at every call: on a 64-64-10 MLP a call costs 28 us instead of
56, as much as the bare module.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import to_signed, uniform
from fedstill.core.types import Params, Weights
from fedstill.models.stacked import folded as folded_conv
from fedstill.models.stacked import is_batched, is_wrapped
from fedstill.models.stacked.convolutions import (
    StackedConv2d,
    StackedMaxPool2d,
    available,
    has_stacked_kernels,
    pools_by_two,
)
from fedstill.models.stacked.folded import FoldedConv2d, FoldedGroupNorm, FoldedMean, FoldedShuffle, means_all
from fedstill.models.zoo.char_lstm import StepwiseLSTM

# Odd and unrelated to the counter's constant in core.seeds, so that the masks of two layers never line up.
_DRAW_STRIDE = 0xD1B54A32D192ED03

_ALPHA = -1.7580993408473766  # SELU's value at minus infinity (Klambauer et al., NIPS 2017)


@dataclass
class Step:
    """Values that one call lends to the layers inside it, and values that they leave for the caller."""

    weight: Tensor | None = None  # (B,) 1 real row, 0 padding
    seed: Tensor | None = None  # int64 scalar
    draws: int = 0  # masks drawn so far
    features: Tensor | None = None  # input of the last nn.Linear


@dataclass
class Context:
    """Holds the step that is running now, for the layers of one module."""

    step: Step = field(default_factory=Step)


class PlannedDropout(_DropoutNd):
    """Dropout whose mask is a pure function of the step's seed and of how many masks this call drew before.

    The d-th mask of a call (d = 1, 2, ...) is uniform(seed + d * constant) >= p: client, step and use each have
    their own, and row i has the same mask however much padding follows. `channels` drops whole maps (Dropout2d).
    """

    context: Context
    channels: bool
    alpha: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        step = self.context.step
        if step.seed is None:
            raise FedstillError("this model has dropout: training needs a seed, apply(..., training=True, seed=...)")
        step.draws += 1
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.channels else tuple(x.shape)
        kept = uniform(step.seed + to_signed(step.draws * _DRAW_STRIDE % 2**64), shape) >= self.p
        if self.alpha:
            scale = ((1.0 - self.p) * (1.0 + self.p * _ALPHA**2)) ** -0.5 if self.p < 1.0 else 0.0
            return scale * (torch.where(kept, x, _ALPHA) - _ALPHA * self.p)
        return x * (kept.to(x.dtype) / max(1.0 - self.p, 2.0**-24))


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm over real rows: a row of weight 0 changes nothing but its own output.

    mean and biased variance over n = (real rows) * (positions) values per channel; the running variance gets
    variance * n / (n - 1). With one value per channel or none (n <= 1) there is no variance: the running
    statistics normalise and stay as they are (without running statistics the output is the bias).
    New statistics replace the buffers, they never write into them. Names and values are the same as in nn.BatchNorm.
    """

    running_mean: Tensor  # read only where statistics are tracked
    running_var: Tensor
    num_batches_tracked: Tensor
    context: Context
    folded: bool  # the network's convolutions leave folded images, see folded_conv

    def forward(self, x: Tensor) -> Tensor:
        tracked = self._buffers["running_mean"] is not None
        if tracked and not self.training:
            return self._fused(x, training=False)[0]
        several = x.numel() > x.shape[1]
        if self.context.step.weight is None and several and (self.momentum is not None or not tracked):
            # all rows are real: PyTorch's fused kernel is 2.5 to 4 times faster than the masked form
            if not tracked:
                x = x.contiguous() if is_wrapped(x) else x
                return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
            out, mean, variance = self._fused(x, training=True)
            self._keep(mean, variance, self.num_batches_tracked + 1)
            return out
        return self._masked(x, tracked)

    def _fused(self, x: Tensor, *, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, running mean, running variance); no buffer is written into."""
        mean, variance = self.running_mean, self.running_var
        momentum = (self.momentum or 0.0) if training else 0.0
        if self.folded and is_batched(x) and x.ndim == 4:
            how: dict[str, Any] = {"training": training, "momentum": momentum, "eps": self.eps}
            return folded_conv.batch_norm(x, (mean, variance), self.weight, self.bias, **how)
        # batch_norm cannot ask how memory lies under torch's transforms. A client alone keeps channels last: a
        # copy here makes the next convolution copy back (half MobileNetV2 on a CPU: 540 ms a step, else 210).
        x = x.contiguous() if is_wrapped(x) else x
        if training:
            mean, variance = mean.clone(), variance.clone()
        out = F.batch_norm(x, mean, variance, self.weight, self.bias, training, momentum, self.eps)
        return out, mean, variance

    def _masked(self, x: Tensor, tracked: bool) -> Tensor:
        real = self.context.step.weight
        if real is not None and len(real) != len(x):
            raise FedstillError(
                f"a BatchNorm layer reads {len(x)} rows where the batch has {len(real)}, and cannot tell padding "
                "from data: keep the batch as the first dimension, or use GroupNorm or LayerNorm there"
            )
        weight = x.new_ones(x.shape[0]) if real is None else (real > 0).to(x.dtype)
        channel = (1, -1, *(1 for _ in x.shape[2:]))
        n = weight.sum() * math.prod(x.shape[2:])
        enough = n > 1
        # Not a product: 0 * NaN is NaN, in the backward pass too.
        x = torch.where(weight.reshape(-1, *(1 for _ in x.shape[1:])) > 0, x, 0.0)
        mean = _mean(x, weight, n)
        if tracked:
            mean = torch.where(enough, mean, self.running_mean)
        centred = x - mean.reshape(channel)
        variance = _mean(centred.square(), weight, n)
        if tracked:
            if self.training:
                self._track(mean.detach(), variance.detach(), n, enough)
            variance = torch.where(enough, variance, self.running_var)
        scale = torch.rsqrt(variance + self.eps)
        scale = (scale if self.weight is None else self.weight * scale).reshape(channel)
        return centred * scale if self.bias is None else torch.addcmul(self.bias.reshape(channel), centred, scale)

    def _track(self, mean: Tensor, variance: Tensor, n: Tensor, enough: Tensor) -> None:
        count = self.num_batches_tracked + enough
        share = count.clamp_min(1).to(mean.dtype).reciprocal() if self.momentum is None else self.momentum
        share = share * enough.to(mean.dtype)
        unbiased = variance * (n / (n - 1.0).clamp_min(1.0))
        self._keep(
            self.running_mean + share * (mean - self.running_mean),
            self.running_var + share * (unbiased - self.running_var),
            count,
        )

    def _keep(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self._buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=count)


def _mean(values: Tensor, weight: Tensor, n: Tensor) -> Tensor:
    """Return the mean per channel over the n values in rows of weight 1."""
    rows = values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values
    return (rows * weight[:, None]).sum(0) / n.clamp_min(1.0)


class PaddedMean(nn.AvgPool2d):
    """nn.AvgPool2d with padding, whose gradient a GPU gets wrong for channels-last images (PyTorch 188344)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous() if _on_gpu(x) else x)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


Convolution = type[StackedConv2d | FoldedConv2d]  # runs the convolutions of many clients at once


def convert(module: nn.Module, context: Context, *, fold: bool = True) -> nn.Module:
    """Turn a module's layers in place into the layers above, or into faster ones, and return it.

    Names, attributes and hooks stay. fold: its convolutions may return folded images, which not every function reads.
    """
    convolution: Convolution | None = None  # torch's own, under vmap a grouped one
    if has_stacked_kernels(module):
        convolution = StackedConv2d
    elif fold and folded_conv.all_fold(module):
        convolution = FoldedConv2d
    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm | _DropoutNd):
            _make_pure(layer, context, path, folded=convolution is FoldedConv2d)
        elif faster := _replacement(layer, convolution):
            layer.__class__ = faster  # the same values, read by another forward
    return module


def _replacement(layer: nn.Module, convolution: Convolution | None) -> type[nn.Module] | None:
    """Return the class that runs many clients at once or avoids a mistake of torch; None leaves the layer as it is."""
    if type(layer) is nn.Conv2d:
        return convolution
    if type(layer) is nn.LSTM:
        return None if layer.dropout else StepwiseLSTM
    if type(layer) is nn.ChannelShuffle:
        return FoldedShuffle if convolution is FoldedConv2d else None
    if type(layer) is nn.GroupNorm:
        return FoldedGroupNorm
    if means_all(layer):
        return FoldedMean
    if type(layer) is nn.AvgPool2d and layer.padding not in (0, (0, 0)):
        return PaddedMean
    return StackedMaxPool2d if available() and pools_by_two(layer) else None


def _make_pure(layer: nn.Module, context: Context, path: str, *, folded: bool) -> None:
    if type(layer).forward not in _KNOWN:
        raise FedstillError(
            f"layer {path} ({type(layer).__name__}) changes the forward of a torch.nn batch norm or dropout layer: "
            "padded rows or a global random stream would enter it; use the torch.nn layer itself"
        )
    if isinstance(layer, _BatchNorm):
        layer.__class__ = MaskedBatchNorm
        norm = cast(MaskedBatchNorm, layer)
        norm.context, norm.folded = context, folded
        return
    channels = not isinstance(layer, nn.Dropout | nn.AlphaDropout)
    alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)
    layer.__class__ = PlannedDropout
    dropout = cast(PlannedDropout, layer)
    dropout.context, dropout.channels, dropout.alpha = context, channels, alpha


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_KNOWN = {nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward, *(kind.forward for kind in _DROPOUTS)}


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the one name under which it is stored.

    They differ for tied weights, which have several names and are stored once.
    """
    names: dict[str, str] = {}
    for named_tensors in (module.named_parameters, module.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in named_tensors(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def weights_of(module: nn.Module) -> Weights:
    """Return a copy of a module's weights; parameters without requires_grad are buffers: they are not trained."""
    params: Params = {}
    buffers: Params = {}
    for name, parameter in module.named_parameters():
        (params if parameter.requires_grad else buffers)[name] = parameter.detach().clone()
    buffers.update({name: buffer.detach().clone() for name, buffer in module.named_buffers()})
    return Weights(params, buffers)


class Skeleton:
    """A copy of a module that holds no values and gets them with each call, always in train or always in eval mode.

    Each thread has a body of its own, so that several may call at a time. Calls may nest, because each restores the
    tables as they were before.
    """

    def __init__(
        self, module: nn.Module, *, training: bool, prefix: str = "", stored: Mapping[str, str], fold: bool = True
    ) -> None:
        self._blank = copy.deepcopy(module).to("meta")
        self.training, self._features_of = training, ""
        self._make = partial(Body, training=training, prefix=prefix, stored=stored, fold=fold)
        self._first, self._maker = self._make(copy.deepcopy(self._blank)), threading.get_ident()
        self._of_thread = threading.local()

    @property
    def module(self) -> nn.Module:
        """The module of the thread that made the skeleton."""
        return self._first.module

    @property
    def slots(self) -> list[tuple[str, dict[str, Any], str]]:
        """(name in the weights, table, name in the table) of each tensor of this module."""
        return self._first.slots

    def keep_features_of(self, path: str) -> None:
        """Make each later call leave the input of this layer in `step.features`."""
        self._features_of = path
        self._first.keep_features_of(path)

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, step: Step) -> tuple[Any, Params]:
        """Return the module's result, and in train mode the new value of each buffer (`tensors` stays as it is)."""
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() == self._maker:  # a trace knows no threads
            return self._first.lent(tensors, x, step)
        body: Body | None = getattr(self._of_thread, "body", None)
        if body is None:
            body = self._of_thread.body = self._make(copy.deepcopy(self._blank))
            if self._features_of:
                body.keep_features_of(self._features_of)
        return body.lent(tensors, x, step)


class Body:
    """The module of a skeleton for one thread, and where in its tables each tensor belongs."""

    def __init__(
        self, module: nn.Module, *, training: bool, prefix: str, stored: Mapping[str, str], fold: bool
    ) -> None:
        self.context = Context()
        self.module = convert(module, self.context, fold=fold).train(training)
        self.slots: list[tuple[str, dict[str, Any], str]] = []  # (name in the weights, table, name in the table)
        self.written: list[tuple[str, dict[str, Any], str, bool]] = []  # buffers to read back; True: clone before
        for path, layer in self.module.named_modules(remove_duplicate=False):
            for table in (layer._parameters, layer._buffers):
                for leaf in (leaf for leaf, tensor in table.items() if tensor is not None):
                    name = stored[f"{prefix}{path}.{leaf}" if path else f"{prefix}{leaf}"]
                    self.slots.append((name, table, leaf))
                    if table is layer._buffers and training:
                        self.written.append((name, table, leaf, not isinstance(layer, MaskedBatchNorm)))

    def keep_features_of(self, path: str) -> None:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.context.step.features = inputs[0]

        self.module.get_submodule(path).register_forward_pre_hook(keep)

    def lent(self, tensors: Mapping[str, Tensor], x: Tensor, step: Step) -> tuple[Any, Params]:
        before = [table[leaf] for _, table, leaf in self.slots], self.context.step
        try:
            self.context.step = step
            for name, table, leaf in self.slots:
                table[leaf] = tensors[name]
            for _, table, leaf, foreign in self.written:
                if foreign:
                    table[leaf] = table[leaf].clone()
            result = self.module(x)
            return result, {name: table[leaf].detach() for name, table, leaf, _ in self.written}
        finally:
            self.context.step = before[1]
            for (_, table, leaf), tensor in zip(self.slots, before[0], strict=True):
                table[leaf] = tensor
