"""Evaluation as FedAUX's released code does it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.data import federation_from_tensors
from fedstill.engine import build_engine
from fedstill.loop.evaluate import make_test_set
from fedstill.methods.own_code import own_function
from fedstill.models import from_module


def test_batchnorm_goes_by_batches_of_100_test_rows():
    in_train_mode = own_function(
        f"{__file__.removesuffix('test_train_mode.py')}train_mode.py:in_train_mode", "evaluate"
    )
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    x, y = torch.randn(250, 4) + 3.0, torch.randint(0, 3, (250,))
    federation = federation_from_tensors([(x[:50], y[:50])], test=(x, y), classes=["a", "b", "c"])
    model = from_module(module, input_shape=(4,), classes=3)
    engine = build_engine("looped", "cpu", model=model, federation=federation)
    rows = in_train_mode(model.init(0), make_test_set(federation, engine.device), engine)
    weights = model.init(0)
    module.load_state_dict({**weights.params, **weights.buffers})
    module.train()
    mean, std = torch.tensor(federation.train.mean), torch.tensor(federation.train.std)
    with torch.no_grad():
        answers = torch.cat([module((part - mean) / std).argmax(1) for part in x.split(100)])
    assert rows["accuracy"] == pytest.approx(float((answers == y).double().mean()))
