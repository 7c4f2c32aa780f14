"""Write a first experiment file for data that somebody has: a network and rates by kind and size of the data.

The numbers are starting points, and each has a comment in the file. `fedstill init` is the command.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.data.inspect import Findings, inspect_data
from fedstill.data.load import is_embedded
from fedstill.experiment.build import build_federation, load_source
from fedstill.experiment.config import Experiment
from fedstill.storage import toml
from fedstill.storage.files import write_whole
from fedstill.storage.toml import toml_value

SIDES = (8, 16, 32, 64)  # of images; larger ones are resized, because a first run shall take minutes
PARTIES = 5  # that a run plays where nobody owns the rows
LARGEST_COHORT = 20
STEPS = 20  # that a client of few rows makes in a round, by more epochs
MOST_EPOCHS = 10
MOST_REFERENCES = 20  # clients that a first run trains alone, for comparison
LARGE = {
    "table": 100_000,
    "images": 20_000,
    "texts": 20_000,
}  # from here on a first run has less work and no references
LONGEST_TEXT = 128  # tokens
PIECES_OF_A_WORD = 1.3  # tokens a word, about

Local = Mapping[str, int | float | str]


def write_starter(
    data: str, *, owner: str | None = None, label: str | None = None, out: Path | None = None
) -> list[str]:
    """Inspect data, write an experiment file for them, and return the lines that `fedstill init` prints.

    The experiment is built once before the file is written, so that data which cannot be read are refused here.
    """
    findings = inspect_data(data, label=label, owner=owner)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).expanduser().resolve().stem).strip("-._") or "experiment"
    file = Path(f"{stem}.toml") if out is None else out
    if file.exists():
        raise FedstillError(f"--out: '{file}' exists already: give another name, or remove it")
    text = starter_text(findings, name=stem, population=1)
    source = load_source(experiment := Experiment.model_validate(toml.loads(text)))
    population = build_federation(experiment, source).population
    try:
        write_whole(file, starter_text(findings, name=stem, population=population))
    except OSError as error:
        raise FedstillError(f"--out: cannot write '{file}' ({error.strerror or error}): give another place") from error
    return [*findings.lines(), *source.notes, f"wrote {file}; run it with: fedstill run {file}"]


def starter_text(findings: Findings, *, name: str, population: int) -> str:
    """Return the experiment file; `population` is the number of clients that hold rows."""
    write = {"table": _for_table, "images": _for_images, "texts": _for_texts}[findings.kind]
    reading, network, local = write(findings)
    rows_each = 0.8 * findings.rows / population  # a fifth is the test set
    large = findings.rows > LARGE[findings.kind]
    batch, fewest = int(local["batch_size"]), 1 if large else 2
    epochs = max(fewest, min(MOST_EPOCHS, math.ceil(STEPS * batch / rows_each)))
    rounds = 20 if not large else 5 if findings.kind == "table" else 10
    cohort = min(population, LARGEST_COHORT)
    lines = [
        f"# Written by `fedstill init` after a look at {findings.rows:,} rows. All keys: docs/experiment-file.md.",
        f"name = {toml_value(name)}",
        f"rounds = {rounds}",
        f"cohort = {cohort} # clients in each round; there are {population}",
        "",
        "[data]",
        f"source = {toml_value(_as_source(findings.place))} # counts from the folder in which you call fedstill",
        f"label = {toml_value(findings.label)}",
        *reading,
        "",
        "[partition]",
        *_partition(findings),
        "",
        "[model]",
        *network,
        "",
        "[local]",
        f"epochs = {epochs} # about {math.ceil(epochs * rows_each / batch)} steps a round",
        *(f"{key} = {toml_value(value)}" for key, value in local.items()),
        "",
        "[method]",
        'name = "fedavg" # compare methods on the same data: fedstill compare FILE --methods fedavg,fedprox,fedntd',
        "",
        "[compare]",
        f"references = {toml_value(not large and population <= MOST_REFERENCES)} "
        "# also measure the majority class, each client alone and all data pooled",
    ]
    return "\n".join(lines) + "\n"


def _as_source(place: str) -> str:
    """Return a path that cannot be taken for an embedded set."""
    return f"./{place}" if is_embedded(place) else place


def _partition(findings: Findings) -> list[str]:
    if findings.owner:
        return [
            'scheme = "natural" # each owner is a client',
            f"keys = [{toml_value(findings.owner)}]",
            "clients = 0 # all owners",
        ]
    return [
        'scheme = "lda" # nobody owns the rows, so a draw shares them out; fedstill init --owner COLUMN names owners',
        f"clients = {PARTIES}",
        "alpha = 1.0 # a smaller number makes the clients' classes differ more",
    ]


def _dropped(findings: Findings) -> list[str]:
    """Return data.drop with the reason for each column."""
    if not findings.dropped:
        return []
    reasons = [f"  {toml_value(column.name)}, # {_comment(column.reason)}" for column in findings.dropped]
    return ["drop = [ # remove a line to learn from that column", *reasons, "]"]


def _comment(text: str) -> str:
    return " ".join(text.split())


def _for_table(findings: Findings) -> tuple[list[str], list[str], Local]:
    rows = findings.rows
    reading = _dropped(findings)
    gaps = f"{findings.gaps:,} cells have no value: " if findings.gaps else "of cells without a value: "
    reading += [
        f'missing = "mean" # {gaps}numbers get the mean of the train rows and a 0/1 flag, words "(missing)"',
        'unknown = "zeros" # words that the train rows do not have count as no word',
    ]
    hidden = [] if rows < 500 else [32] if rows < 20_000 else [64, 32]
    about = "no hidden layer: logistic regression, enough for few rows" if not hidden else "small, because the data are"
    if rows > LARGE["table"]:
        about = "two hidden layers"
    batch = 16 if rows <= 5000 else 64 if rows <= LARGE["table"] else 256
    network = ['name = "mlp"', f"hidden = {hidden} # {about}"]
    return reading, network, {"batch_size": batch, "lr": 0.02, "momentum": 0.9}


def _for_images(findings: Findings) -> tuple[list[str], list[str], Local]:
    sizes = np.array(list(findings.sizes))
    side = int(np.median(np.repeat(sizes.min(axis=1), list(findings.sizes.values()))))
    reading = []
    if len(findings.sizes) > 1 or side > SIDES[-1]:
        chosen = max([size for size in SIDES if size <= side], default=SIDES[0])
        low, high = sizes.min(), sizes.max()
        reading.append(f"size = {chosen} # sides are {low} to {high} pixels; all images become {chosen} x {chosen}")
    if findings.broken or findings.incomplete:
        reasons = [f"{len(findings.broken)} files cannot be read"] if findings.broken else []
        reasons += [f"{findings.incomplete:,} have no label or no owner"] if findings.incomplete else []
        reading.append(f'missing = "skip" # {" and ".join(reasons)}: they are left out')
    batch = 16 if findings.rows <= 5000 else 64
    return reading, ['name = "cnn" # two convolutions'], {"batch_size": batch, "lr": 0.02, "momentum": 0.9}


def _for_texts(findings: Findings) -> tuple[list[str], list[str], Local]:
    length = min(LONGEST_TEXT, max(16, 8 * round((findings.text_words * PIECES_OF_A_WORD + 2) / 8 + 0.5)))
    reading = []
    if findings.columns:
        column = next(column for column in findings.columns if column.use == "input")
        reading.append(f"inputs = [{toml_value(column.name)}] # the column of text")
    if findings.broken or findings.gaps:
        count = len(findings.broken) + findings.gaps
        reading.append(f'missing = "skip" # {count} texts are empty or cannot be read and are left out')
    reading += [
        f"tokens = {length} # of each text; 95 % of them have at most {findings.text_words} words",
        "vocabulary = 4096",
    ]
    small = ["layers = 1", "hidden = 64", "heads = 2", "inner = 128", 'pool = "mean"']
    network = ['name = "bert" # a small one, trained from nothing', *small]
    return reading, network, {"batch_size": 16 if findings.rows <= 5000 else 64, "optimizer": "adam", "lr": 0.002}
