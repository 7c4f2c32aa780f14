"""The command that labels: predict."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import typer

from fedstill.cli.app import print_json, tell
from fedstill.prediction import Predictions, predict
from fedstill.prediction.files import FILES

NAMED = 10  # files that could not be read, by name; all of them are in predictions.json
SHOWN_CLASSES = 10
WIDTH = 120


def predict_command(run_dir: Path, inputs: Path | None, *, from_: str, out: Path | None, as_json: bool) -> None:
    folder = run_dir if out is None else out
    found = predict(run_dir, inputs, from_=from_, out=folder)
    for line in [*found.notes, *(f"skipped {one}: not a readable image" for one in found.skipped[:NAMED])]:
        tell(line)
    if len(found.skipped) > NAMED:
        tell(f"skipped {len(found.skipped) - NAMED} more, all in {folder}/predictions.json")
    print_json(found.summary()) if as_json else typer.echo(predictions_text(found, folder))


def predictions_text(found: Predictions, folder: Path) -> str:
    """What a person wants to know about the labels, and where they are."""
    rows = [
        ("from", found.why),
        ("confidence", f"{_percent(float(found.confidence.double().mean()))} on average; {found.calibration.why}"),
        *_measured(found),
        ("labels", _histogram(found)),
    ]
    if found.skipped:
        rows.append(("skipped", f"{len(found.skipped)} that could not be read"))
    lines = [f"{len(found.ids)} rows labeled: {found.what}"]
    for name, text in rows:
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<18} ", subsequent_indent=" " * 21)
    lines.append(f"Everything is in {folder}: {', '.join(name for name in FILES if (folder / name).exists())}.")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _measured(found: Predictions) -> list[tuple[str, str]]:
    measured = found.measured
    if measured is None:
        return [("accuracy", "not known: there are no labels to measure it on, hence no reliability curve")]
    gap = _percent(measured.before.ece)
    if measured.after is not None:
        gap = f"{gap} before, {_percent(measured.after.ece)} after calibration ({measured.how})"
    return [("accuracy", f"{_percent(measured.before.accuracy)} on {measured.on}"), ("calibration error", gap)]


def _histogram(found: Predictions) -> str:
    """The classes named most often, and how many more there are."""
    counts = Counter(found.labels).most_common()
    shown = ", ".join(f"{name}: {count}" for name, count in counts[:SHOWN_CLASSES])
    more = len(counts) - SHOWN_CLASSES
    return f"{shown}, and {more} more classes" if more > 0 else shown
