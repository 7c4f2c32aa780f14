"""`fedstill sweep` at the terminal."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedstill.cli.app import app

SMALL = ["rounds=2", "cohort=2", "data.source=digits", "data.unlabeled=none", "partition.clients=4", "model.hidden=[4]"]
WORDS = [word for setting in SMALL for word in ("--set", setting)]


def test_a_sweep_prints_table_map_and_sentences_and_every_command_reads_its_folder(tmp_path):
    folder = tmp_path / "grid"
    over = ["--over", "local.lr=0.01,0.5", "--over", "method=fedavg,fedavgm", "--seeds", "2", "--out", str(folder)]
    done = CliRunner().invoke(app, ["sweep", *WORDS, *over])
    assert done.exit_code == 0, done.output
    for words in (
        "accuracy (%) by",
        "rows that clients hold back",
        " is best, with ",
        f"fedstill run {folder}/best.toml",
    ):
        assert words in done.output
    assert (folder / "sensitivity.png").exists()
    for command in (["show"], ["resume"], ["report"], ["table"], ["runs"]):
        again = CliRunner().invoke(app, [*command, str(folder)])
        assert again.exit_code == 0, again.output
    page = (folder / "report.html").read_text()
    assert "local.lr matters" in page or "local.lr:" in page or "method matters" in page
    found = CliRunner().invoke(app, ["sweep", *WORDS, *over, "--format", "json"])
    assert len(json.loads(found.stdout)["points"]) == 4
    ran = CliRunner().invoke(app, ["run", str(folder / "best.toml"), "--quiet", "--out", str(tmp_path / "best")])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["sweep"], "--over local.lr=0.01,0.1"),
        (["sweep", "--over", "local.rate=1,2"], "local.rate"),
        (["run", "--set", "local.lr=[0.01,0.1]"], "fedstill sweep --over local.lr=0.01,0.1"),
    ],
)
def test_a_mistake_is_one_line_with_its_cure(words, cure, capsys):
    with pytest.raises(SystemExit) as end:
        app(words)
    assert end.value.code == 2
    assert cure in capsys.readouterr().err
