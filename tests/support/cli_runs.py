"""The command line on a small experiment, in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.methods import own_code

SMALL = """
name = "small"
data.source = "digits"
partition.scheme = "lda"
partition.clients = 6
partition.alpha = 0.5
model.name = "mlp"
model.hidden = [8]
"""


def fedstill(*words: Any, code: int = 0) -> Result:
    """Run a command that must end with this exit code, as in a new process: no code has been named before."""
    own_code.forget()
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == code, outcome.output
    assert "Traceback" not in outcome.output
    return outcome


def answer(*words: Any) -> Any:
    return json.loads(fedstill(*words, "--format", "json").stdout)


def mistake(*words: Any) -> str:
    """The one line on stderr of a command that must be refused; stdout must be empty."""
    outcome = fedstill(*words, code=2)
    (line,) = outcome.stderr.splitlines()
    assert outcome.stdout == ""
    assert line.startswith("fedstill: ")
    return line
