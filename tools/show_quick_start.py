"""Put the outcome of the quick start into the documentation: its table and two of its pictures, made smaller.

    make run
    python tools/show_quick_start.py runs/quickstart/<utc>-<hash>

The table carries a fingerprint of quickstart.toml, so that a test notices when the experiment has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from fedstill import Experiment
from fedstill.experiment.config import quickstart_table
from fedstill.experiment.run_folder import read_description
from fedstill.report.table import MethodSummary, plain_table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
WIDTHS = {"curves.png": 1200, "partition.png": 1800}
SHOWN = re.compile(r"<!-- quick start (\w+), renewed by tools/show_quick_start.py -->\n```text\n(.*?)```", re.DOTALL)


def fingerprint() -> str:
    """Return a digest of the keys and values of quickstart.toml, without its comments."""
    return hashlib.sha256(json.dumps(quickstart_table(), sort_keys=True).encode()).hexdigest()[:8]


def table(results: dict[str, Any]) -> str:
    """Return the table that `fedstill compare` printed."""
    return plain_table([MethodSummary.from_json(row) for row in results["methods"]])


def shrink(source: Path, target: Path, width: int) -> None:
    """Save a picture with at most `width` pixels a row and 256 colours, because that takes a tenth of the bytes."""
    from PIL import Image

    picture = Image.open(source).convert("RGB")
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder that `make run` named")
    folder = parser.parse_args().folder
    if read_description(folder).resolved() != Experiment.quickstart().resolved():
        sys.exit(f"{folder} is not a run of the present quickstart.toml: make run")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    block = (
        f"<!-- quick start {fingerprint()}, renewed by tools/show_quick_start.py -->\n```text\n{table(results)}\n```"
    )
    for page in PAGES:
        text, count = SHOWN.subn(lambda _: block, page.read_text(encoding="utf-8"))
        if count != 1:
            sys.exit(f"{page}: expected one table of the quick start, found {count}")
        page.write_text(text, encoding="utf-8")
    for name, width in WIDTHS.items():
        shrink(folder / name, ROOT / "docs" / "images" / name, width)


if __name__ == "__main__":
    main()
