"""Local training of whole cohorts: `build_engine` chooses how, by device and model."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

import torch

from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import Federation, Model
from fedstill.engine.engine import Engine, Trained
from fedstill.engine.mixed import MixedEngine

__all__ = [
    "ENGINES",
    "PRECISIONS",
    "Engine",
    "MixedEngine",
    "Trained",
    "build_engine",
    "check_compiler",
    "choose_device",
]

ENGINES = ("auto", "batched", "looped")
PRECISIONS = ("auto", "float32", "float64", "tf32", "bf16")


def choose_device(name: str = "auto") -> torch.device:
    """'auto' is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FedstillError(f"engine.device: '{name}' is no device; {suggest(name, ('auto', 'cpu', 'cuda'))}") from None
    if device.type not in ("cpu", "cuda"):
        raise FedstillError(f"engine.device: '{name}' is not supported; choose auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedstillError("engine.device: 'cuda' asked for, but torch sees no GPU; use 'auto' or 'cpu'")
    return device


def check_compiler(device: torch.device) -> None:
    """Before the first round, not in the middle of it."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise FedstillError(
            "engine.compile: torch.compile needs triton on a GPU: pip install triton, or set it to false"
        )
    wanted = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch chooses it
    if device.type == "cpu" and shutil.which(wanted) is None:
        raise FedstillError(
            f"engine.compile: torch.compile needs a C++ compiler on a CPU, and there is no '{wanted}': install g++, "
            "or set it to false"
        )


def _stacked(name: str, device: torch.device, model: Model) -> bool:
    """Dense nets: client batch. Convolutions: client by client, unless a GPU runs all of them faster in a stack.

    Measured: see docs/performance.md.
    """
    if name == "batched" and model.unbatchable is not None:
        raise FedstillError(f"engine.name: 'batched' cannot run {model.name}: {model.unbatchable}")
    if name != "auto":
        return name == "batched"
    if not model.convolutional:
        return model.unbatchable is None
    return device.type == "cuda" and model.stacks_on_gpu and model.unbatchable is None


def build_engine(
    name: str = "auto",
    device: str = "auto",
    *,
    model: Model,
    federation: Federation,
    chunk: int | None = None,
    precision: str = "auto",
    graphs: bool | None = None,
    compile: bool = False,
) -> Engine | MixedEngine:
    """An engine for one model and federation; `chunk` clients at once (None: what fits in memory).

    precision: float32 (strict) | float64 (weights, inputs and states, for comparing to many digits) |
    tf32 (matrix products and convolutions on a GPU) | bf16 (autocast);
    auto is tf32 on a GPU, as PyTorch's convolutions are by default, and float32 on a CPU.
    bf16 counts for answers too: teachers, evaluation. compile: models that train alone by torch.compile, see
    docs/performance.md.
    """
    if name not in ENGINES:
        raise FedstillError(f"engine.name: unknown engine '{name}'; {suggest(name, ENGINES)}")
    if precision not in PRECISIONS:
        raise FedstillError(f"engine.precision: unknown precision '{precision}'; {suggest(precision, PRECISIONS)}")
    where = choose_device(device)
    if compile:
        check_compiler(where)
    prototypes = {"": model} if model.groups is None else dict(model.groups.models)
    first = next(iter(prototypes.values()))
    engine = Engine(
        first,
        federation,
        stacked=_stacked(name, where, first),
        device=where,
        chunk=chunk,
        precision=("tf32" if where.type == "cuda" else "float32") if precision == "auto" else precision,
        graphs=where.type == "cuda" if graphs is None else graphs and where.type == "cuda",
        compiled=compile,
    )
    if model.groups is None:
        return engine
    others = {group: engine.lend(one, stacked=_stacked(name, where, one)) for group, one in prototypes.items()}
    return MixedEngine(model, {**others, next(iter(prototypes)): engine})
