"""What a run ran on: versions, device, platform and git commit; never a user's or a machine's name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
from typing import Any

CORE_PACKAGES = ("torch", "numpy", "scikit-learn", "safetensors", "pydantic", "typer", "rich")
EXTRAS = {
    "data": ("datasets", "pyarrow", "pillow"),
    "plots": ("matplotlib",),
    "dp": ("dp-accounting",),
    "text": ("tokenizers",),
    "track": ("tensorboard", "mlflow", "wandb", "trackio"),
}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the folder that the run was started from, with '+' when files differ from it; None outside git."""

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return commit and (f"{commit}+" if git("status", "--porcelain", "--untracked-files=no") else commit)


def describe_device() -> dict[str, Any]:
    """The accelerator that 'auto' would take, and the threads that torch uses."""
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return {"kind": "cuda", "name": torch.cuda.get_device_name(0), "gigabytes": round(memory / 1e9, 1)}
    return {"kind": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}


def environment() -> dict[str, Any]:
    extras = [package for packages in EXTRAS.values() for package in packages]
    versions = {package: version_of(package) for package in ("fedstill", *CORE_PACKAGES, *extras)}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": describe_device(),
        "git_commit": git_commit(),
        "packages": {package: version for package, version in versions.items() if version is not None},
    }
