"""Host work once, device work ever after: one step as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UPS = 2  # libraries set themselves up in the first run, and autograd in the second


def capture(once: Callable[[], None], cursor: Tensor, changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """`once` as a graph. It runs for warming up, then `changed`, which it writes to, is put back as it was.

    cursor: the number of the step on the device, which `once` reads and advances.
    """
    saved = [tensor.clone() for tensor in (*changed, cursor)]
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            cursor.zero_()
            once()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph, stream=side):
        once()
    for tensor, old in zip((*changed, cursor), saved, strict=True):
        tensor.copy_(old)
    return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """An old graph that the garbage collector frees during a capture breaks it (pytorch/pytorch#161037)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
