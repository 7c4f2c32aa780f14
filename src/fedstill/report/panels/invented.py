"""Samples that a method's server invents, beside the training samples that are nearest to them."""

from __future__ import annotations

from pathlib import Path

from fedstill.report.generated import PAIRS_PICTURE, SAMPLES_PICTURE
from fedstill.report.panels import Panel
from fedstill.report.runs import Runs
from fedstill.storage.files import leads_out, read_bytes

MOST_BYTES = 600_000  # of a picture
PNG = b"\x89PNG\r\n\x1a\n"


def panel(runs: Runs) -> Panel | None:
    for method, each in runs.by_method.items():
        for run in each:
            if text := run.files["generated.json"].get("text"):
                alts = {
                    SAMPLES_PICTURE: f"Samples that the generator of {method} invented, by class.",
                    PAIRS_PICTURE: "The invented samples that are nearest to training samples, beside these.",
                }
                shown = {name: content for name in alts if (content := _png(run.folder / name))}
                pictures = [(content, alts[name]) for name, content in shown.items()]
                lines = [line for line in str(text).splitlines() if line.strip()]
                if PAIRS_PICTURE in shown:
                    lines.append("The last picture shows training samples. Think of this before you send the page on.")
                return Panel("What the server invents", [f"{method}, seed {run.seed}.", *lines], pictures=pictures)
    return None


def _png(path: Path) -> bytes:
    """Return a picture's content; empty where it is missing, too large, or none."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES or leads_out(path):
            return b""
        content = read_bytes(path)
    except OSError:
        return b""
    return content if content.startswith(PNG) else b""
