"""Convolutions of many clients at once on a GPU: implicit matrix products in Triton, TF32 like cuDNN's default.

cuDNN runs a grouped convolution group by group; here the client is a dimension of the grid. Activations lie in
memory as (client, row, height, width, channel). Stride 1, square zero padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[misc]
def _forward_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr,
    rows, height, width, out_height, out_width,
    CHANNELS: tl.constexpr, FILTERS: tl.constexpr, KERNEL: tl.constexpr, PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, WHOLE_TAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[c, m, f] = bias[c, f] + sum_k x[c, m moved by tap k, channel k] w[c, k, f]."""
    client = tl.program_id(1).to(tl.int64)
    pixels = rows * out_height * out_width
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = m // (out_height * out_width)
    top = (m // out_width) % out_height - PAD
    left = m % out_width - PAD
    real = m < pixels
    x_ptr += client * rows * height * width * CHANNELS
    total = KERNEL * KERNEL * CHANNELS
    w_ptr += client * total * FILTERS
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, total, BLOCK_K):
        if WHOLE_TAPS:  # the block lies inside one tap: one shift for all, contiguous channels
            tap = first // CHANNELS
            y = top + tap // KERNEL
            z = left + tap % KERNEL
            inside = real & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            at = ((row * height + y) * width + z) * CHANNELS + first % CHANNELS
            a = tl.load(x_ptr + at[:, None] + k[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(w_ptr + (first + k)[:, None] * FILTERS + n[None, :], mask=(n < FILTERS)[None, :], other=0.0)
        else:
            place = first + k
            tap = place // CHANNELS
            y = top[:, None] + (tap // KERNEL)[None, :]
            z = left[:, None] + (tap % KERNEL)[None, :]
            inside = real[:, None] & (y >= 0) & (y < height) & (z >= 0) & (z < width) & (place < total)[None, :]
            at = ((row[:, None] * height + y) * width + z) * CHANNELS + (place % CHANNELS)[None, :]
            a = tl.load(x_ptr + at, mask=inside, other=0.0)
            known = (place < total)[:, None] & (n < FILTERS)[None, :]
            b = tl.load(w_ptr + place[:, None] * FILTERS + n[None, :], mask=known, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + client * FILTERS + n, mask=n < FILTERS, other=0.0)[None, :]
    to = out_ptr + client * pixels * FILTERS + m[:, None] * FILTERS + n[None, :]
    tl.store(to, sums, mask=real[:, None] & (n < FILTERS)[None, :])


@triton.jit  # type: ignore[misc]
def _weight_kernel(
    x_ptr, g_ptr, dw_ptr, db_ptr,
    rows, height, width, out_height, out_width, share,
    CHANNELS: tl.constexpr, FILTERS: tl.constexpr, KERNEL: tl.constexpr, PAD: tl.constexpr,
    WHOLE_TAPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[s, c, k, f] = sum over the s-th share of pixels of x[c, m moved by tap k, channel k] g[c, m, f]."""
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    pixels = rows * out_height * out_width
    total = KERNEL * KERNEL * CHANNELS
    place = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    x_ptr += client * rows * height * width * CHANNELS
    g_ptr += client * pixels * FILTERS
    tap = place // CHANNELS
    down = tap // KERNEL - PAD
    right = tap % KERNEL - PAD
    channel = place % CHANNELS
    sums = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    last = tl.minimum((part + 1) * share, pixels)
    for first in range(part * share, last, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        real = m < last
        row = m // (out_height * out_width)
        y = (m // out_width) % out_height
        z = m % out_width
        g = tl.load(g_ptr + m[:, None] * FILTERS + n[None, :], mask=real[:, None] & (n < FILTERS)[None, :], other=0.0)
        if WHOLE_TAPS:
            one = (tl.program_id(0) * BLOCK_K) // CHANNELS
            up, across = y + one // KERNEL - PAD, z + one % KERNEL - PAD
            inside = real & (up >= 0) & (up < height) & (across >= 0) & (across < width)
            at = ((row * height + up) * width + across) * CHANNELS
            a = tl.load(x_ptr + at[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
        else:
            up = y[:, None] + down[None, :]
            across = z[:, None] + right[None, :]
            inside = real[:, None] & (up >= 0) & (up < height) & (across >= 0) & (across < width)
            at = ((row[:, None] * height + up) * width + across) * CHANNELS + channel[None, :]
            a = tl.load(x_ptr + at, mask=inside & (place < total)[None, :], other=0.0)
        sums = tl.dot(tl.trans(a), g, sums, input_precision="tf32")
        bias += tl.sum(g, axis=0)
    base = (part * tl.num_programs(1) + client).to(tl.int64)
    to = dw_ptr + base * total * FILTERS + place[:, None] * FILTERS + n[None, :]
    tl.store(to, sums, mask=(place < total)[:, None] & (n < FILTERS)[None, :])
    if tl.program_id(0) == 0:
        tl.store(db_ptr + base * FILTERS + n, bias, mask=n < FILTERS)


def _power(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """x (C, B, H, W, channels), weight (C, kernel, kernel, channels, filters) -> (C, B, H', W', filters)."""
    clients, rows, height, width, channels = x.shape
    kernel, filters = weight.shape[1], weight.shape[-1]
    tall, wide = height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1
    out = x.new_empty(clients, rows, tall, wide, filters)
    block_m, block_n, block_k = 128, min(64, _power(filters)), 32
    grid = (triton.cdiv(rows * tall * wide, block_m), clients, triton.cdiv(filters, block_n))
    _forward_kernel[grid](
        x, weight, bias if bias is not None else x, out, rows, height, width, tall, wide,
        CHANNELS=channels, FILTERS=filters, KERNEL=kernel, PAD=padding, HAS_BIAS=bias is not None,
        WHOLE_TAPS=channels % block_k == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def weight_gradient(x: Tensor, g: Tensor, kernel: int, padding: int) -> tuple[Tensor, Tensor]:
    """(dw (C, kernel, kernel, channels, filters), dbias (C, filters)); partial sums are added in a fixed order."""
    clients, rows, height, width, channels = x.shape
    tall, wide, filters = g.shape[2:]
    block_m, block_n, block_k = 32, _power(filters), 32
    total, pixels = kernel * kernel * channels, rows * tall * wide
    tiles = triton.cdiv(total, block_k) * clients
    parts = max(1, min(triton.cdiv(1056, tiles), triton.cdiv(pixels, 8 * block_m)))  # about eight waves of 132 SMs
    share = triton.cdiv(triton.cdiv(pixels, parts), block_m) * block_m
    dw = x.new_empty(parts, clients, kernel, kernel, channels, filters)
    db = x.new_empty(parts, clients, filters)
    _weight_kernel[(triton.cdiv(total, block_k), clients, parts)](
        x, g, dw, db, rows, height, width, tall, wide, share,
        CHANNELS=channels, FILTERS=filters, KERNEL=kernel, PAD=padding,
        WHOLE_TAPS=channels % block_k == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return (dw[0], db[0]) if parts == 1 else (dw.sum(0), db.sum(0))


def input_gradient(g: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The transposed convolution: g with the flipped weights, channels and filters exchanged."""
    flipped = weight.flip(1, 2).transpose(-1, -2).contiguous()
    return forward(g, flipped, None, weight.shape[1] - 1 - padding)
