"""Results for each party: a table with their names, the worst and the best tenth of them, and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation
from fedstill.loop.history import Result
from fedstill.report import COLOURS, drawn, new_figure, quiet, shortened
from fedstill.report.table import align
from fedstill.storage.files import write_whole
from fedstill.storage.spreadsheet import as_cell

CSV_FILE, JSON_FILE, PICTURE_FILE = "parties.csv", "parties.json", "parties.png"
MODELS = ("federated", "pooled", "alone")
SHOWN = 5  # parties at each end of the list in a terminal
MOST_NAMES = 60  # in a picture
LONGEST_NAME = 32


class Party(NamedTuple):
    """One party: its rows, and the accuracy of each model on the test rows that it holds back.

    None stands for an accuracy that nobody measured.
    """

    name: str
    rows: int  # to train on
    test_rows: int
    federated: float | None = None
    pooled: float | None = None
    alone: float | None = None

    @property
    def gain(self) -> float | None:
        """By how much the federated model is better than the model that the party trained alone."""
        return None if self.federated is None or self.alone is None else self.federated - self.alone


def party_table(federation: Federation, accuracy: Mapping[str, Sequence[float | None]]) -> list[Party]:
    """Return one line for each party, the lowest accuracy of the federated model first, parties without one last.

    accuracy: for "federated" and, where there are such models, for "pooled" and "alone": the accuracy on each party's
        test rows in the order of the parties (`loop.evaluate.accuracy_by_party` measures it).
    """
    if federation.client_test is None:
        raise FedstillError("no party holds back test rows: set data.client_test_share, e.g. 0.2")
    population = federation.population
    none = [None] * population
    lines = zip(
        federation.names or [f"client {number}" for number in range(population)],
        federation.offsets.diff().tolist(),
        federation.client_test[1].diff().tolist(),
        *(accuracy.get(model) or none for model in MODELS),
        strict=True,
    )
    return sorted(
        (Party(*line) for line in lines), key=lambda party: (party.federated is None, party.federated, party.name)
    )


def parties_of(federation: Federation, result: Result) -> list[Party]:
    """Return the table of a run, with the pooled and the own models where the run has reference points.

    The table is empty where no party holds back test rows.
    """
    accuracy = {"federated": result.party_accuracy}
    if result.references is not None:
        accuracy |= {"pooled": result.references.pooled_by_party, "alone": result.references.alone_by_party}
    return party_table(federation, accuracy) if result.party_accuracy else []


def summary(parties: Sequence[Party]) -> dict[str, Any]:
    """Return mean, worst and best tenth (the mean over a tenth of the parties, at least one) of each column.

    "better_off" counts the parties that gain by federation, "worse_off" the parties that lose.
    """
    facts: dict[str, Any] = {"parties": len(parties)}
    for column in (*MODELS, "gain"):
        values = sorted(value for party in parties if (value := getattr(party, column)) is not None)
        if values:
            tenth = math.ceil(len(values) / 10)
            facts[column] = {
                "parties": len(values),
                "mean": statistics.fmean(values),
                "worst_decile": statistics.fmean(values[:tenth]),
                "best_decile": statistics.fmean(values[-tenth:]),
            }
    gains = [party.gain for party in parties if party.gain is not None]
    if gains:
        facts |= {"better_off": sum(gain > 0 for gain in gains), "worse_off": sum(gain < 0 for gain in gains)}
    return facts


def write_parties(parties: Sequence[Party], folder: Path) -> None:
    """Write parties.csv (one line for each party) and parties.json (the same, and the summary)."""
    lines = [{**party._asdict(), "gain": party.gain} for party in parties]
    text = io.StringIO()
    table = csv.DictWriter(text, (*Party._fields, "gain"), lineterminator="\n")
    table.writeheader()
    table.writerows({**line, "name": as_cell(str(line["name"]))} for line in lines)
    write_whole(folder / CSV_FILE, text.getvalue())
    tree = {"summary": summary(parties), "parties": lines}
    write_whole(folder / JSON_FILE, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")


def party_text(parties: Sequence[Party]) -> str:
    """Return the summary in a line, and the worst and the best parties as a table."""
    facts, tested = summary(parties), [party for party in parties if party.federated is not None]
    if not tested:
        return "No party has rows enough to hold back one for a test."
    tenths = [f"{100 * facts['federated'][key]:.2f} %" for key in ("mean", "worst_decile", "best_decile")]
    head = f"Parties: {len(tested):,}. Accuracy on their own test rows: mean {tenths[0]}, "
    head += f"worst tenth {tenths[1]}, best tenth {tenths[2]}."
    if "gain" in facts:
        head += f" Better off than alone: {facts['better_off']}, worse off: {facts['worse_off']}."
    columns = [model for model in (*MODELS, "gain") if model in facts]
    cut = len(tested) > 2 * SHOWN + 1
    shown = [*tested[:SHOWN], None, *tested[-SHOWN:]] if cut else tested
    rows = [("party", "rows", "test rows", *(f"{column} %" for column in columns))]
    for party in shown:
        if party is None:
            rows.append((f"... {len(tested) - 2 * SHOWN} more", "", "", *("" for _ in columns)))
            continue
        numbers = [getattr(party, column) for column in columns]
        cells = ["" if number is None else f"{100 * number:.2f}" for number in numbers]
        rows.append((shortened(party.name, LONGEST_NAME), f"{party.rows:,}", f"{party.test_rows:,}", *cells))
    return f"{head}\n{align(rows)}"


def party_picture(parties: Sequence[Party], path: Path, *, title: str) -> Path:
    """Draw the accuracy of each party as a dot, one colour for each model, the best party at the top."""
    tested = [party for party in parties if party.federated is not None]
    if not tested:
        raise FedstillError(f"cannot draw {path.name}: no party has test rows")
    named = len(tested) <= MOST_NAMES
    figure = new_figure(8.0, 1.6 + 0.2 * len(tested) if named else 6.0, title)
    axes = figure.subplots()
    percent = {
        model: {
            place: 100 * value for place, party in enumerate(tested) if (value := getattr(party, model)) is not None
        }
        for model in MODELS
    }
    both = [place for place in percent["federated"] if place in percent["alone"]]
    alone, federated = ([percent[model][place] for place in both] for model in ("alone", "federated"))
    axes.hlines(both, alone, federated, colors="0.8", zorder=1)
    # the first is filled and small, the others are rings around it, because equal accuracies lie on one point
    for (model, values), colour, (marker, size) in zip(
        percent.items(), COLOURS, (("o", 20), ("s", 60), ("D", 120)), strict=False
    ):
        if values:
            look: dict[str, Any] = {
                "s": size if named else size / 4,
                "marker": marker,
                "edgecolors": colour,
                "label": model,
            }
            axes.scatter([*values.values()], [*values], facecolors=colour if marker == "o" else "none", **look)
    names = [drawn(shortened(party.name, LONGEST_NAME)) for party in tested] if named else []
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel("" if named else f"{len(tested):,} parties, the worst at the bottom")
    axes.set_xlabel("accuracy on the party's own test rows (%)")
    axes.set_ylim(-0.8, len(tested) - 0.2)
    quiet(axes, "x")
    if percent["pooled"] or percent["alone"]:
        axes.legend(frameon=False, loc="best")
    figure.savefig(path)
    return path
