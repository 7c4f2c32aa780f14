"""How much memory is left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device, *, meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that are free on a GPU; for the CPU, what the system could give.

    A container's limit counts where it is seen at the root of the control groups, version 2.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(meminfo), _left_in(cgroup))


def _available(meminfo: Path) -> int:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in(cgroup: Path) -> int:
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # none, or the limit is "max"
        return 1 << 62
    return max(0, limit - used + int(rows.get("inactive_file", 0)))  # files that were read can be dropped
