"""The quick start keeps its promise."""

import json
import time

import pytest
from typer.testing import CliRunner

from fedstill.cli import app


@pytest.mark.slow
def test_the_quick_start_ends_within_a_minute_and_fedavg_is_clearly_not_the_best(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.process_time()
    outcome = CliRunner().invoke(app, ["compare", "--format", "json"])
    seconds = time.process_time() - began  # of computing: other work on the machine does not count
    assert outcome.exit_code == 0, outcome.output
    rows = {row["method"]: row for row in json.loads(outcome.stdout)}
    best = max(row["mean"] for row in rows.values())
    assert len(rows) >= 5
    assert best - rows["fedavg"]["mean"] > 0.04
    assert best > 0.7
    assert seconds < 60
