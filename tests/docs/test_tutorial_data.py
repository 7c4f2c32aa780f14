"""Every command of docs/tutorial-data.md runs, one after another, in an empty folder."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedstill.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_walk_from_a_csv_to_a_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^\$ (.+)$", (ROOT / "docs" / "tutorial-data.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 7
    for line in lines:
        program, *words = shlex.split(line)
        if program == "python":
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            continue
        outcome = CliRunner().invoke(app, words)
        assert outcome.exit_code == 0, f"{line}\n{outcome.output}"
    parties = pd.read_csv("hospitals/parties.csv")
    assert set(pd.read_csv("patients.csv")["hospital"]) <= set(parties.astype(str).to_numpy().ravel())
    run, bundle = (pd.read_csv(f"{folder}/predictions.csv") for folder in ("answers", "answers_of_the_bundle"))
    assert len(run) == 69
    pd.testing.assert_frame_equal(run, bundle)
