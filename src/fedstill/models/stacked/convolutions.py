"""A convolution that, under vmap on a GPU, runs all clients in one kernel instead of one kernel a client."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedstill.models.stacked import is_batched, is_wrapped

LARGEST = 64  # channels and filters; beyond, cuDNN a client on streams of its own is faster (docs/concepts.md)


@cache
def available() -> bool:
    """Return whether Triton can run here: there is a GPU, and PyTorch's CUDA build has brought Triton."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def suits(layer: nn.Module) -> bool:
    """Return whether the kernels can run a layer: stride 1, square kernel and padding, few channels."""
    if type(layer) is not nn.Conv2d or not isinstance(layer.padding, tuple):
        return False
    square = len(set(layer.kernel_size)) == 1 and len(set(layer.padding)) == 1
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
    small = max(layer.in_channels, layer.out_channels) <= LARGEST and layer.padding[0] < layer.kernel_size[0]
    return square and plain and small and layer.padding_mode == "zeros"


def has_stacked_kernels(module: nn.Module) -> bool:
    """Return whether every convolution of a module can run for many clients in one kernel here."""
    convolutions = [layer for layer in module.modules() if isinstance(layer, _ConvNd)]
    return bool(convolutions) and available() and all(suits(layer) for layer in convolutions)


class _Stacked(torch.autograd.Function):
    """x (C, B, channels, H, W) and the weights of every client (C, filters, channels, kernel, kernel)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        from fedstill.models.stacked import triton_kernels as conv_kernels

        ctx.channels, ctx.padding, ctx.has_bias = x.shape[2], padding, bias is not None
        x = _channels_last(x, spare=-x.shape[2] % 4)
        taps = weight.permute(0, 1, 3, 4, 2)  # no copy in the stack's own layout, see engine/probe.py
        taps = F.pad(taps, (0, x.shape[2] - ctx.channels)).contiguous()
        ctx.save_for_backward(x, taps)
        return conv_kernels.forward(x, taps, bias, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:  # type: ignore[override]
        from fedstill.models.stacked import triton_kernels as conv_kernels

        x, taps = ctx.saved_tensors
        g = _channels_last(gradient)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = conv_kernels.input_gradient(g, taps, ctx.padding)[:, :, : ctx.channels]
        if x.shape[2] >= 16:  # sums over pixels run along memory: worth two transposed copies
            x, g = x.contiguous(), g.contiguous()
        dw, db = conv_kernels.weight_gradient(x, g, taps.shape[2], ctx.padding)
        dw = dw[..., : ctx.channels].permute(0, 1, 4, 2, 3)
        return dx, dw, db if ctx.has_bias else None, None


def _channels_last(image: Tensor, spare: int = 0) -> Tensor:
    """Return images (C, B, channels + spare, H, W) with the channels last in memory; spare channels are zero.

    Three colours are padded to four, because four floats are one load.
    """
    rows = image.permute(0, 1, 3, 4, 2)
    return (F.pad(rows, (0, spare)) if spare else rows.contiguous()).permute(0, 1, 4, 2, 3)


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


class StackedConv2d(nn.Conv2d):
    """nn.Conv2d; where every client has weights of its own, in TF32, all of them in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        plain = x.is_cuda and x.ndim == 4 and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        if not plain or not is_batched(self.weight) or not torch.backends.cudnn.allow_tf32:
            return super().forward(x)
        out: Tensor = _PerClient.apply(x, self.weight, self.bias, int(self.padding[0]))  # type: ignore[no-untyped-call]
        return out


class _Pool(torch.autograd.Function):
    """2 x 2 maximum of images (R, channels, H, W), channels first or channels last in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from fedstill.models.stacked import triton_kernels as conv_kernels

        ctx.last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        rows, channels, height, width = x.shape
        if ctx.last:
            out, which = conv_kernels.pool(x.permute(0, 2, 3, 1))
            out = out.permute(0, 3, 1, 2)
        else:
            out, which = conv_kernels.pool(x.contiguous().view(rows * channels, height, width, 1))
            out = out.view(rows, channels, height // 2, width // 2)
        ctx.save_for_backward(which)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        from fedstill.models.stacked import triton_kernels as conv_kernels

        (which,) = ctx.saved_tensors
        if ctx.last:
            return conv_kernels.unpool(gradient.permute(0, 2, 3, 1).contiguous(), which).permute(0, 3, 1, 2)
        rows, channels, tall, wide = gradient.shape
        dx = conv_kernels.unpool(gradient.contiguous().view(rows * channels, tall, wide, 1), which)
        return dx.view(rows, channels, 2 * tall, 2 * wide)


class _PoolPerClient(torch.autograd.Function):
    """The vmap rule of `_Pool`: clients are more rows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise AssertionError("only called under vmap")

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        x = x.movedim(dims[0] or 0, 0)
        out: Tensor = _Pool.apply(x.flatten(0, 1))  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:2], *out.shape[1:]), 0


class StackedMaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d(2) on a GPU, several times faster backward; the same values and the same choice among equals."""

    def forward(self, x: Tensor) -> Tensor:
        fits = x.is_cuda and x.dtype == torch.float32 and x.ndim == 4 and not (x.shape[2] % 2 or x.shape[3] % 2)
        # torch.func.grad needs a rule that these kernels do not have, and torch.compile makes its own
        if not fits or torch.compiler.is_dynamo_compiling() or (is_wrapped(x) and not is_batched(x)):
            return F.max_pool2d(x, 2)
        pool = _PoolPerClient if is_batched(x) else _Pool
        out: Tensor = pool.apply(x)  # type: ignore[no-untyped-call]
        return out


def pools_by_two(layer: nn.Module) -> bool:
    """Return whether a layer is nn.MaxPool2d(2) with its defaults."""
    if type(layer) is not nn.MaxPool2d:
        return False
    plain = layer.padding == 0 and layer.dilation == 1 and not layer.return_indices and not layer.ceil_mode
    return plain and layer.kernel_size == 2 and layer.stride == 2
