"""Declared needs: their union over the parts, checked before round 1 in one message with a cure for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Method, Model, Need, Outlook, Phase, Training

CURES = {
    Need.UNLABELED: "set data.unlabeled to 'test', a number of held-out samples, or another source",
    Need.VALIDATION: "set data.validation to a number of labeled rows that the server holds",
    Need.FEATURES: "use a model that returns (features, logits); every built-in model does",
    Need.HEAD: "use a model whose last layer is one nn.Linear that reads the features",
    Need.TOKENS: "set data.tokens, e.g. 64, and model.name = 'bert'",
    Need.PLAIN_SGD: "set local.optimizer = 'sgd', and with momentum local.keep_optimizer = false",
    Need.ONE_ARCHITECTURE: "choose one network as model.name instead of 'mixed', or feddf, which distils across them",
}


def needs_of(method: Method) -> frozenset[Need]:
    """A seal mixes the moves of all clients into one, so they must be moves of one network."""
    sealed = frozenset({Need.ONE_ARCHITECTURE} if method.trusted is not None else ())
    return method.objective.needs.union(sealed, *(step.needs for step in method.steps))


def unmet_needs(needs: Iterable[Need], *, model: Model, federation: Federation, training: Training) -> list[Need]:
    """The needs that this model, federation and local training do not meet."""
    networks = model.networks.values()
    met = {
        Need.UNLABELED: federation.unlabeled is not None and len(federation.unlabeled) > 0,
        Need.VALIDATION: federation.validation is not None and len(federation.validation[1]) > 0,
        Need.FEATURES: all(network.traits.features for network in networks),
        Need.HEAD: all(network.head is not None for network in networks),
        Need.TOKENS: all(network.tokens is not None for network in networks),
        Need.PLAIN_SGD: training.optimizer == "sgd" and not (training.keep_optimizer and training.momentum),
        Need.ONE_ARCHITECTURE: len(networks) == 1,
    }
    return sorted((need for need in needs if not met.get(need, True)), key=lambda need: need.name)


def check_needs(
    method: Method, *, model: Model, federation: Federation, training: Training, label: str = "this method"
) -> None:
    """One line that names every unmet need and its cure; silent when all are met."""
    needs = needs_of(method)
    if training.part == "head":
        needs, label = needs | {Need.HEAD}, f"{label} with local.part = 'head'"
    unmet = unmet_needs(needs, model=model, federation=federation, training=training)
    if unmet:
        missing = "; ".join(f"{need.value} ({CURES[need]})" for need in unmet)
        raise FedstillError(f"{label} needs {missing}")


def check_one_risk(method: Method, label: str = "this method") -> None:
    """Refuse a method with two local terms that fit the labels, because it would fit them twice."""
    risks = [term.risk for term in method.objective.terms if term.risk]
    if len(risks) > 1:
        raise FedstillError(
            f"{label} has {len(risks)} local terms that fit the labels, {' and '.join(risks)}: keep one of them"
        )


def check_phases(
    phases: Sequence[Phase], *, model: Model, federation: Federation, training: Training, label: str = "this method"
) -> None:
    """Every method's needs, and what its steps find wrong with the data or with the round that they begin in."""
    first = 1
    for method, until, _ in phases:
        check_one_risk(method, label)
        check_needs(method, model=model, federation=federation, training=training, label=label)
        unlabeled = federation.unlabeled if Need.UNLABELED in needs_of(method) else None
        for step in method.steps:
            step.check(Outlook(first, unlabeled, federation.train.tokenizer, training.part, model))
        first = first if until is None else until + 1


def check_fits(model: Model, classes: int, input_shape: tuple[int, ...]) -> None:
    """The model, and each of its prototypes, tells the federation's classes apart and can read its samples.

    Shapes may differ (a dense network flattens an image): what counts is that it runs. What is not known is not asked.
    """
    for name, network in model.networks.items():
        subject = f"the prototype '{name}'" if name else f"model '{model.name}'"
        if 0 < network.classes < classes:
            raise FedstillError(
                f"{subject} tells {network.classes} classes apart, and the federation has {classes}: "
                f"build it with classes={classes}"
            )
        if network.input_shape and network.input_shape != tuple(input_shape) and not _runs(network, input_shape):
            raise FedstillError(
                f"{subject} reads samples of shape {network.input_shape}, and the federation's have "
                f"{tuple(input_shape)}: build it with input_shape={tuple(input_shape)}"
            )


def _runs(model: Model, input_shape: tuple[int, ...]) -> bool:
    """On numbers or, if it cannot, on ids."""
    weights = model.init(0)
    for dtype in (torch.float32, torch.int64):
        with suppress(Exception), torch.no_grad():
            model.apply(weights, torch.zeros(2, *input_shape, dtype=dtype))
            return True
    return False
