"""From the text of a method to what runs: found by name or import path, joined, put in turn."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedstill.algorithms import METHODS
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.join import join
from fedstill.core.types import Algorithm, Phase
from fedstill.expression import Part, parse

Factory = Callable[..., Algorithm]
SHARED = ("weighting", "buffers")  # how models are averaged: one answer for all parts of a mixture


def find_method(name: str) -> Factory:
    """A registered method, or the function that FILE.py:function or package.module:function names."""
    if ":" in name:
        file = Path(name.rpartition(":")[0])
        return _imported(name, file.resolve(), file.stat().st_mtime_ns if file.is_file() else 0)
    if name not in METHODS:
        raise FedstillError(
            f"algorithm.name = '{name}' is unknown: {suggest(name, METHODS)} (your own: FILE.py:function)"
        )
    return METHODS[name]


def build_method(text: str, options: Mapping[str, Any] | None = None) -> tuple[Phase, ...]:
    """What `text` names, ready for `federate`; `options` belong to it when it is a single method.

    >>> [phase.until for phase in build_method("fedavg until 5 then fedprox(mu=0.1)+fedavgm")]
    [5, None]
    """
    stretches = parse(text)
    if options:
        (part,) = _only(text, [part for stretch in stretches for part in stretch.parts])
        return (Phase(_build([Part(part.name, {**part.options, **options})])),)
    return tuple(Phase(_build(stretch.parts), stretch.until) for stretch in stretches)


def _only(text: str, parts: list[Part]) -> list[Part]:
    if len(parts) > 1:
        raise FedstillError(f"algorithm: options of '{text}' stand inside it, e.g. fedlmd(beta=1.0)+fedprox(mu=0.01)")
    return parts


def _build(parts: Sequence[Part]) -> Algorithm:
    factories = {part.name: find_method(part.name) for part in parts}
    shared = _shared_options(parts, factories)
    built: dict[str, Algorithm] = {}
    for part in parts:
        factory = factories[part.name]
        takes = inspect.signature(factory).parameters
        agreed = {key: value for key, value in shared.items() if key in takes}
        built[part.name] = _call(part.name, factory, {**agreed, **part.options})
    return join(built)


def _shared_options(parts: Sequence[Part], factories: Mapping[str, Factory]) -> dict[str, Any]:
    """How a mixture averages: as its parts say, else as the part whose own way is not FedAvg's."""
    agreed: dict[str, Any] = {}
    usual = inspect.signature(METHODS["fedavg"]).parameters
    for key in SHARED if len(parts) > 1 else ():
        said = {part.name: part.options[key] for part in parts if key in part.options}
        if any(value != other for value in said.values() for other in said.values()):
            told = " and ".join(f"{name}({key}={value})" for name, value in said.items())
            raise FedstillError(f"{told} cannot run together: models are averaged once, give both the same {key}")
        defaults = [_default(factories[part.name], part, key) for part in parts]
        own = [value for value in defaults if isinstance(value, str) and value != usual[key].default]
        if said or own:
            agreed[key] = next(iter(said.values())) if said else own[0]
    return agreed


def _default(factory: Factory, part: Part, key: str) -> Any:
    """What an option is unless it is set: as the part's preset has it, or the signature; None where there is none."""
    forms = getattr(factory, "presets", {})
    parameter = inspect.signature(factory).parameters.get(key)
    return forms.get(part.options.get("preset"), {}).get(key, None if parameter is None else parameter.default)


def _call(name: str, factory: Factory, options: Mapping[str, Any]) -> Algorithm:
    from fedstill.options import check  # the same words for a mistake in a file and on the command line

    check("algorithm", name, options)
    built = factory(**options)
    if not isinstance(built, Algorithm):
        raise FedstillError(
            f"{name} returned a {type(built).__name__}: a method is a function that returns an Algorithm"
        )
    return built


@cache
def _imported(name: str, full: Path, written: int) -> Factory:
    """`full` and `written` tell a file from its namesake in another folder, and from itself before it was edited."""
    place, _, function = name.rpartition(":")
    module = _module_of(place, name)
    factory = getattr(module, function, None)
    if not callable(factory):
        known = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        hint = suggest(function, known) if known else "it defines no functions"
        raise FedstillError(f"algorithm.name = '{name}': no function '{function}' in {place}: {hint}")
    found: Factory = factory
    return found


def _module_of(place: str, name: str) -> Any:
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        raise FedstillError(f"algorithm.name = '{name}': no file '{place}': give FILE.py:function")
    beside = str(path.resolve().parent if place.endswith(".py") else Path.cwd())
    if beside not in sys.path:
        sys.path.insert(0, beside)  # what stands beside it can be imported, as with `python FILE.py`
    try:
        return _load_file(path) if place.endswith(".py") else importlib.import_module(place)
    except FedstillError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise FedstillError(f"algorithm.name = '{name}': {place} cannot be loaded: {told}") from error


def _load_file(path: Path) -> Any:
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"fedstill_method_{path.stem}_{mark}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
