"""Results by party, with names: the federated model beside the model that the party trains alone and the pooled one."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any

from fedstill.report.charts import dots
from fedstill.report.panels import Panel, Table
from fedstill.report.panels.holdings import counts_of
from fedstill.report.partition import COUNTS_FILE
from fedstill.report.runs import Run, Runs, list_of, number, table_of
from fedstill.report.statistics import listed

MODELS = ("federated", "pooled", "alone")
MOST = 40  # parties in the picture and in the table: the worst and the best


def panel(runs: Runs) -> Panel | None:
    tables = {method: [run.files["parties.json"] for run in each] for method, each in runs.by_method.items()}
    method = next((method for method, each in tables.items() if any(each)), None)
    if method is None:
        return None
    lines, each = parties_of(tables[method]), runs.by_method[method]
    tested = sorted((line for line in lines if "federated" in line[1]), key=lambda line: line[1]["federated"])
    if not tested:
        return None
    gains = [numbers["federated"] - numbers["alone"] for _, numbers in tested if "alone" in numbers]
    sentences = [
        f"Accuracy with {method} on the rows that each party holds back for a test. Nobody trains on these rows."
    ]
    if gains:
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        sentences.append(
            f"The federated model is better than the model that a party trains alone for {better} of {len(gains)} "
            f"parties, worse for {worse}, and equal for {len(gains) - better - worse}."
        )
    few = min((numbers["test rows"] for _, numbers in tested if "test rows" in numbers), default=0)
    if 0 < few < 100:
        sentences.append(f"A party has as few as {few:.0f} test rows: there one row is {100 / few:.1f} points.")
    if single := _of_one_class(runs.by_method[method][0], {name for name, _ in tested}):
        whose = (
            "has rows of one class only, so its accuracy says"
            if len(single) == 1
            else ("have rows of one class only, so their accuracies say")
        )
        sentences.append(f"{listed(single)} {whose} nothing about the other classes.")
    if len(each) > 1:
        sentences.append(f"Numbers are means over {len(each)} seeds.")
    shown = tested
    if len(tested) > MOST:
        shown = [*tested[: MOST // 2], *tested[-MOST // 2 :]]
        sentences.append(f"Shown are the {MOST // 2} worst and the {MOST // 2} best of {len(tested):,} parties.")
    kinds = [model for model in MODELS if any(model in numbers for _, numbers in tested)]
    scaled = [(name, {model: 100 * numbers[model] for model in kinds if model in numbers}) for name, numbers in shown]
    chart = dots(
        list(reversed(scaled)),
        kinds=kinds,
        x="accuracy (%)",
        y="party",
        alt=f"Dots: the accuracy of {len(shown)} parties with {', '.join(kinds)} models; numbers in the table below.",
    )
    head = ["party", *[name for name in ("rows", "test rows") if any(name in numbers for _, numbers in shown)]]
    head += [f"{model} %" for model in kinds] + (["gain, points"] if gains else [])
    rows = []
    for name, numbers in shown:
        sizes = [f"{numbers[key]:,.0f}" if key in numbers else "" for key in ("rows", "test rows") if key in head]
        cells = [f"{100 * numbers[model]:.1f}" if model in numbers else "none" for model in kinds]
        if gains:
            cells.append(f"{100 * (numbers['federated'] - numbers['alone']):+.1f}" if "alone" in numbers else "none")
        rows.append((name, *sizes, *cells))
    caption = "Parties, the lowest accuracy first. Gain: federated minus alone."
    return Panel("Party by party", sentences, [chart], Table(head, rows, caption))


def _of_one_class(run: Run, parties: Collection[str]) -> list[str]:
    """Return those of the parties whose training rows are all of one class."""
    counts, names = counts_of(run), [str(name) for name in list_of(run.files[COUNTS_FILE].get("names"))]
    if counts is None or len(names) != len(counts):
        return []
    classes = (counts > 0).sum(axis=1)
    return [name for name, count in zip(names, classes.tolist(), strict=True) if count == 1 and name in parties]


def parties_of(tables: list[Mapping[str, Any]]) -> list[tuple[str, dict[str, float]]]:
    """Return each party's name and numbers, the means over the seeds."""
    parties: dict[str, dict[str, list[float]]] = {}
    for table in tables:
        for line in map(table_of, list_of(table.get("parties"))):
            if "name" in line:
                party = parties.setdefault(str(line["name"]), {})
                for key in ("rows", "test_rows", *MODELS):
                    if (value := number(line.get(key))) is not None:
                        party.setdefault(key.replace("_", " "), []).append(value)
    return [(name, {key: statistics.fmean(values) for key, values in party.items()}) for name, party in parties.items()]
