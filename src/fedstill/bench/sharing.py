"""Several processes on one GPU: with NVIDIA's own sharing service (MPS) their kernels run side by side.

Without it the GPU serves one process at a time. Four FedAvg and FedLMD runs at once on an H200 (the CNN on CIFAR-10,
benchmarks/fedlmd): 92 ms for a round of one of them without, 65 ms with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
PATIENCE = 10.0  # seconds


@contextmanager
def shared_gpu(jobs: int, device: str) -> Iterator[bool]:
    """Run a private service while workers live, and say whether it runs; one that the user started is left alone."""
    if jobs < 2 or not device.startswith("cuda") or PLACES[0] in os.environ or shutil.which(CONTROL) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="fedstill-mps-") as folder:
        os.environ.update(dict.fromkeys(PLACES, folder))
        try:
            yield _control(["-d"])
        finally:
            _control([], "quit\n")  # also when the start was interrupted or said nothing: it may run all the same
            for place in PLACES:
                del os.environ[place]


def _control(arguments: list[str], words: str = "") -> bool:
    try:
        done = subprocess.run([CONTROL, *arguments], input=words, text=True, capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
