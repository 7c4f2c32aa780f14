"""FedAUX, whole runs with clients away, against numpy from the equations: scores, targets and the student's steps."""

import numpy as np
import numpy_fedaux as reference
import pytest
import torch
from by_hand import blobs, federation_of, number
from running import federate
from students import form
from weighed import weighed
from whole_server import as_one, whole

from fedstill.core.tree import flatten
from fedstill.core.types import Model, Output, Training, Weights
from fedstill.methods.fedaux import certainty

SIZES, ROWS, HIDDEN, EPOCHS, RATE = [6, 13, 9, 20, 4], 31, 5, 3, 0.4
DATA = [blobs(k, size) for k, size in enumerate(SIZES)]
CLIENTS = [(batch.x.numpy(), batch.y.numpy(), EPOCHS) for batch in DATA]
UNLABELED = 0.4 * torch.cat([blobs(20 + k, count).x for k, count in enumerate([16, 15])])  # clients have longer ones
GENERATOR = np.random.Generator(np.random.PCG64(5))
START = [GENERATOR.normal(size=(HIDDEN, 4)), GENERATOR.normal(size=(3, HIDDEN))]
NOISE = GENERATOR.normal(size=(len(SIZES), HIDDEN))

LOGISTIC = [
    {},
    {"form": "mean", "lam": 1e-3, "gamma": "both", "weighting": "uniform"},
    {"lam": 0.3, "intercept": True, "gamma": "both"},
    {"score": "odds", "lam": 0.1, "pool": "probabilities", "temperature": 2.0},
    {"form": "mean", "lam": 0.5, "epsilon": 0.9},
]
STUDENT = [
    {"steps": 7, "server_lr": 0.05, "clip": 0.02},
    {"steps": 5, "server_lr": 0.02, "clip": None, "lr_schedule": "constant", "keep_optimizer": True},
    {"steps": 9, "server_lr": 0.8, "clip": 0.05, "optimizer": "sgd", "weight_decay": 0.1},
]
CASES = [*({**scores, **STUDENT[0]} for scores in LOGISTIC), *STUDENT[1:]]


def hidden_layer() -> Model:
    """Features tanh(A x), logits B h."""

    def apply(weights, x, *, training=False, weight=None, seed=None):
        features = torch.tanh(x @ weights.params["A"].T)
        return Output(features @ weights.params["B"].T, features), {}

    return Model(
        "hidden layer", init=lambda seed: Weights({"A": number(START[0]), "B": number(START[1])}, {}), apply=apply
    )


def watched(method, seen):
    """The method, and in `seen` who took part in each round, with the state of its server after it."""

    def apply(candidate, state, round):
        candidate, state = whole(method).apply(candidate, state, round)
        leaves = {name.rpartition("/")[2]: leaf for name, leaf in flatten(state).items()}
        seen.append((round.uploads.ids.tolist(), leaves))
        return candidate, state

    return as_one(method, apply=apply)


class Handed:
    """In place of a generator: the normal numbers of each client in turn."""

    def __init__(self) -> None:
        self.left = iter(NOISE)

    def __call__(self, seed, shape, sigma):
        return torch.from_numpy(next(self.left) * sigma).round().long()


@pytest.mark.parametrize("options", CASES, ids=lambda options: " ".join(map(str, options.values())))
def test_two_rounds_of_fedaux_equal_its_equations_in_numpy(options, monkeypatch):
    handed, seen = Handed(), []
    monkeypatch.setattr(certainty, "gaussian_steps", handed)
    words = {"lr" if key == "server_lr" else key: value for key, value in options.items() if key != "weighting"}
    method = form("fedaux", batch_size=64, distill_share=0.8, mechanism="classic", **words)
    method = weighed(method, options.get("weighting", "size"))
    result = federate(
        method=watched(method, seen), model=hidden_layer(), federation=federation_of(DATA, UNLABELED),
        training=Training(batch_size=64, epochs=EPOCHS, lr=RATE), rounds=2, cohort=3, seed=2, engine="looped",
        device="cpu", engine_options={"precision": "float64"},
    )  # fmt: skip
    cohorts, distilled = [cohort for cohort, _ in seen], seen[0][1]["distilled"].numpy()
    assert distilled.sum() == 24  # of 31
    assert cohorts[0] != cohorts[1]
    net, table, targets = reference.fedaux(
        START, CLIENTS, cohorts, UNLABELED.numpy(), distilled, NOISE, lr=RATE, **options
    )
    assert np.ptp(table[cohorts[1]], axis=0).max() > 0.1
    np.testing.assert_allclose(seen[0][1]["scores"].numpy(), table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen[1][1]["probabilities"].numpy()[distilled], targets, rtol=0, atol=1e-6)
    for name, wanted in zip("AB", net, strict=True):
        np.testing.assert_allclose(result.weights.params[name].numpy(), wanted, rtol=0, atol=1e-5)
