"""`fedstill choose` at the terminal."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedstill.cli.app import app

SMALL = ["rounds=4", "cohort=2", "data.source=digits", "data.unlabeled=none", "partition.clients=4", "method=fedavg"]


@pytest.mark.slow
def test_choose_says_the_winner_its_distance_from_fedavg_and_how_to_run_it(tmp_path):
    folder = tmp_path / "trial"
    words = [word for setting in SMALL for word in ("--set", setting)]
    words += ["--budget", "100rounds", "--methods", "fedprox,fedavgm", "--out", str(folder), "--quiet"]
    done = CliRunner().invoke(app, ["choose", *words])
    assert done.exit_code == 0, done.output
    record = json.loads((folder / "choose.json").read_text())
    assert f"Chosen by the rows that clients hold back: {record['chosen']}." in done.output
    assert f"fedstill run {folder / 'chosen.toml'}" in done.output
    assert "level 1: " in done.output
    assert "How it was chosen" in (folder / "report.html").read_text()
    again = CliRunner().invoke(app, ["resume", str(folder), "--quiet"])
    assert f"hold back: {record['chosen']}." in again.output


def test_a_wrong_budget_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        app(["choose", "--budget", "3 apples"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
