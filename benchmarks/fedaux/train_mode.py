"""FedAUX's released code measures its models in train mode: BatchNorm goes by batches of 100 test images."""

from __future__ import annotations

from typing import Any

from fedstill.core.trainer import Trainer
from fedstill.core.types import Weights
from fedstill.loop.evaluate import TestSet, measure


def in_train_mode(weights: Weights, test: TestSet, trainer: Trainer) -> dict[str, Any]:
    """All metrics of a model that answers 100 test samples at a time in train mode."""
    return measure(trainer.outputs(weights, test.x, batch=100).logits, test)
