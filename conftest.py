"""Tests repeat: networks built while they are collected, and in them, start from a fixed stream."""

from __future__ import annotations

import pytest
import torch

torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fixed_stream() -> None:
    torch.manual_seed(0)
