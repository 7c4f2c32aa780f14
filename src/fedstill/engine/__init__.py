"""Local training of whole cohorts: `build_engines` chooses who does it and how, by name, device and model."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch

from fedstill.core.author_mistakes import call, name_of
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.trainer import CohortEngine, Trainer
from fedstill.core.types import Federation, Model
from fedstill.engine.engine import Engine
from fedstill.engine.mixed import MixedEngine

PRECISIONS = ("auto", "float32", "float64", "tf32", "bf16")


def check_engine(name: str, others: Collection[str] = ()) -> str:
    """The name of a registered engine, or FILE.py:function, as it is; any other is refused. others: known elsewhere."""
    if ":" not in name and name not in ENGINES:
        raise FedstillError(f"engine.name: unknown engine '{name}'; {suggest(name, (*ENGINES, *others))}")
    return name


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
    if name == "batched" and model.traits.unbatchable is not None:
        raise FedstillError(f"engine.name: 'batched' cannot run {model.name}: {model.traits.unbatchable}")
    if name in ("batched", "looped"):
        return name == "batched"
    if not model.traits.convolutional:
        return model.traits.unbatchable is None
    return device.type == "cuda" and model.traits.stacks_on_gpu and model.traits.unbatchable is None


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
    """An engine of this process, which trains clients and is a server's trainer; `chunk` clients run at once.

    name: batched | looped | auto, which chooses by device and model; so does the name of an engine of another kind.
    chunk: None takes as many as fit in memory.

    precision: float32 (strict) | float64 (weights, inputs and states, for comparing to many digits) |
    tf32 (matrix products and convolutions on a GPU) | bf16 (autocast);
    auto is tf32 on a GPU, as PyTorch's convolutions are by default, and float32 on a CPU.
    bf16 counts for answers too: teachers, evaluation. compile: models that train alone by torch.compile, see
    docs/performance.md.
    """
    check_engine(name)
    if precision not in PRECISIONS:
        raise FedstillError(f"engine.precision: unknown precision '{precision}'; {suggest(precision, PRECISIONS)}")
    where = choose_device(device)
    if compile:
        check_compiler(where)
    (name_first, first), *others = model.networks.items()
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
    lent = {prototype: engine.lend(network, stacked=_stacked(name, where, network)) for prototype, network in others}
    return engine if model.groups is None else MixedEngine(model, {name_first: engine, **lent})


def auto(device: str = "auto", **options: Any) -> CohortEngine:
    """batched or looped, as device and model suit."""
    return build_engine("auto", device, **options)


def batched(device: str = "auto", **options: Any) -> CohortEngine:
    """All clients of a cohort at once, as one stack of models."""
    return build_engine("batched", device, **options)


def looped(device: str = "auto", **options: Any) -> CohortEngine:
    """Client by client."""
    return build_engine("looped", device, **options)


# Who can train cohorts, by the name that engine.name takes. Each is called as `build_engine` is, without the name.
ENGINES: dict[str, Callable[..., CohortEngine]] = {"auto": auto, "batched": batched, "looped": looped}


class Engines(NamedTuple):
    """The two duties of a run: who trains clients, and what the server trains with. Both have one device."""

    cohort: CohortEngine
    trainer: Trainer


def build_engines(
    engine: str | CohortEngine | Callable[..., CohortEngine] = "auto", device: str = "auto", **how: Any
) -> Engines:
    """Both engines of a run; they are one object where the cohort's can also do the server's work.

    engine: a registered name, a function or class that is called as `build_engine` is, or an engine that is built
    already. how: model, federation and the options of `build_engine`.
    """
    make = ENGINES[check_engine(engine)] if isinstance(engine, str) else engine
    cohort = call(make, "an engine, (device, **options)", device, **how) if callable(make) else make
    if missing := [key for key in ("name", "device", "train") if not hasattr(cohort, key)]:
        who = name_of(make) if callable(make) else type(cohort).__name__
        raise FedstillError(f"{who} makes no engine: its {type(cohort).__name__} has no {' and no '.join(missing)}")
    if hasattr(cohort, "outputs"):
        return Engines(cohort, cast(Trainer, cohort))
    return Engines(cohort, build_engine("auto", str(cohort.device), **how))
