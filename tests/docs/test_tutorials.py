"""Every command of the two tutorials runs, one after another, in an empty folder."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pandas as pd
import pytest
from doc_pages import ROOT, blocks
from typer.testing import CliRunner

from fedstill.cli.app import app
from fedstill.methods import own_code

pytestmark = pytest.mark.slow


def walk(name: str) -> dict[str, str]:
    """Save the files that a tutorial shows, run its commands, and return the output of each command of ours."""
    page = ROOT / "docs" / name
    for block in [*blocks(page, "toml"), *blocks(page, "python")]:
        if file := re.match(r"# (\w+\.\w+)\n", block.text):
            Path(file[1]).write_text(block.text, encoding="utf-8")
    outputs = {}
    for line in re.findall(r"^\$ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        program, *words = shlex.split(line)
        if program == "python":
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            continue
        own_code.forget()  # the next command is another process
        outcome = CliRunner().invoke(app, words)
        assert outcome.exit_code == 0, f"{line}\n{outcome.output}"
        outputs[line] = outcome.stdout
    return outputs


def test_the_walk_from_a_csv_to_a_bundle(tmp_path, monkeypatch):
    pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")
    monkeypatch.chdir(tmp_path)
    assert len(walk("tutorial-data.md")) == 8
    parties = pd.read_csv("hospitals/parties.csv")
    assert set(pd.read_csv("patients.csv")["hospital"]) <= set(parties.astype(str).to_numpy().ravel())
    run, bundle = (pd.read_csv(f"{folder}/predictions.csv") for folder in ("answers", "answers_of_the_bundle"))
    assert len(run) == 69
    pd.testing.assert_frame_equal(run, bundle)
    page = Path("hospitals/report.html").read_text(encoding="utf-8")
    assert all(hospital in page for hospital in pd.read_csv("patients.csv")["hospital"].unique())


def test_the_walk_from_an_idea_to_a_table(tmp_path, monkeypatch):
    pytest.importorskip("vl_convert", reason="the extra 'report' is not installed")
    monkeypatch.chdir(tmp_path)
    outputs = walk("tutorial-method.md")
    assert len(outputs) == 8
    assert {len(list(Path("first").glob(f"*/seed-{seed}"))) for seed in range(8)} == {5}
    assert "steady" in Path("first/report.html").read_text(encoding="utf-8")
    assert r"\toprule" in outputs["fedstill table first --format latex"]
