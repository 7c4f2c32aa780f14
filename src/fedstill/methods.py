"""From the text of a method to what runs: found by name or import path, joined, put in turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedstill.algorithms import METHODS
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.join import join
from fedstill.core.types import Algorithm, Phase
from fedstill.expression import Part, parse
from fedstill.own_files import own_function

Factory = Callable[..., Algorithm]
SHARED = ("weighting", "buffers")  # how models are averaged: one answer for all parts of a mixture


def find_method(name: str) -> Factory:
    """A registered method, or the function that FILE.py:function or package.module:function names."""
    if ":" in name:
        found: Factory = own_function(name, "algorithm.name")
        return found
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
