"""What the tests of `fedstill bench` share."""

import pytest
from bench_cases import write_paper


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with one paper; nothing is written outside it and no hub is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_paper(tmp_path)
    return tmp_path
