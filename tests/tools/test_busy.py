"""benchmarks/busy.py times a cohort beside busy processes, and fails where they cost too much."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch
from doc_pages import ROOT

WORDS = ["--only", "mlp-50", "--busy", "0,1", "--repeats", "1", "--least", "0"]


@pytest.fixture
def busy(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return runpy.run_path(str(ROOT / "benchmarks" / "busy.py"))


def test_a_cohort_is_timed_beside_busy_processes(busy, monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["busy.py", *WORDS])
    busy["main"]()
    head, line = capsys.readouterr().out.splitlines()
    assert f"workers of {before} threads" in head
    assert line.startswith("mlp-50: 0 busy ")
    assert torch.get_num_threads() == before


def test_a_cost_over_the_limit_fails_the_check(busy, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["busy.py", *WORDS, "--check"])
    seconds = iter([1.0, 1.0, 2.21])  # to warm up, alone, beside one
    monkeypatch.setattr(busy["Cohort"], "seconds", lambda *_: next(seconds))
    with pytest.raises(SystemExit, match="over the limit: mlp-50 beside 1"):
        busy["main"]()
