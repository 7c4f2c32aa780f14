"""The command line: `fedstill run`, `compare`, `resume`, `predict`, `bench`, `list`, `explain`, `doctor`."""

from __future__ import annotations

from fedstill.cli.app import app


def main() -> None:
    """The entry point of the `fedstill` command."""
    app(prog_name="fedstill")


__all__ = ["app", "main"]
