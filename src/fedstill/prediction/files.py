"""Write predictions as files: a table as CSV and parquet, a summary as JSON, and the reliability curve as PNG."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.data.source import require_extra
from fedstill.loop.calibrate import Reliability
from fedstill.report import COLOURS, new_figure, quiet
from fedstill.storage.files import write_whole, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstill.prediction import Predictions

FILES = ("predictions.csv", "predictions.parquet", "predictions.json", "reliability.png")
ROWS_AT_ONCE = 4096
LARGEST_DOT = 150.0  # points squared, of a bin with all rows; the area is the share of the rows
SMALLEST_DOT = 8.0
GAP = 0.16  # of a bin, between the bars of two bins
_log = logging.getLogger("fedstill.run")


def columns_of(predictions: Predictions) -> dict[str, Any]:
    """Return id, label, confidence, confidence_raw, kept (of targets), and p_<class> for each class: (M,) each."""
    columns: dict[str, Any] = {
        "id": np.array(predictions.ids, dtype=object),
        "label": np.array(predictions.labels, dtype=object),
        "confidence": predictions.confidence.numpy(),
        "confidence_raw": predictions.confidence_raw.numpy(),
    }
    if predictions.kept is not None:
        columns["kept"] = predictions.kept.numpy()
    shares = predictions.probabilities.numpy()
    return columns | {f"p_{name}": shares[:, place] for place, name in enumerate(predictions.classes)}


def write_predictions(predictions: Predictions, folder: Path, *, title: str) -> list[Path]:
    """Remove old files, write all files that the installed extras allow, and log one line for each of the others."""
    columns, measured, written = columns_of(predictions), predictions.measured, []
    writers: dict[str, Callable[[Path], object]] = {
        "predictions.csv": lambda path: _write_csv(columns, path),
        "predictions.parquet": lambda path: _write_parquet(columns, path),
    }
    if measured is not None:
        about = f"{title}; measured on {measured.on}"
        writers["reliability.png"] = partial(reliability_picture, measured.before, measured.after, title=about)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)  # never an old one beside a new table
        for name, write in writers.items():
            try:
                write(folder / name)
            except FedstillError as error:
                _log.warning("no %s: %s", name, error)
            else:
                written.append(folder / name)
        written.append(folder / "predictions.json")  # the last one, because it names the others
        summary = {**predictions.summary(), "files": [path.name for path in written]}
        write_whole(written[-1], json.dumps(summary, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        at = f"'{error.filename2 or error.filename or folder}'"
        raise FedstillError(f"--out: cannot write {at} ({error.strerror or error}): give another folder") from error
    return written


def _write_csv(columns: dict[str, Any], path: Path) -> None:
    """Write numbers as the shortest text that reads back as the same float32."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    for at in range(0, len(columns["id"]), ROWS_AT_ONCE):
        cells = [values[at : at + ROWS_AT_ONCE].astype(str) for values in columns.values()]
        table.writerows(zip(*(cell.tolist() for cell in cells), strict=True))
    write_whole(path, text.getvalue())


def _write_parquet(columns: dict[str, Any], path: Path) -> None:
    arrow, parquet = require_extra("pyarrow"), require_extra("pyarrow.parquet")
    kinds = {"id": arrow.string(), "label": arrow.string()}
    table = arrow.table({name: arrow.array(values, kinds.get(name)) for name, values in columns.items()})
    with writing(path) as file:
        parquet.write_table(table, file)


def reliability_picture(before: Reliability, after: Reliability | None, path: Path, *, title: str) -> Path:
    """Draw accuracy over confidence above, rows in each bin below; on the diagonal, confidence is as it says.

    A thin upright line is the 95 % interval of a bin's accuracy: a bin of few rows says little.
    """
    figure = new_figure(6.2, 7.4, title, letters=76, size=10)
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    lines = {"not calibrated": before} if after is None else {"before calibration": before, "after calibration": after}
    for place, (name, measured) in enumerate(lines.items()):
        _draw_curve(curve, measured, name, COLOURS[place])
        low, high = (np.array([100 * getattr(group, side) for group in measured.bins]) for side in ("low", "high"))
        width = (high - low) * (1 - GAP) / len(lines)
        left = low + (high - low) * GAP / 2 + width * place
        counts.bar(left, [group.count for group in measured.bins], width, align="edge", color=COLOURS[place])
    curve.plot([0, 100], [0, 100], color="0.5", linewidth=1, linestyle=":", zorder=1)
    along = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    curve.text(5, 7, "as often right as sure", color="0.4", fontsize=8, **along)
    curve.set_ylabel("answers that are right (%)")
    curve.set_ylim(0, 100)
    legend = curve.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=8, frameon=False, borderpad=0.1)
    for dot in legend.legend_handles:
        dot.set_sizes([30.0])
    counts.set_ylabel("rows")
    counts.set_xlabel("confidence (%)")
    counts.set_xlim(0, 100)
    for axes in (curve, counts):
        quiet(axes)
    figure.savefig(path)
    return path


def wilson(right: float, rows: int, deviations: float = 1.96) -> tuple[float, float]:
    """Return the interval of a share seen in `rows` (Wilson, 1927): within [0, 1], and wide for few rows.

    >>> [round(bound, 3) for bound in wilson(1.0, 3)]
    [0.438, 1.0]
    """
    square = deviations**2
    centre = (right * rows + square / 2) / (rows + square)
    spread = deviations * math.sqrt(right * (1 - right) * rows + square / 4) / (rows + square)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _draw_curve(axes: Axes, measured: Reliability, name: str, colour: str) -> None:
    sure = [100 * group.confidence for group in measured.bins]
    right = [100 * group.accuracy for group in measured.bins]
    bounds = np.array([wilson(group.accuracy, group.count) for group in measured.bins])
    sizes = [max(LARGEST_DOT * group.count / measured.rows, SMALLEST_DOT) for group in measured.bins]
    label = f"{name}: ECE {100 * measured.ece:.1f} %, mean confidence {100 * measured.confidence:.1f} %"
    axes.vlines(sure, 100 * bounds[:, 0], 100 * bounds[:, 1], color=colour, linewidth=0.9, alpha=0.5)
    axes.plot(sure, right, color=colour, linewidth=1.0, alpha=0.6)
    axes.scatter(sure, right, s=sizes, color=colour, zorder=3, linewidth=0, label=label, clip_on=False)
