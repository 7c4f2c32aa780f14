"""Functions of one's own, named in a text: FILE.py:function or package.module:function."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError, suggest


def own_function(name: str, key: str) -> Callable[..., Any]:
    """What a name with a colon stands for; `key` is the setting that it was given for."""
    file = Path(name.rpartition(":")[0])
    return _imported(name, key, file.resolve(), file.stat().st_mtime_ns if file.is_file() else 0)


@cache
def _imported(name: str, key: str, full: Path, written: int) -> Callable[..., Any]:
    """`full` and `written` tell a file from its namesake in another folder, and from itself before it was edited."""
    place, _, function = name.rpartition(":")
    module = _module_of(place, f"{key} = '{name}'")
    factory = getattr(module, function, None)
    if not callable(factory):
        known = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        hint = suggest(function, known) if known else "it defines no functions"
        raise FedstillError(f"{key} = '{name}': no function '{function}' in {place}: {hint}")
    found: Callable[..., Any] = factory
    return found


def _module_of(place: str, asked: str) -> Any:
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        raise FedstillError(f"{asked}: no file '{place}': give FILE.py:function")
    beside = str(path.resolve().parent if place.endswith(".py") else Path.cwd())
    if beside not in sys.path:
        sys.path.insert(0, beside)  # what stands beside it can be imported, as with `python FILE.py`
    try:
        return _load_file(path) if place.endswith(".py") else importlib.import_module(place)
    except FedstillError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise FedstillError(f"{asked}: {place} cannot be loaded: {told}") from error


def _load_file(path: Path) -> Any:
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"fedstill_own_{path.stem}_{mark}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
