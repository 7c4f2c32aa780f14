"""Predictions as files: a table twice (CSV, parquet), what was chosen and why (JSON), and the reliability curve."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.data.source import require_extra

if TYPE_CHECKING:
    from fedstill.prediction import Predictions
import math
import textwrap
from typing import TYPE_CHECKING

from fedstill.prediction.calibrate import Reliability
from fedstill.report.curves import COLOURS
from fedstill.storage.files import write_whole, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


FILES = ("predictions.csv", "predictions.parquet", "predictions.json", "reliability.png")
ROWS_AT_ONCE = 4096
_log = logging.getLogger("fedstill.run")


def columns_of(predictions: Predictions) -> dict[str, Any]:
    """id, label, confidence, confidence_raw, kept (of targets), and p_<class> for each class: (M,) each."""
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
    """All files that can be written here; what an extra is missing for costs one line. Older ones are replaced."""
    try:
        return _write_all(predictions, folder, title)
    except OSError as error:
        at = f"'{error.filename2 or error.filename or folder}'"
        raise FedstillError(f"--out: cannot write {at} ({error.strerror or error}): give another folder") from error


def _write_all(predictions: Predictions, folder: Path, title: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    columns, written = columns_of(predictions), [folder / "predictions.csv"]
    _write_csv(columns, written[0])
    optional: dict[str, Callable[[Path], bool]] = {
        "predictions.parquet": partial(_write_parquet, columns),
        "reliability.png": partial(_draw, predictions, title),
    }
    for path, write in ((folder / name, write) for name, write in optional.items()):
        path.unlink(missing_ok=True)  # never the old one beside a new table
        try:
            written += [path] if write(path) else []
        except FedstillError as error:
            _log.warning("no %s: %s", path.name, error)
    path = folder / "predictions.json"
    summary = {**predictions.summary(), "files": [*(one.name for one in written), path.name]}
    write_whole(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return [*written, path]


def _write_csv(columns: dict[str, Any], path: Path) -> None:
    """Numbers as the shortest text that reads back as the same float32."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    for at in range(0, len(columns["id"]), ROWS_AT_ONCE):
        cells = [values[at : at + ROWS_AT_ONCE].astype(str) for values in columns.values()]
        table.writerows(zip(*(cell.tolist() for cell in cells), strict=True))
    write_whole(path, text.getvalue())


def _write_parquet(columns: dict[str, Any], path: Path) -> bool:
    arrow, parquet = require_extra("pyarrow"), require_extra("pyarrow.parquet")
    kinds = {"id": arrow.string(), "label": arrow.string()}
    table = arrow.table({name: arrow.array(values, kinds.get(name)) for name, values in columns.items()})
    with writing(path) as file:
        parquet.write_table(table, file)
    return True


def _draw(predictions: Predictions, title: str, path: Path) -> bool:
    measured = predictions.measured
    if measured is None:
        return False
    reliability_picture(measured.before, measured.after, path, title=f"{title}; measured on {measured.on}")
    return True


LARGEST_DOT = 150.0  # points squared, of a bin with all rows; the area is the share of the rows
SMALLEST_DOT = 8.0
GAP = 0.16  # of a bin, between the bars of two bins


def reliability_picture(before: Reliability, after: Reliability | None, path: Path, *, title: str) -> Path:
    """Accuracy over confidence above, rows in each bin below; on the diagonal, confidence is what it says.

    A thin upright line is the 95 % interval of a bin's accuracy: a bin of few rows says little.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    figure = Figure(figsize=(6.2, 7.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    lines = {"not calibrated": before} if after is None else {"before calibration": before, "after calibration": after}
    for place, (name, measured) in enumerate(lines.items()):
        _draw_curve(curve, measured, name, COLOURS[place])
        _draw_counts(counts, measured, COLOURS[place], place=place, of=len(lines))
    figure.suptitle(textwrap.fill(title, 76), x=0.01, ha="left", fontsize=10)
    _dress(curve, counts)
    figure.savefig(path)
    return path


def wilson(right: float, rows: int, deviations: float = 1.96) -> tuple[float, float]:
    """The interval of a share seen in `rows` (Wilson, 1927): within [0, 1], and wide for few rows.

    >>> [round(bound, 3) for bound in wilson(1.0, 3)]
    [0.438, 1.0]
    """
    square = deviations**2
    centre = (right * rows + square / 2) / (rows + square)
    spread = deviations * math.sqrt(right * (1 - right) * rows + square / 4) / (rows + square)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _draw_curve(axes: Axes, measured: Reliability, name: str, colour: str) -> None:
    sure = [100 * one.confidence for one in measured.bins]
    right = [100 * one.accuracy for one in measured.bins]
    bounds = np.array([wilson(one.accuracy, one.count) for one in measured.bins])
    sizes = [max(LARGEST_DOT * one.count / measured.rows, SMALLEST_DOT) for one in measured.bins]
    told = f"{name}: ECE {100 * measured.ece:.1f} %, mean confidence {100 * measured.confidence:.1f} %"
    axes.vlines(sure, 100 * bounds[:, 0], 100 * bounds[:, 1], color=colour, linewidth=0.9, alpha=0.5)
    axes.plot(sure, right, color=colour, linewidth=1.0, alpha=0.6)
    axes.scatter(sure, right, s=sizes, color=colour, zorder=3, linewidth=0, label=told, clip_on=False)


def _draw_counts(axes: Axes, measured: Reliability, colour: str, *, place: int, of: int) -> None:
    low = np.array([100 * one.low for one in measured.bins])
    span = np.array([100 * (one.high - one.low) for one in measured.bins])
    width = span * (1 - GAP) / of
    axes.bar(low + span * GAP / 2 + width * place, [o.count for o in measured.bins], width, align="edge", color=colour)


def _dress(curve: Axes, counts: Axes) -> None:
    curve.plot([0, 100], [0, 100], color="0.5", linewidth=1, linestyle=":", zorder=1)
    curve.text(
        5, 7, "as often right as sure", color="0.4", fontsize=8,
        rotation=45, rotation_mode="anchor", transform_rotates_text=True,
    )  # fmt: skip
    curve.set_ylabel("answers that are right (%)")
    curve.set_ylim(0, 100)
    legend = curve.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=8, frameon=False, borderpad=0.1)
    for dot in legend.legend_handles:
        dot.set_sizes([30.0])  # type: ignore[union-attr]
    counts.set_ylabel("rows")
    counts.set_xlabel("confidence (%)")
    counts.set_xlim(0, 100)
    for axes in (curve, counts):
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
