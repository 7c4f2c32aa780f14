"""Layers that a converted module uses in place of PyTorch's own, so that one step is a pure function.

Dropout draws its mask from the step's seed, not from a global stream; BatchNorm takes its statistics over real
rows only. What a module cannot be given as an argument (row weights, the seed) reaches them through `Step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import to_signed, uniform
from fedstill.models import folded_conv
from fedstill.models.folded_conv import FoldedConv2d, FoldedGroupNorm, FoldedMean, means_all
from fedstill.models.recurrent import StepwiseLSTM
from fedstill.models.stacked_conv import StackedConv2d, StackedMaxPool2d, available, has_stacked_kernels, pools_by_two
from fedstill.models.transforms import is_batched, is_wrapped

# Odd and unrelated to the counter's constant in core.seeds, so that the masks of two layers never line up.
_DRAW_STRIDE = 0xD1B54A32D192ED03

_ALPHA = -1.7580993408473766  # SELU's value at minus infinity (Klambauer et al., NIPS 2017)


@dataclass
class Step:
    """What one call lends to the layers inside it, and what they leave behind for the caller."""

    weight: Tensor | None = None  # (B,) 1 real row, 0 padding
    seed: Tensor | None = None  # int64 scalar
    draws: int = 0  # masks drawn so far
    features: Tensor | None = None  # what the last nn.Linear read


@dataclass
class Context:
    """Where the layers of one module find the step that is running now."""

    step: Step = field(default_factory=Step)


class PlannedDropout(nn.Module):
    """Dropout whose mask is a pure function of the step's seed and of how many masks this call drew before.

    The d-th mask of a call (d = 1, 2, ...) is uniform(seed + d * constant) >= p: client, step and use each have
    their own, and row i has the same mask however much padding follows. `channels` drops whole maps (Dropout2d).
    """

    def __init__(self, p: float, context: Context, *, channels: bool, alpha: bool) -> None:
        super().__init__()
        self.p, self.context, self.channels, self.alpha = p, context, channels, alpha

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


class MaskedBatchNorm(nn.Module):
    """BatchNorm over real rows: a row of weight 0 changes nothing but its own output.

    mean and biased variance over n = (real rows) * (positions) values per channel; the running variance gets
    variance * n / (n - 1). With one value per channel or none (n <= 1) there is no variance: the running
    statistics normalise and stay as they are (without running statistics the output is the bias).
    New statistics replace the buffers, they never write into them. Names and values are those of nn.BatchNorm.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: _BatchNorm, context: Context) -> None:
        super().__init__()
        self.eps, self.momentum, self.context = norm.eps, norm.momentum, context
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        tracked = self._buffers["running_mean"] is not None
        if tracked and not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        several = x.numel() > x.shape[1]
        if self.context.step.weight is None and several and (self.momentum is not None or not tracked):
            return self._native(x, tracked)
        return self._masked(x, tracked)

    def _native(self, x: Tensor, tracked: bool) -> Tensor:
        """All rows are real: PyTorch's fused kernel, 2.5 to 4 times faster than the masked form."""
        if not tracked:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        running, momentum = (self.running_mean, self.running_var), self.momentum or 0.0
        if is_batched(x) and x.ndim == 4:
            out, mean, variance = folded_conv.batch_norm(x, *running, self.weight, self.bias, momentum, self.eps)
        else:
            # batch_norm cannot ask how memory lies under torch's transforms. A client alone keeps channels last: a
            # copy here makes the next convolution copy back (half MobileNetV2 on a CPU: 540 ms a step, else 210).
            mean, variance = (statistic.clone() for statistic in running)
            x = x.contiguous() if is_wrapped(x) else x
            out = F.batch_norm(x, mean, variance, self.weight, self.bias, True, momentum, self.eps)
        self._keep(mean, variance, self.num_batches_tracked + 1)
        return out

    def _masked(self, x: Tensor, tracked: bool) -> Tensor:
        weight = self._real_rows(x)
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

    def _real_rows(self, x: Tensor) -> Tensor:
        given = self.context.step.weight
        if given is None:
            return x.new_ones(x.shape[0])
        if len(given) != len(x):
            raise FedstillError(
                f"a BatchNorm layer reads {len(x)} rows where the batch has {len(given)}, and cannot tell padding "
                "from data: keep the batch as the first dimension, or use GroupNorm or LayerNorm there"
            )
        return (given > 0).to(x.dtype)

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
    """Per channel, over the n values in rows of weight 1."""
    rows = values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values
    return (rows * weight[:, None]).sum(0) / n.clamp_min(1.0)


def convert(module: nn.Module, context: Context) -> nn.Module:
    """The module with dropout, BatchNorm, LSTM and some convolutions replaced in place; names stay."""
    replaced: dict[nn.Module, nn.Module] = {}
    own_convolution = _convolution_for(module)
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        stacked = (own_convolution and isinstance(layer, nn.Conv2d)) or (available() and pools_by_two(layer))
        stacked = stacked or means_all(layer)
        if type(layer) is nn.LSTM and not layer.dropout:
            layer.__class__ = StepwiseLSTM  # the same values, read by another forward
        if type(layer) is nn.GroupNorm:
            layer.__class__ = FoldedGroupNorm
        if not isinstance(layer, _BatchNorm | _DropoutNd) and not stacked:
            continue
        if layer not in replaced:
            own = own_convolution if isinstance(layer, nn.Conv2d) else None
            replaced[layer] = own(layer) if own else _replacement(layer, context, path)
        if not path:
            return replaced[layer]
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, replaced[layer])
    return module


def _convolution_for(module: nn.Module) -> type[StackedConv2d | FoldedConv2d] | None:
    """What runs the convolutions of many clients at once; None: torch's own, under vmap a grouped one."""
    if has_stacked_kernels(module):
        return StackedConv2d
    return FoldedConv2d if folded_conv.all_fold(module) else None


def _replacement(layer: nn.Module, context: Context, path: str) -> nn.Module:
    if isinstance(layer, nn.MaxPool2d):
        return StackedMaxPool2d()
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return FoldedMean()
    if type(layer).forward not in _KNOWN:
        raise FedstillError(
            f"layer {path} ({type(layer).__name__}) changes the forward of a torch.nn batch norm or dropout layer: "
            "padded rows or a global random stream would enter it; use the torch.nn layer itself"
        )
    if isinstance(layer, _BatchNorm):
        return MaskedBatchNorm(layer, context)
    channels = not isinstance(layer, nn.Dropout | nn.AlphaDropout)
    alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)
    assert isinstance(layer, _DropoutNd)
    return PlannedDropout(layer.p, context, channels=channels, alpha=alpha)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_KNOWN = {nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward, *(kind.forward for kind in _DROPOUTS)}
