"""Declared needs: their union over the parts, checked before round 1 in one message with a cure for each."""

from __future__ import annotations

from collections.abc import Iterable

from fedstill.core.errors import FedstillError
from fedstill.core.types import Algorithm, Federation, Model, Need, Training

CURES = {
    Need.UNLABELED: "set data.unlabeled to 'test', a number of held-out samples, or another source",
    Need.VALIDATION: "set data.validation to a number of labeled rows that the server holds",
    Need.FEATURES: "use a model that returns (features, logits); every built-in model does",
    Need.HEAD: "use a model whose last layer is one nn.Linear that reads the features",
    Need.PLAIN_SGD: "set local.optimizer = 'sgd'",
}


def needs_of(algorithm: Algorithm) -> frozenset[Need]:
    return algorithm.objective.needs | algorithm.server.needs


def unmet_needs(needs: Iterable[Need], *, model: Model, federation: Federation, training: Training) -> list[Need]:
    """The needs that this model, federation and local training do not meet."""
    met = {
        Need.UNLABELED: federation.unlabeled is not None and len(federation.unlabeled) > 0,
        Need.VALIDATION: federation.validation is not None and len(federation.validation[1]) > 0,
        Need.FEATURES: model.has_features,
        Need.HEAD: model.head is not None,
        Need.PLAIN_SGD: training.optimizer == "sgd",
    }
    return sorted((need for need in needs if not met.get(need, True)), key=lambda need: need.name)


def check_needs(
    algorithm: Algorithm, *, model: Model, federation: Federation, training: Training, method: str = "this method"
) -> None:
    """One line that names every unmet need and its cure; silent when all are met."""
    unmet = unmet_needs(needs_of(algorithm), model=model, federation=federation, training=training)
    if unmet:
        told = "; ".join(f"{need.value} ({CURES[need]})" for need in unmet)
        raise FedstillError(f"{method} needs {told}")
