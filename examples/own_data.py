"""Your own data and your own network: one (x, y) pair a client, any nn.Module.

    python examples/own_data.py

Six clinics measure the same eight quantities and see different patients. The server holds measurements that nobody
has labelled, so that it can distil (FedDF). No rows leave a clinic.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import fedstill
from fedstill import Training

RULE = np.array([1.0, -1.0, 0.5, 0.0, 2.0, 0.0, -0.5, 1.5])


def patients(random: np.random.Generator, count: int, *, sick: float) -> tuple[np.ndarray, np.ndarray]:
    """Return measurements (count, 8) and diagnoses (count,), of which a share `sick` is positive."""
    x = random.standard_normal((20 * count, 8)).astype(np.float32)
    y = (x @ RULE + 0.3 * random.standard_normal(len(x)) > 0).astype(np.int64)
    positive = round(sick * count)
    rows = np.concatenate([np.flatnonzero(y == 1)[:positive], np.flatnonzero(y == 0)[: count - positive]])
    return x[rows], y[rows]


class Net(nn.Module):
    """A network that returns logits. A method that needs features gets the input of its last nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def main() -> None:
    random = np.random.default_rng(0)
    federation = fedstill.federation_from_tensors(
        [patients(random, 60, sick=share) for share in (0.05, 0.1, 0.2, 0.8, 0.9, 0.95)],
        test=patients(random, 500, sick=0.5),
        unlabeled=patients(random, 300, sick=0.5)[0],
        classes=["healthy", "sick"],
    )
    model = fedstill.from_module(Net, input_shape=(8,), classes=2)
    for name, options in (("fedavg", {}), ("feddf", {"student": {"steps": 50}})):
        result = fedstill.federate(
            fedstill.Built(
                method=fedstill.build_method(name, options)[0].method,
                model=model,
                federation=federation,
                training=Training(epochs=10, batch_size=10, lr=0.05),
                label=name,
                schedule=fedstill.Schedule(rounds=5, cohort=3),
            )
        )
        best = result.best or {}
        print(f"{name:7s} best accuracy {100 * best['accuracy']:.1f} %, per class {best['class_accuracy']}")

    measurements = torch.from_numpy(patients(random, 3, sick=1.0)[0])
    ready = (measurements - torch.tensor(federation.train.mean)) / torch.tensor(federation.train.std)
    output, _ = model.apply(result.best_weights, ready)
    print("three sick patients are called", [federation.train.classes[c] for c in output.logits.argmax(1)])


if __name__ == "__main__":
    main()
