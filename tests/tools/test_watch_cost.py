"""The script that measures what a live page costs a run."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'watch' is not installed")
TOOL = Path(__file__).parents[2] / "tools" / "watch_cost.py"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells the seconds of another process")
def test_the_processor_seconds_of_a_process_are_those_that_it_counts_itself():
    seconds, end = runpy.run_path(str(TOOL))["processor_seconds"](os.getpid()), time.process_time()
    assert end - 0.1 < seconds <= end + 0.02  # it is told in hundredths


@pytest.mark.slow
def test_a_pair_has_a_run_alone_and_one_whose_reader_is_sent_rounds(tmp_path, monkeypatch):
    words = ["--rounds", "20", "--set", "method=fedavg", "--set", "data.unlabeled=none"]
    monkeypatch.setattr(sys, "argv", ["watch_cost.py", "--pairs", "1", "--out", str(tmp_path / "x.json"), "--", *words])
    runpy.run_path(str(TOOL), run_name="__main__")
    (pair,) = json.loads((tmp_path / "x.json").read_text())["pairs"]
    assert pair["ratio"] == pytest.approx(pair["watched_s"] / pair["alone_s"])
    assert pair["bytes"] > 10_000
    assert 0 < pair["page_cpu_share"] < 1
