"""A convolution that, under vmap on a GPU, runs all clients in one kernel instead of one kernel a client."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

LARGEST = 64  # channels and filters; beyond, cuDNN a client on streams of its own is faster (docs/concepts.md)


@cache
def available() -> bool:
    """Triton comes with PyTorch's CUDA builds."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def suits(layer: nn.Module) -> bool:
    """Stride 1, square kernel and padding, few channels: what the kernels are written for."""
    if type(layer) is not nn.Conv2d or not isinstance(layer.padding, tuple):
        return False
    square = len(set(layer.kernel_size)) == 1 and len(set(layer.padding)) == 1
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
    small = max(layer.in_channels, layer.out_channels) <= LARGEST and layer.padding[0] < layer.kernel_size[0]
    return square and plain and small and layer.padding_mode == "zeros"


class _Stacked(torch.autograd.Function):
    """x (C, B, channels, H, W) and weights of every client, in memory as the kernels want them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        from fedstill.models import conv_kernels

        rows = x.permute(0, 1, 3, 4, 2).contiguous()
        taps = weight.permute(0, 3, 4, 2, 1).contiguous()  # (C, kernel, kernel, channels, filters)
        ctx.save_for_backward(rows, taps)
        ctx.padding, ctx.has_bias = padding, bias is not None
        return conv_kernels.forward(rows, taps, bias, padding).permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:  # type: ignore[override]
        from fedstill.models import conv_kernels

        rows, taps = ctx.saved_tensors
        g = gradient.permute(0, 1, 3, 4, 2).contiguous()
        dw, db = conv_kernels.weight_gradient(rows, g, taps.shape[1], ctx.padding)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = conv_kernels.input_gradient(g, taps, ctx.padding).permute(0, 1, 4, 2, 3)
        return dx, dw.permute(0, 4, 3, 1, 2), db if ctx.has_bias else None, None


class _PerClient(torch.autograd.Function):
    """The vmap rule: weights of several clients go to `_Stacked`; shared weights are one plain convolution."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        return F.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise AssertionError("only called under vmap")

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None, padding: int
    ) -> tuple[Tensor, int]:
        x = x.movedim(dims[0], 0) if dims[0] is not None else x.expand(info.batch_size, *x.shape)
        if dims[1] is None:
            flat = F.conv2d(x.flatten(0, 1), weight, bias, padding=padding)
            return flat.reshape(*x.shape[:2], *flat.shape[1:]), 0
        weight = weight.movedim(dims[1], 0)
        if bias is not None and dims[2] is not None:
            bias = bias.movedim(dims[2], 0)
        return _Stacked.apply(x, weight, bias, padding), 0  # type: ignore[no-untyped-call]


class StackedConv2d(nn.Module):
    """nn.Conv2d with the same parameters; alone, under autocast or without TF32 it is exactly F.conv2d."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.padding = int(layer.padding[0])
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(layer, name))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        plain = x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        if plain and is_batchedtensor(weight) and torch.backends.cudnn.allow_tf32:
            out: Tensor = _PerClient.apply(x, weight, bias, self.padding)  # type: ignore[no-untyped-call]
            return out
        return F.conv2d(x, weight, bias, padding=self.padding)
