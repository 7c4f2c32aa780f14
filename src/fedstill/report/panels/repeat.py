"""How to repeat it: the experiment file, the command, and the versions that were used."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedstill.report import counted
from fedstill.report.panels import Panel
from fedstill.report.runs import CONFIG_FILE, Runs, table_of
from fedstill.storage.files import leads_out, read_text

MOST_FILES = 3  # experiment files on the page
LONGEST = 20_000  # letters of one of them


def panel(runs: Runs) -> Panel:
    texts = []
    for folder in runs.folders[:MOST_FILES]:
        compared = folder not in {run.folder for run in runs.all}
        command = f"fedstill {'compare' if compared else 'run'} {CONFIG_FILE} --out again"
        file = _file(folder / CONFIG_FILE)
        if file is not None:
            texts.append((f"Save the file below as {CONFIG_FILE}, and run it into a new folder:", command))
            texts.append((f"{CONFIG_FILE} of '{folder.name}', with every default:", file))
    sentences = []
    env = runs.first.files["env.json"]
    packages = table_of(env.get("packages"))
    device = table_of(env.get("device"))
    if packages:
        versions = ", ".join(f"{name} {packages[name]}" for name in ("fedstill", "torch", "numpy") if name in packages)
        place = f" on {device.get('name')} ({device.get('kind')})" if device else ""
        sentences.append(f"Made with {versions}, Python {env.get('python')}{place}.")
    if commit := env.get("git_commit"):
        sentences.append(f"Git commit of the working folder: {commit}.")
    if len(runs.folders) > MOST_FILES:
        more = len(runs.folders) - MOST_FILES
        sentences.append(f"{counted(more, 'more folder')} have an experiment file of their own ({CONFIG_FILE}).")
    if len(texts) < 2 * len(runs.folders[:MOST_FILES]):
        sentences.append(f"The {CONFIG_FILE} of a folder is missing or damaged, so nobody can say how to repeat it.")
    seeds = sorted({run.seed for run in runs.all})
    sentences.append(f"Seeds: {', '.join(map(str, seeds[:20]))}. A run on a CPU gives the same numbers again.")
    return Panel("How to repeat it", sentences, texts=texts)


def _file(path: Path) -> str | None:
    """Return an experiment file as it is; None where it is missing, damaged, elsewhere, or too long for a page."""
    try:
        if leads_out(path):
            return None
        text = read_text(path)
        tomllib.loads(text)
    except (OSError, ValueError):
        return None
    return text if len(text) <= LONGEST else None
