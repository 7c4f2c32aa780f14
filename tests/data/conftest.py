"""No test writes outside its own folder or asks the network."""

from __future__ import annotations

from pathlib import Path

import pytest
from text_files import news, table

from fedstill.data import load
from fedstill.data.source import Source


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("FEDSTILL_CACHE", str(cache))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A table of short news, in memory, not yet tokens."""
    return load(table(tmp_path / "news.csv", news()), inputs=["text"], keys=["user"], text=True)
