"""A resumed run with convolutions and frozen teachers, which a checkpoint must not change by the order of memory."""

from __future__ import annotations

import pytest
import torch
from running import federate
from torch import nn

from fedstill.about.toy import CLASSES, SHAPE, trial_federation
from fedstill.core.tree import flatten
from fedstill.core.types import Training
from fedstill.methods.lookup import build_method
from fedstill.models import from_module

SHORT = "batch_size=4, noise=3, student_steps=2"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def run(text, **how):
    (phase,) = build_method(text)
    return federate(
        method=phase.method, model=from_module(Net, input_shape=SHAPE, classes=CLASSES, check=False),
        federation=trial_federation(), training=Training(batch_size=8, lr=0.05), cohort=2, checkpoint_every=1,
        engine="looped", device="cpu", **how,
    ).weights  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        f"moon+fedftg(iterations=2, {SHORT})",
        f"moon+feddf_gen(generator_steps=2, {SHORT})",
        f"fedntd+fedftg(iterations=2, {SHORT})",
        "moon+feddf(steps=2, batch_size=4)",
    ],
)
def test_it_equals_the_uninterrupted_one_bit_for_bit(text, tmp_path):
    whole = flatten(run(text, rounds=4))
    run(text, rounds=2, run_dir=tmp_path)
    resumed = flatten(run(text, rounds=4, run_dir=tmp_path, resume=True))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
