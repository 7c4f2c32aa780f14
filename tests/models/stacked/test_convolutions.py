"""Convolutions and pooling of many clients in one kernel.

The kernels need a GPU, or Triton's interpreter (TRITON_INTERPRET=1, triton installed): then they run on the CPU.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.models.stacked import convolutions as stacked_conv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_a_gpu = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("default")
needs_kernels = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")
TF32 = 2e-3  # ten bits of mantissa, sums over up to 800 products

#        clients, rows, channels, side, filters, kernel, padding
SHAPES = [(2, 3, 3, 6, 5, 5, 2), (2, 2, 32, 5, 20, 3, 1), (1, 2, 32, 6, 64, 5, 2), (3, 1, 4, 7, 8, 3, 0)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


@on_a_gpu
@needs_kernels
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_clients_in_one_kernel_are_each_clients_convolution(shape, channels_last):
    clients, rows, channels, side, filters, kernel, padding = shape
    x = draw(clients, rows, channels, side, side)
    if channels_last:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    inputs = [x, draw(clients, filters, channels, kernel, kernel, seed=1), draw(clients, filters, seed=2)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = torch.stack([F.conv2d(*each, padding=padding) for each in zip(*exact, strict=True)])
    found = torch.func.vmap(lambda *each: stacked_conv._PerClient.apply(*each, padding))(*inputs)
    assert relative(found, wanted) < TF32
    direction = draw(*wanted.shape, seed=3)
    for got, true in zip(
        torch.autograd.grad(found, inputs, direction),
        torch.autograd.grad(wanted, exact, direction.double()),
        strict=True,
    ):
        assert got.shape == true.shape
        assert relative(got, true) < TF32


@on_a_gpu
@needs_kernels
@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_by_two_is_that_of_torch_bit_for_bit_also_among_equals(channels_last):
    x = draw(3, 2, 5, 8, 6).relu()  # many zeros: many ties
    if channels_last:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    x.requires_grad_()
    wanted = F.max_pool2d(x.flatten(0, 1), 2).unflatten(0, (3, 2))
    found = torch.func.vmap(lambda each: stacked_conv._PoolPerClient.apply(each))(x)
    assert torch.equal(found, wanted)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (got,) = torch.autograd.grad(found, x, direction)
    (true,) = torch.autograd.grad(wanted, x, direction)
    assert torch.equal(got, true)


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.Conv2d(3, 32, 5, padding=2), True),
        (nn.Conv2d(6, 16, 5), True),
        (nn.Conv2d(3, 65, 3, padding=1), False),
        (nn.Conv2d(3, 8, 3, stride=2), False),
        (nn.Conv2d(4, 8, 3, groups=2), False),
        (nn.Conv2d(3, 8, 3, dilation=2), False),
        (nn.Conv2d(3, 8, (3, 1)), False),
        (nn.Conv2d(3, 8, 3, padding="same"), False),
        (nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv1d(3, 8, 3), False),
    ],
)
def test_the_kernels_take_only_what_they_are_written_for(layer, fits):
    assert stacked_conv.suits(layer) is fits


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d(2, stride=1), False),
        (nn.MaxPool2d(3), False),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, return_indices=True), False),
        (nn.MaxPool2d(2, ceil_mode=True), False),
        (nn.AvgPool2d(2), False),
    ],
)
def test_only_plain_pooling_by_two_is_replaced(layer, fits):
    assert stacked_conv.pools_by_two(layer) is fits


def test_on_a_cpu_the_layers_are_torchs_own():
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    wanted = layer(x)
    layer.__class__ = stacked_conv.StackedConv2d
    assert torch.equal(layer(x), wanted)
    assert torch.equal(stacked_conv.StackedMaxPool2d(2)(x), F.max_pool2d(x, 2))
