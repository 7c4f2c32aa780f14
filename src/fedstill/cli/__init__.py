"""The command line: `fedstill run`, `compare`, `resume`, `predict`, `report`, `bench`, `list`, `explain`, `doctor`."""

from __future__ import annotations

from fedstill.cli.app import app, main

__all__ = ["app", "main"]
