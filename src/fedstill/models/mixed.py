"""Several architectures in one federation: a union of prototypes that stands for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from torch import Tensor

from fedstill.compose.groups import merge, part_of, together
from fedstill.core.errors import FedstillError, suggest
from fedstill.core.types import ENSEMBLE, Groups, Model, Output, Params, Seed, Traits, Weights, check_report

MIXED = "mixed"  # as model.name


def mixed(*, prototypes: list[str], report: str = ENSEMBLE) -> None:
    """Clients with different networks: client k runs prototype k mod P, and distillation teaches all of them.

    Args:
        prototypes: networks with their options, such as "cnn" or "mlp(hidden=[32])"; equal names are numbered.
        report: the model that is evaluated and that predicts: "ensemble", the mean of the prototypes' logits, or the
            name of one prototype.
    """


def given(*, network: str = "", tensors: str = "", computes: str = "") -> None:
    """A network that somebody handed over in Python; no file can ask for it.

    Args:
        network: its name.
        tensors: a digest of the names and shapes of its tensors.
        computes: a digest of the logits that it computes for fixed weights and samples.
    """


def mixed_model(prototypes: Mapping[str, Model], member: int | Sequence[str], report: str = ENSEMBLE) -> Model:
    """Make one Model for clients with different models; `prototypes` are any Models by name, from `from_module` too.

    member: the prototype of each client; or the number of clients, and client k runs prototype k mod P.
    report: the model that is evaluated and that predicts: "ensemble" (the mean of the prototypes' logits) or the name
        of one prototype.

    Its weights hold all prototypes, the tensors named "<prototype>/<name>". Each prototype starts as it would alone.

    >>> from fedstill.models import build_model
    >>> nets = {name: build_model(name, input_shape=(1, 8, 8), classes=3) for name in ("cnn", "mlp")}
    >>> model = mixed_model(nets, 5)
    >>> model.name, model.groups.member
    ('mixed(cnn, mlp), reported: ensemble', ('cnn', 'mlp', 'cnn', 'mlp', 'cnn'))
    """
    _check_prototypes(prototypes)
    groups = Groups(dict(prototypes), _members(tuple(prototypes), member), report)
    _check(groups)
    models = groups.models

    def init(seed: Seed) -> Weights:
        return merge({name: model.init(seed) for name, model in models.items()})

    def apply(
        weights: Weights, x: Tensor, *, training: bool = False, weight: Tensor | None = None, seed: Tensor | None = None
    ) -> tuple[Output, Params]:
        ran = {
            name: model.apply(part_of(weights, name), x, training=training, weight=weight, seed=seed)
            for name, model in models.items()
        }
        buffers = {f"{name}/{key}": leaf for name, (_, new) in ran.items() for key, leaf in new.items()}
        return together({name: output for name, (output, _) in ran.items()}, report), buffers

    traits = [model.traits for model in models.values()]
    recipes = {name: model.recipe for name, model in models.items() if model.recipe is not None}
    return Model(
        name=f"mixed({', '.join(models)}), reported: {report}",
        init=init,
        apply=apply,
        traits=Traits(
            features=all(each.features for each in traits),
            convolutional=any(each.convolutional for each in traits),
            stacks_on_gpu=all(each.stacks_on_gpu for each in traits),
            batch_statistics=any(each.batch_statistics for each in traits),
            unbatchable=next((each.unbatchable for each in traits if each.unbatchable), None),
        ),
        groups=groups,
        recipe=partial(_mixed_again, recipes, groups.member, report) if len(recipes) == len(models) else None,
    )


def _mixed_again(recipes: Mapping[str, Callable[[], Model]], member: Sequence[str], report: str) -> Model:
    return mixed_model({name: recipe() for name, recipe in recipes.items()}, member, report)


def _members(names: tuple[str, ...], member: int | Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise FedstillError("a mixed model needs at least one prototype")
    if isinstance(member, Integral) and not isinstance(member, bool):
        return tuple(names[k % len(names)] for k in range(int(member)))
    if isinstance(member, str | Mapping) or not (isinstance(member, Collection) and hasattr(member, "__getitem__")):
        raise FedstillError(
            f"members are a number of clients or a list with the prototype of each, not {_kind(member)}: "
            f"write 10, or ['{names[0]}', ...]"
        )
    return tuple(member)


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, str | float | bool | type) or value is None else type(value).__name__


def _check_prototypes(prototypes: Any) -> None:
    """Refuse prototypes that are not Models by name with one number of classes."""
    if not isinstance(prototypes, Mapping):
        raise FedstillError(
            f"prototypes are models by their names, not {_kind(prototypes)}: write {{'small': model, 'large': model}}"
        )
    for name, model in prototypes.items():
        if not isinstance(name, str) or not name or "/" in name or name == ENSEMBLE:
            raise FedstillError(f"a prototype cannot be called '{name}': use a name without '/', not '{ENSEMBLE}'")
        if not isinstance(model, Model):
            raise FedstillError(
                f"the prototype '{name}' is no Model but {_kind(model)}: wrap it: "
                "fedstill.from_module(..., input_shape=..., classes=...)"
            )
        if model.groups is not None:
            raise FedstillError(f"the prototype '{name}' is itself a mixture: name its prototypes instead")
    widths = {name: model.classes for name, model in prototypes.items() if model.classes}
    if len(set(widths.values())) > 1:
        counts = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise FedstillError(f"the prototypes have different numbers of classes ({counts}): give them one number")


def _check(groups: Groups) -> None:
    for client, name in enumerate(groups.member):
        if not isinstance(name, str) or name not in groups.models:
            hint = suggest(str(name), groups.models)
            raise FedstillError(f"client {client} runs {name!r}, which is no prototype: {hint}")
    if idle := [name for name in groups.models if name not in groups.member]:
        raise FedstillError(f"no client runs the prototype '{idle[0]}': use fewer prototypes or more clients")
    check_report(groups.report, groups.models)
