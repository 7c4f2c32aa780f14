"""Write predictions as files: a table as CSV and parquet, a summary as JSON, and the reliability curve as PNG."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.data.source import require_extra
from fedstill.loop.calibrate import Reliability
from fedstill.report import COLOURS, new_figure, quiet
from fedstill.storage.files import write_whole, writing
from fedstill.storage.spreadsheet import as_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstill.prediction import Outcome

FILES = ("predictions.csv", "predictions.parquet", "predictions.json", "reliability.png")
LARGEST_DOT = 150.0  # points squared, of a bin with all rows; the area is the share of the rows
SMALLEST_DOT = 8.0
GAP = 0.16  # of a bin, between the bars of two bins
_log = logging.getLogger("fedstill.run")


class Part(NamedTuple):
    """Labeled rows."""

    ids: tuple[str, ...]
    labels: tuple[str, ...]  # the most probable class
    probabilities: Tensor  # (M, K) float32, calibrated where that was possible
    confidence: Tensor  # (M,) of the label
    confidence_raw: Tensor  # (M,) before calibration
    kept: Tensor | None  # (M,) only from targets: the rows that the server learnt from


def columns_of(part: Part, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return id, label, confidence, confidence_raw, kept (of targets), and p_<class> for each class: (M,) each."""
    columns = {
        "id": np.array([_storable(name) for name in part.ids], dtype=object),
        "label": np.array(part.labels, dtype=object),
        "confidence": part.confidence.numpy(),
        "confidence_raw": part.confidence_raw.numpy(),
    }
    if part.kept is not None:
        columns["kept"] = part.kept.numpy()
    shares = part.probabilities.numpy()
    return columns | {f"p_{name}": shares[:, place] for place, name in enumerate(classes)}


def _storable(name: str) -> str:
    """Return a name that UTF-8 can hold: of a file whose name is no text, other bytes are written as signs."""
    return name.encode("utf-8", "backslashreplace").decode()


@contextmanager
def writing_tables(folder: Path, classes: Sequence[str]) -> Iterator[Callable[[Part], None]]:
    """Remove old files, and yield a function that appends rows to predictions.csv and .parquet.

    Without the extra that parquet needs one line says so. If the block fails, neither file is left.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)  # never an old one beside a new table
        with ExitStack() as open_files:
            writers = [_csv_writer(open_files.enter_context(writing(folder / "predictions.csv")))]
            try:
                require_extra("pyarrow.parquet")
            except FedstillError as error:
                _log.warning("no predictions.parquet: %s", error)
            else:
                writers.append(_parquet_writer(open_files, folder / "predictions.parquet"))

            def write(part: Part) -> None:
                columns = columns_of(part, classes)
                for writer in writers:
                    writer(columns)

            yield write
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> FedstillError:
    at = f"'{error.filename2 or error.filename or folder}'"
    return FedstillError(f"--out: cannot write {at} ({error.strerror or error}): give another folder")


def _csv_writer(file: IO[bytes]) -> Callable[[Mapping[str, np.ndarray]], None]:
    """Return a function that appends rows; numbers are the shortest text that reads back as the same float32.

    A word that a spreadsheet would take for a formula is marked as text; fedstill reads it as it was.
    """
    written = False

    def write(columns: Mapping[str, np.ndarray]) -> None:
        nonlocal written
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        if not written:
            table.writerow(map(as_cell, columns))
        cells = (
            map(as_cell, values.tolist()) if values.dtype == object else values.astype(str).tolist()
            for values in columns.values()
        )
        table.writerows(zip(*cells, strict=True))
        file.write(text.getvalue().encode())
        written = True

    return write


def _parquet_writer(open_files: ExitStack, path: Path) -> Callable[[Mapping[str, np.ndarray]], None]:
    arrow, parquet = require_extra("pyarrow"), require_extra("pyarrow.parquet")
    kinds, file, table = {"id": arrow.string(), "label": arrow.string()}, open_files.enter_context(writing(path)), None

    def write(columns: Mapping[str, np.ndarray]) -> None:
        nonlocal table
        rows = arrow.table({name: arrow.array(values, kinds.get(name)) for name, values in columns.items()})
        if table is None:
            table = open_files.enter_context(parquet.ParquetWriter(file, rows.schema))
        table.write_table(rows)

    return write


def write_summary(outcome: Outcome, folder: Path, *, title: str) -> None:
    """Write reliability.png, if the extra for it is installed, and predictions.json, which names the other files."""
    measured = outcome.measured
    try:
        if measured is not None:
            about = f"{title}; measured on {measured.on}"
            try:
                reliability_picture(measured.before, measured.after, folder / "reliability.png", title=about)
            except FedstillError as error:
                _log.warning("no reliability.png: %s", error)
        written = [name for name in FILES if (folder / name).exists()]
        summary = {**outcome.summary(), "files": [*written, "predictions.json"]}
        write_whole(folder / "predictions.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise _cannot_write(folder, error) from error


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
