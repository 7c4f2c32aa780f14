"""What is proposed after a comparison is about the methods and seeds that were compared."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.experiment import compare as comparison_module
from fedstill.experiment import run as experiment_module

SMALL = """
rounds = 1
cohort = 3
[data]
source = "digits"
[partition]
scheme = "lda"
clients = 6
alpha = 0.5
[model]
name = "mlp"
hidden = [8]
[compare]
seeds = 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (experiment_module, comparison_module):
        monkeypatch.setattr(module, "draw_pictures", lambda *_: [])  # half a second each
    (tmp_path / "own.toml").write_text(SMALL)
    return tmp_path


def call(*words):
    outcome = CliRunner().invoke(app, list(words))
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def proposed(*words):
    """The other comparison of the line "Next:", as a shell reads it."""
    (line,) = (line for line in call(*words).splitlines() if line.startswith("Next: "))
    return shlex.split(line.split(", or ")[1].partition("  (")[0])


def compared(*words):
    return {(row["method"], row["seeds"]) for row in json.loads(call(*words, "--format", "json"))}


@pytest.mark.parametrize(
    "words",
    [
        ["--methods", "fedavg,fedprox(mu=1)", "--seeds", "2"],
        ["--methods", "fedavg,fedprox(mu=1)"],
        ["--seeds", "2"],
        ["--set", "method.name=fedprox"],
    ],
)
def test_other_methods_or_seeds_than_the_files_are_those_of_the_next_comparison(words):
    following = proposed("compare", "own.toml", *words, "--out", "first")
    assert following == ["fedstill", "compare", "first/config.toml", "--set", "partition.alpha=5"]
    assert compared(*following[1:]) == compared("compare", "own.toml", *words)


@pytest.mark.parametrize("words", [[], ["--methods", "fedavg,fedprox(mu=1)"], ["--seeds", "1"]])
def test_the_file_is_proposed_where_the_command_line_says_the_same(folder, words):
    (folder / "own.toml").write_text(SMALL + 'methods = ["fedavg", "fedprox(mu=1)"]\n')
    assert proposed("compare", "own.toml", *words)[:3] == ["fedstill", "compare", "own.toml"]


def test_more_seeds_are_proposed_than_were_compared():
    words = ["compare", "own.toml", "--set", "partition.scheme=iid", "--methods", "fedavg"]
    assert proposed(*words, "--seeds", "1")[3:] == ["--seeds", "5"]
    assert proposed(*words, "--seeds", "5")[3:] == ["--seeds", "10"]
