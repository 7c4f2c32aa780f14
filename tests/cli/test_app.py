"""Every mistake is one line on stderr that names its place and a cure, exit code 2, no traceback, nothing on stdout."""

import os
import subprocess
import sys

import pytest
import torch
from cli_runs import SMALL, fedstill, mistake
from quick import first_quick
from typer.testing import CliRunner

from fedstill.cli import app

BASE = SMALL + 'rounds = 2\ncohort = 3\nmethod = {name = "fedprox", mu = 0.01}\n'

# (what is set, the key that the line must name, what the line must say beside)
SETTINGS = [
    ("cohort=7", "cohort", "from 1 to 6"),
    ("cohort=0", "cohort", "above 0"),
    ("cohort=-1", "cohort", "above 0"),
    ("cohort=2.5", "cohort", "whole number"),
    ("cohort=many", "cohort", "a number"),
    ("rounds=0", "rounds", "at least 1"),
    ("rounds=ten", "rounds", "a whole number"),
    ("rounds=1.5", "rounds", "a whole number"),
    ("rounds=true", "rounds", "a whole number"),
    ("roudns=3", "roudns", "'rounds'"),
    ("lr=0.1", "lr", "'local.lr'"),
    ("seed=-1", "seed", "at least 0"),
    ("evaluate_every=0", "evaluate_every", "at least 1"),
    ("checkpoint_every=0", "checkpoint_every", "at least 1"),
    ("target=70", "target", "at most 1"),
    ("name=../up", "name", "folder"),
    ("track=[tensorbord]", "track", "a list"),
    ('track=["tensorbord"]', "track", "'tensorboard'"),
    ("data.source=", "data.source", "not empty"),
    ("data.source=no/such/file.csv", "data.source", "no such file"),
    ("data.source=3", "data.source", "a text"),
    ("data.sorce=digits", "data.sorce", "'data.source'"),
    ("data.unlabeled=99999", "data.unlabeled", "1 to"),
    ("data.unlabeled=digits", "data.unlabeled", "hold out"),
    ("partition.scheme=dirichlett", "partition.scheme", "unknown"),
    ("partition.scheme=sharsd", "partition.scheme", "'shards'"),
    ("partition.alpha=0", "partition.alpha", "above 0"),
    ("partition.alpha=-1", "partition.alpha", "above 0"),
    ("partition.alpha=big", "partition.alpha", "a number"),
    ("partition.alpa=0.1", "partition.alpa", "'alpha'"),
    ("partition.clients=-2", "partition.clients", "at least 0"),
    ("partition.clients=0", "partition.clients", "at least 1"),
    ("partition.clients=5000", "partition.clients", "fewer"),
    ("partition=natural", "partition.keys", "natural"),
    ("model.name=mlpp", "model.name", "'mlp'"),
    ("model.hiden=[8]", "model.hiden", "'hidden'"),
    ("model.hidden=eight", "model.hidden", "a list of whole numbers"),
    ("model.hidden=[0]", "model.hidden", "positive"),
    ("model=vgg8", "model.name", "8x8"),
    ("model.init=papr", "model.init", "'paper'"),
    ("local.epochs=0", "local.epochs", "at least 1"),
    ("local.batch_size=0", "local.batch_size", "from 1 to 10,000,000"),
    ("local.lr=0", "local.lr", "above 0"),
    ("local.lr=-0.1", "local.lr", "above 0"),
    ("local.lr=inf", "local.lr", "a finite number"),
    ("local.momentum=1", "local.momentum", "below 1"),
    ("local.momentum=-0.1", "local.momentum", "at least 0"),
    ("local.nesterov=true", "local.nesterov", "momentum"),
    ("local.nesterov=1", "local.nesterov", "true or false"),
    ("local.weight_decay=-1", "local.weight_decay", "at least 0"),
    ("local.optimizer=sdg", "local.optimizer", "'sgd'"),
    ("local.clip=0", "local.clip", "above 0"),
    ("local.lr_decay=2", "local.lr_decay", "at most 1"),
    ("local.lr_schedule=cosin", "local.lr_schedule", "'cosine'"),
    ('local.augment=["flipp"]', "local.augment", "'flip'"),
    ("local.augment=flip", "local.augment", "a list"),
    ("local.momentun=0.9", "local.momentun", "'local.momentum'"),
    ("local=3", "local", "a section"),
    ("local.lr.x=3", "local.lr", "a number"),
    ("rounds.x=3", "rounds", "single value"),
    ("method.name=fedprx", "method.name", "'fedprox'"),
    ("method.mu=-1", "method.mu", "at least 0"),
    ("method.mu=lots", "method.mu", "a number"),
    ("method.nu=1", "method.nu", "'mu'"),
    ("server.aggregate=medain", "server.aggregate", "'median'"),
    ("method=feddf", "data.unlabeled", "feddf"),
    ("engine.name=batchd", "engine.name", "'batched'"),
    ("engine.device=gpu", "engine.device", "cuda"),
    ("engine.precision=fp16", "engine.precision", "bf16"),
    ("engine.chunk=0", "engine.chunk", "at least 1"),
    ("guard.norm_bound=0", "guard.norm_bound", "above 0"),
    ("guard.quorum=-1", "guard.quorum", "at least 0"),
    ("guard.quorum=1.5", "guard.quorum", "share"),
    ("compare.seeds=0", "compare.seeds", "at least 1"),
    ("rounds", "rounds", "key=value"),
    ("=3", "=3", "section.key=value"),
    ("local..lr=3", "local..lr", "section.key=value"),
]


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


@pytest.mark.parametrize(("until", "undone"), [(1, "1 round has trained"), (2, "2 rounds have trained")])
def test_a_pretext_that_comes_too_late_says_how_much_it_would_undo(base, until, undone):
    method = f"method.name=fedavg until {until} then simclr"
    assert undone in mistake("run", "base.toml", "--set", "data.unlabeled=40", "--set", "rounds=3", "--set", method)


@pytest.mark.parametrize(("setting", "key", "cure"), SETTINGS, ids=[setting for setting, _, _ in SETTINGS])
def test_a_wrong_setting_is_one_line_that_names_the_key_and_the_cure(base, setting, key, cure):
    line = mistake("run", "base.toml", "--set", setting)
    assert key in line
    assert cure in line
    assert not (base / "runs").exists(), "a mistake must not leave a run folder behind"


@pytest.mark.parametrize(
    ("arguments", "named", "cure"),
    [
        (["run", "bse.toml"], "bse.toml", "base.toml"),
        (["run", "."], "folder", ".toml"),
        (["run", "base.toml", "--frmat", "json"], "--frmat", "--format"),
        (["run", "base.toml", "--format", "yaml"], "--format", "json"),
        (["run", "base.toml", "--out", "base.toml"], "--out", "folder"),
        (["run", "base.toml", "--out", "old"], "--out", "resume"),
        (["rn"], "rn", "'run'"),
        (["compare", "base.toml", "--seeds", "0"], "seeds", "at least 1"),
        (["compare", "base.toml", "--seeds", "many"], "--seeds", "integer"),
        (["compare", "base.toml", "--methods", ""], "methods", "--methods"),
        (["compare", "base.toml", "--methods", "fedavg,fedprx"], "fedprx", "'fedprox'"),
        (["compare", "base.toml", "--methods", "fedavg,fedavg"], "methods", "differ"),
        (["compare", "base.toml", "--methods", "fedavg,fedprox(nu=1)"], "nu", "'mu'"),
        (["compare", "base.toml", "--methods", "fedavg,fedprox(1)"], "'1'", "key=value"),
        (["compare", "base.toml", "--methods", "fed avg!"], "fed avg!", "fedavg"),
        (["compare", "base.toml", "--methods", "fedavg,feddf"], "data.unlabeled", "feddf"),
        (["resume", "nowhere"], "nowhere", "config.toml"),
        (["resume"], "RUN_DIR", "Missing"),
        (["run", "base.toml", "--rounds", "3", "--set", "rounds=4"], "--rounds", "leave one of them out"),
        (["run", "base.toml", "--device", "cpu", "--set", 'engine={device="cpu"}'], "engine.device", "leave one"),
        (["compare", "base.toml", "--seed", "3", "--set", "seed=4"], "--seed", "leave one of them out"),
        (["list", "metods"], "metods", "'methods'"),
        (["explain", "fedproxx"], "fedproxx", "'fedprox'"),
        (["explain", "lenet5"], "model.name takes this name", "fedstill list methods"),
        (["explain", "mine.py"], "'mine.py' names a file", "mine.py:FUNCTION"),
        (["run", "base.toml", "--method", "fedavg"], "--method", "--set method=VALUE"),
        (["run", "base.toml", "--local.lr", "1"], "--local.lr", "--set local.lr=VALUE"),
        (["report"], "Missing", "report --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_too(base, arguments, named, cure):
    (base / "old").mkdir()
    (base / "old" / "config.toml").write_text(BASE)
    line = mistake(*arguments)
    assert named in line
    assert cure in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds = \n", "line 1"),
        ("rounds = 3\n[data\n", "line 2"),
        ("rounds = 3\nrounds = 4\n", "line 2"),
        ("[local]\nlr = 0,1\n", "line 2"),
    ],
)
def test_bad_toml_names_the_file_and_the_line(base, text, said):
    (base / "bad.toml").write_text(text)
    line = mistake("run", "bad.toml")
    assert "bad.toml" in line
    assert said in line


def test_all_mistakes_of_a_file_and_its_settings_are_printed_at_once(base):
    (base / "bad.toml").write_text(BASE.replace("mu = 0.01", "nu = 1") + "[local]\nlr = 0\n")
    outcome = fedstill("run", "bad.toml", "--rounds", "0", code=2)
    first, *lines = outcome.stderr.splitlines()
    assert first == "fedstill: 3 mistakes:"
    assert sorted(line.split()[0] for line in lines) == ["local.lr", "rounds", "unknown"]
    assert outcome.stdout == ""


def test_a_model_option_of_another_model_is_named(base):
    assert "model.norm" in mistake("run", "base.toml", "--set", "model=resnet8", "--set", "model.norm=layer")
    assert "model.norm" in mistake("run", "base.toml", "--set", "model.norm=batch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told(base):
    line = mistake("run", "base.toml", "--set", "engine.device=cuda")
    assert "engine.device" in line
    assert "cpu" in line


@pytest.mark.parametrize(
    "arguments",
    first_quick(
        [["run", "--set", "rounds=0"], ["run", "missing.toml"], ["lst"], ["run", "--set", "method.name=fedavgg"]]
    ),
)
def test_the_installed_command_does_the_same(tmp_path, arguments):
    command = [sys.executable, "-c", "from fedstill.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_shell_completes_commands(tmp_path):
    command = [sys.executable, "-c", "from fedstill.cli import main; main()"]
    words = {"_FEDSTILL_COMPLETE": "complete_bash", "COMP_WORDS": "fedstill res", "COMP_CWORD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | words, timeout=60)
    assert done.stdout.split() == ["resume"]


def test_an_error_in_a_file_of_ones_own_is_one_line_with_its_place(base):
    (base / "mine.py").write_text("def measure(weights, test, trainer):\n    return weights.nothing\n")
    outcome = fedstill("run", "base.toml", "--set", "evaluate=mine.py:measure", code=2)
    last = outcome.stderr.splitlines()[-1]
    assert last == "fedstill: measure (mine.py, line 2): AttributeError: 'Weights' object has no attribute 'nothing'"


def test_an_error_of_fedstill_itself_keeps_its_traceback(base, monkeypatch):
    monkeypatch.setattr("fedstill.cli.info.listing", {}.__getitem__)
    with pytest.raises(KeyError):
        CliRunner().invoke(app, ["list", "models"], catch_exceptions=False)
