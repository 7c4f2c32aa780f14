"""Predictions as files: a table twice (CSV, parquet), what was chosen and why (JSON), and the reliability curve."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.data.source import require_extra
from fedstill.report.reliability import reliability_picture

if TYPE_CHECKING:
    from fedstill.prediction import Predictions

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
        for name in FILES:
            with suppress(OSError):
                _temporary(folder / name).unlink(missing_ok=True)
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
    _replace(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return [*written, path]


def _temporary(path: Path) -> Path:
    return path.with_name(f".writing-{path.name}")


def _replace(path: Path, text: str) -> None:
    _temporary(path).write_text(text, encoding="utf-8")
    _temporary(path).replace(path)


def _write_csv(columns: dict[str, Any], path: Path) -> None:
    """Numbers as the shortest text that reads back as the same float32."""
    with _temporary(path).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        for at in range(0, len(columns["id"]), ROWS_AT_ONCE):
            cells = [values[at : at + ROWS_AT_ONCE].astype(str) for values in columns.values()]
            table.writerows(zip(*(cell.tolist() for cell in cells), strict=True))
    _temporary(path).replace(path)


def _write_parquet(columns: dict[str, Any], path: Path) -> bool:
    arrow, parquet = require_extra("pyarrow"), require_extra("pyarrow.parquet")
    kinds = {"id": arrow.string(), "label": arrow.string()}
    table = arrow.table({name: arrow.array(values, kinds.get(name)) for name, values in columns.items()})
    parquet.write_table(table, _temporary(path))
    _temporary(path).replace(path)
    return True


def _draw(predictions: Predictions, title: str, path: Path) -> bool:
    measured = predictions.measured
    if measured is None:
        return False
    reliability_picture(measured.before, measured.after, path, title=f"{title}; measured on {measured.on}")
    return True
