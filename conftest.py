"""Tests repeat: networks built while they are collected, and in them, start from a fixed stream."""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401, before the freeze, because it asks the collector who refers to an object
import pytest
import torch

torch.manual_seed(0)
gc.disable()  # until tests are collected, because they stay, and each search for garbage would walk through all of them


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def fixed_stream() -> None:
    torch.manual_seed(0)
