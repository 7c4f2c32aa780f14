"""`list`, `doctor`, `explain` and `--help` as a user sees them."""

import sys

import pytest
import torch
from cli_runs import answer, fedstill

from fedstill.attack import ATTACKS
from fedstill.engine import ENGINES
from fedstill.loop.evaluate import EVALUATIONS, METRICS
from fedstill.methods import METHODS
from fedstill.models import MODELS
from fedstill.partition import PARTITIONS


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", METHODS),
        ("partitions", PARTITIONS),
        ("models", MODELS),
        ("attacks", ATTACKS),
        ("datasets", ["digits", "fashion-mini"]),
        ("engines", ENGINES),
        ("metrics", METRICS),
        ("evaluations", EVALUATIONS),
    ],
)
def test_list_names_all_there_is_with_a_line_on_each(what, names):
    entries = answer("list", what)
    assert set(names) <= {entry["name"] for entry in entries}
    assert all(entry["summary"] for entry in entries)
    text = fedstill("list", what).stdout
    assert all(name in text for name in names)
    assert max(len(line) for line in text.splitlines()) <= 100


def test_list_shows_options_with_their_defaults():
    entry = next(entry for entry in answer("list", "methods") if entry["name"] == "fedprox")
    assert entry["options"]["mu"] == 0.01
    assert "mu=0.01" in fedstill("list", "methods").stdout


def test_explain_leaves_no_title_without_content(tmp_path):
    own = tmp_path / "plain.py"
    own.write_text(
        "from fedstill import Method\nfrom fedstill.local import cross_entropy\n"
        "from fedstill.server.aggregate import average\n\n\n"
        'def plain() -> Method:\n    """Plain: one line and no option."""\n'
        "    return Method(cross_entropy(), average())\n"
    )
    text = fedstill("explain", f"{own}:plain").stdout
    assert "\n\n\n" not in text
    assert "Options\n  none\nParts" in text


def test_doctor_is_happy_here_and_says_what_is_missing():
    report = answer("doctor")
    found = {check["name"]: check for check in report["checks"]}
    assert report["healthy"]
    assert found["engines agree"]["ok"]
    assert all(check["advice"] for check in report["checks"] if not check["ok"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not need a C++ compiler")
@pytest.mark.parametrize(("compiler", "ok"), [(sys.executable, True), ("no-such-compiler", False)])
def test_doctor_says_whether_torch_can_compile_here(monkeypatch, compiler, ok):
    monkeypatch.setenv("CXX", compiler)
    report = answer("doctor")
    found = next(check for check in report["checks"] if check["name"] == "engine.compile")
    assert (found["ok"], report["healthy"]) == (ok, True)
    assert found["advice"].startswith("" if ok else "torch.compile needs a C++ compiler")


def test_doctor_text_puts_advice_under_its_check():
    lines = fedstill("doctor").stdout.splitlines()
    assert lines[-1].startswith("Ready")
    assert any("pip install" in line for line in lines) or all(line.startswith("ok") for line in lines[:-2])


def test_help_names_every_command_and_version_is_one_line():
    text = fedstill("--help").stdout
    assert all(command in text for command in ("run", "compare", "resume", "predict", "list", "explain", "doctor"))
    assert fedstill().stdout == text
    assert fedstill("--version").stdout.startswith("fedstill ")
