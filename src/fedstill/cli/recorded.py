"""The commands that read runs from disk and run nothing: table, figure."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from fedstill.cli.run import print_table
from fedstill.core.errors import FedstillError
from fedstill.experiment.recorded import read_curves, read_summaries
from fedstill.report.curves import paper_curves
from fedstill.report.export import FORMS
from fedstill.report.table import table_legend

PICTURES = (".pdf", ".svg", ".png")
WIDTHS = (2.0, 20.0)  # inches between which names and numbers can be read


def table_command(folder: Path, form: str) -> None:
    if form not in FORMS:
        raise FedstillError(f"--format {form}: use {', '.join(FORMS)}")
    summaries = read_summaries(folder)
    if form == "text" and sys.stdout.isatty():
        print_table(summaries)
        typer.echo("\n".join(table_legend(summaries)))
    else:
        typer.echo(FORMS[form](summaries))


def figure_command(folder: Path, *, out: Path | None, width: float) -> None:
    path = folder / "curves.pdf" if out is None else out
    if path.suffix.lower() not in PICTURES:
        raise FedstillError(f"--out: '{path}' has no ending that names a picture: use {', '.join(PICTURES)}")
    low, high = WIDTHS
    if not low <= width <= high:
        raise FedstillError(f"--width {width:g}: use {low:g} to {high:g} inches")
    curves = read_curves(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        paper_curves(curves, path, width=width)
    except OSError as error:
        raise FedstillError(f"--out: cannot write '{path}' ({error.strerror or error})") from error
    typer.echo(f"Learning curves, {width:g} inches wide: {path}")
