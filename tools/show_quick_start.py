"""Put the outcome of the quick start into the documentation: its table, and sections of its report as pictures.

    make run
    python tools/show_quick_start.py runs/quickstart/<utc>-<hash>

Pictures need chromium, chromedriver and selenium. The table carries a fingerprint of quickstart.toml, so that a test
notices when the experiment has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedstill import Experiment
from fedstill.experiment.config import quickstart_table
from fedstill.experiment.run_folder import read_description
from fedstill.report.page import write_report
from fedstill.report.table import MethodSummary, plain_table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
SECTIONS = {"report.png": ("answer", "curves"), "report_curves.png": ("curves",), "report_holdings.png": ("holdings",)}
SHOWN = re.compile(r"<!-- quick start (\w+), renewed by tools/show_quick_start.py -->\n```text\n(.*?)```", re.DOTALL)


def fingerprint() -> str:
    """Return a digest of the keys and values of quickstart.toml, without its comments."""
    return hashlib.sha256(json.dumps(quickstart_table(), sort_keys=True).encode()).hexdigest()[:8]


def table(results: dict[str, Any]) -> str:
    """Return the table that `fedstill compare` printed."""
    return plain_table([MethodSummary.from_json(row) for row in results["methods"]])


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
    draw = runpy.run_path(str(ROOT / "tools" / "picture_of_report.py"))["main"]
    with tempfile.TemporaryDirectory() as temporary:
        page = write_report([folder], Path(temporary) / "report.html")
        for name, sections in SECTIONS.items():
            draw(page, ROOT / "docs" / "images" / name, *sections)


if __name__ == "__main__":
    main()
