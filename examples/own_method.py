"""A method of your own: one local term, one server step, and the library's parts around them.

    python examples/own_method.py

The term holds each client's features near the features of the received model. The step takes the coordinate-wise median
of the uploaded models, because a minority of broken clients cannot drag it away; it costs accuracy where honest clients
are unlike, as here. Neither is registered anywhere.
"""

from __future__ import annotations

from torch import Tensor

import fedstill
from fedstill import Batch, Local, Method, Need, Objective, Output, Round, ServerStep, Training, Weights
from fedstill.compose.combine import weighted_mean
from fedstill.core.tree import tree_map
from fedstill.core.types import Tree
from fedstill.local import cross_entropy, start_model
from fedstill.partition import PARTITIONS
from fedstill.server import average, sgd


def feature_anchor(strength: float) -> Objective:
    """(strength / 2) mean_x ||h(x; w) - h(x; w_start)||^2, h the features before the head.

    The loss is written for one client. `frozen` names the models that run without gradient. "start" is the received
    model; another term that names it, too, shares its outputs. Never take a plain mean, because padding has weight 0.
    """

    def loss(output: Output, batch: Batch, local: Local) -> Tensor:
        distance = (output.features - local.frozen["start"].features).square().sum(-1)
        return 0.5 * strength * weighted_mean(distance, batch.weight)

    return Objective(loss, frozen={"start": start_model}, needs=frozenset({Need.FEATURES}))


def median() -> ServerStep:
    """w = coordinate-wise median over the cohort (Yin et al., ICML 2018); it looks at every upload on its own."""

    def apply(candidate: Weights, state: Tree, round: Round) -> tuple[Weights, Tree]:
        round.metrics["uploads"] = float(len(round.uploads.ids))
        return tree_map(lambda leaf: leaf.median(dim=0).values, round.uploads.weights), state

    return ServerStep("median", apply, needs=frozenset({Need.INDIVIDUAL_UPLOADS}))


def main() -> None:
    source = fedstill.load("digits")
    parts = PARTITIONS["lda"](source.train.y.numpy(), 20, seed=0, alpha=0.5)
    federation = fedstill.make_federation(source, parts)
    model = fedstill.build_model("mlp", input_shape=(1, 8, 8), classes=10, hidden=(64,), init="torch")
    anchored = fedstill.combine(cross_entropy(), feature_anchor(0.01))
    methods = {
        "fedavg": fedstill.build_method("fedavg")[0].method,
        "anchor": Method(anchored, average()),
        "anchor, median, momentum": Method(anchored, median(), (sgd(1.0, momentum=0.3),)),
    }
    for name, method in methods.items():
        result = fedstill.federate(
            fedstill.Built(
                method=method,
                model=model,
                federation=federation,
                training=Training(epochs=2, batch_size=20, lr=0.1),
                label=name,
                schedule=fedstill.Schedule(rounds=15, cohort=10),
            )
        )
        print(f"{name:26s} accuracy {100 * result.history.mean_last(5):.1f} % (mean of the last five rounds)")


if __name__ == "__main__":
    main()
