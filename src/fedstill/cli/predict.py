"""The commands that use a trained model: predict labels data, export writes it as one file."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from pathlib import Path

from fedstill.cli.app import print_json, say, tell
from fedstill.experiment.bundle import is_bundle
from fedstill.prediction import Outcome, predict_to_files
from fedstill.prediction.export import export
from fedstill.prediction.files import FILES

NAMED = 10  # files that could not be read, by name; all of them are in predictions.json
SHOWN_CLASSES = 10
WIDTH = 120


def predict_command(model: Path, inputs: Path | None, *, from_: str | None, out: Path | None, as_json: bool) -> None:
    folder = out or (Path() if is_bundle(model) else model)
    outcome = predict_to_files(model, inputs, from_=from_, out=folder)
    for line in [*outcome.notes, *map(_skipped, outcome.skipped[:NAMED])]:
        tell(line)
    if len(outcome.skipped) > NAMED:
        tell(f"skipped {len(outcome.skipped) - NAMED} more, all in {folder}/predictions.json")
    print_json(outcome.summary()) if as_json else say(predictions_text(outcome, folder))


def _skipped(name: str) -> str:
    """Say which sample is left out; a table without a column of ids has rows numbered from 0."""
    row = "row " if re.match(r"\d+ \(", name) else ""
    return f"skipped, because it cannot be read: {row}{name}"


def export_command(run_dir: Path, *, from_: str, out: Path | None, kind: str) -> None:
    for path, words in export(run_dir, from_=from_, out=out, kind=kind).items():
        say(f"{path}  {words}")


def predictions_text(outcome: Outcome, folder: Path) -> str:
    """Return the lines about the labels, and where they are, for a person."""
    rows = [
        ("from", outcome.why),
        ("confidence", f"{_percent(outcome.mean_confidence)} on average; {outcome.calibration.why}"),
        *_measured(outcome),
        ("labels", _histogram(outcome)),
    ]
    if outcome.skipped:
        rows.append(("skipped", f"{len(outcome.skipped)} that could not be read"))
    lines = [f"{outcome.count} rows labeled: {outcome.what}"]
    for name, text in rows:
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<18} ", subsequent_indent=" " * 21)
    lines.append(f"Everything is in {folder}: {', '.join(name for name in FILES if (folder / name).exists())}.")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _measured(outcome: Outcome) -> list[tuple[str, str]]:
    measured = outcome.measured
    if measured is None:
        return [("accuracy", "not known: there are no labels to measure it on, hence no reliability curve")]
    gap = _percent(measured.before.ece)
    if measured.after is not None:
        gap = f"{gap} before, {_percent(measured.after.ece)} after calibration ({measured.how})"
    return [("accuracy", f"{_percent(measured.before.accuracy)} on {measured.on}"), ("calibration error", gap)]


def _histogram(outcome: Outcome) -> str:
    """The classes named most often, and how many more there are."""
    counts = [(name, count) for name, count in Counter(outcome.label_counts).most_common() if count]
    shown = ", ".join(f"{name}: {count}" for name, count in counts[:SHOWN_CLASSES])
    more = len(counts) - SHOWN_CLASSES
    return f"{shown}, and {more} more classes" if more > 0 else shown
