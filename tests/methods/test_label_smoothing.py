"""Label smoothing: the margin that is worked out by hand."""

import math

import pytest
import torch
from by_hand import F64, linear_model
from label_skew import CLASSES, FEATURES, trained

from fedstill.core.types import Batch
from fedstill.methods import fedavg, label_smoothing


def test_smoothed_labels_bound_the_margin_that_hard_labels_let_grow():
    """One point per class: the optimum has log-probability ratios of (1 - eps + eps / C) / (eps / C)."""
    corners = Batch(torch.eye(CLASSES, FEATURES, dtype=F64), torch.arange(CLASSES), torch.ones(CLASSES, dtype=F64))

    def margin(method):
        logits = linear_model().apply(trained(method, [corners], steps=400, lr=8.0), corners.x)[0].logits
        own = logits.diagonal().unsqueeze(-1)
        return (own - logits + 1e9 * torch.eye(CLASSES, dtype=F64)).min().item()

    assert margin(label_smoothing(epsilon=0.2)) == pytest.approx(math.log((1 - 0.15) / 0.05), abs=1e-6)
    assert margin(fedavg()) > 5.0
