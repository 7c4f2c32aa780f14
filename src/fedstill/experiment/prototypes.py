"""`[model] name = "mixed"`: prototypes are written as networks with their options, `mlp(hidden=[32])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.core.types import ENSEMBLE, check_report
from fedstill.methods import lookup as expression
from fedstill.methods import options
from fedstill.methods.lookup import Part

MIXED = "mixed"
EXAMPLE = 'e.g. model.prototypes = ["mlp(hidden=[32])", "cnn"]'


def mixed(*, prototypes: list[str], report: str = ENSEMBLE) -> None:
    """Clients with different networks: client k runs prototype k mod P, and distillation teaches all of them.

    Args:
        prototypes: networks with their options, such as "cnn" or "mlp(hidden=[32])"; what has one name is numbered.
        report: the model that is looked at and that predicts: "ensemble", the mean of the prototypes' logits, or the
            name of one prototype.
    """


def prototypes_of(texts: Sequence[str]) -> dict[str, Part]:
    """The networks that a section names, by the names they go by in a run.

    >>> prototypes_of(["cnn", "mlp(hidden=[8])", "mlp(hidden=[16])"])["mlp_2"]
    Part(name='mlp', options={'hidden': [16]})
    """
    parts = [_part(text) for text in texts]
    names = [part.name.rpartition(":")[2] for part in parts]  # of FILE.py:function the function
    if not parts:
        raise FedstillError(f"model.prototypes is empty: name at least one network, {EXAMPLE}")
    numbered = [
        name if names.count(name) == 1 else f"{name}_{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]
    return dict(zip(numbered, parts, strict=True))


def describe_model(name: str, given: Mapping[str, Any]) -> str:
    """A network in words; of several who they are, and which one is looked at.

    >>> describe_model("mixed", {"prototypes": ["cnn", "mlp(hidden=[8])"], "report": "mlp"})
    'mixed(cnn, mlp; reported: mlp)'
    """
    if name != MIXED:
        return name.rpartition("/")[2]
    return f"{MIXED}({', '.join(prototypes_of(given['prototypes']))}; reported: {given.get('report', ENSEMBLE)})"


def _part(text: str) -> Part:
    try:
        part = expression.single(text)
    except FedstillError:
        part = None
    if part is None:
        raise FedstillError(f"model.prototypes: cannot read '{text}': write networks with their options, {EXAMPLE}")
    return part


def check_mixture(given: Mapping[str, Any]) -> None:
    """Every mistake in a section of prototypes that can be found without data."""
    parts = prototypes_of(given["prototypes"])
    for part in parts.values():
        if part.name == MIXED:
            raise FedstillError("model.prototypes: a mixture cannot hold another one: name its prototypes instead")
        try:
            options.check("model", part.name, part.options)
        except FedstillError as error:
            raise FedstillError(f"model.prototypes, '{part.name}': {error}") from None
    check_report(given.get("report", ENSEMBLE), parts)
