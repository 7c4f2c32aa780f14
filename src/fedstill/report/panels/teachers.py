"""Who teaches: how much each client's model counts where a server weighs the models that it distils."""

from __future__ import annotations

import statistics

from fedstill.report.charts import Chart, bars, thin
from fedstill.report.panels import Panel, Table
from fedstill.report.panels.holdings import counts_of
from fedstill.report.partition import COUNTS_FILE
from fedstill.report.runs import Run, Runs, list_of, number, table_of

KEY = "teacher_weights"  # of a round: client -> share
MOST_METHODS, MOST_CLIENTS, MOST_ROWS = 4, 60, 20


def panel(runs: Runs) -> Panel | None:
    charts: list[Chart] = []
    sentences: list[str] = []
    table: Table | None = None
    for method, each in runs.by_method.items():
        run = each[0]
        weights = sorted(weights_of(run).items(), key=lambda pair: -statistics.fmean(pair[1]))
        if not weights or len(charts) == MOST_METHODS:
            continue
        lines = [(_name(run, client), statistics.fmean(shares), len(shares)) for client, shares in weights]
        (first, most, _), (last, least, _) = lines[0], lines[-1]
        sentences.append(f"{method}: {first} counts most, {most:.2f} times an equal share; {last} least, {least:.2f}.")
        shown = thin(lines, MOST_CLIENTS)
        if len(shown) < len(lines):
            sentences.append(f"The bars show {len(shown)} of {len(lines):,} clients, evenly spaced in their order.")
        charts.append(
            bars(
                [(name, weight) for name, weight, _ in shown],
                x=f"{method}: client, the heaviest teacher first",
                y="weight (1: equal share)",
                alt=f"Bars: the weight of each client's model with {method}, from {most:.2f} to {least:.2f}.",
            )
        )
        if table is None:
            clients = [client for client, _ in weights]
            table = _table(run, method, list(zip(clients, lines, strict=True)))
    if not charts:
        return None
    before = [
        "The server weighs the models that it distils. A weight is the mean over the unlabeled rows and over the "
        "rounds in which a client took part; 1 is an equal share of its round."
    ]
    if any(len(each) > 1 for each in runs.by_method.values()):
        before.append(f"These are the weights of seed {runs.first.seed}; other seeds split anew.")
    return Panel("Who teaches", [*before, *sentences], charts, table)


def weights_of(run: Run) -> dict[int, list[float]]:
    """Return each client's weights, one for each of its rounds, in units of an equal share of the round."""
    weights: dict[int, list[float]] = {}
    for row in run.rows:
        shares = {str(client): number(share) for client, share in table_of(row.get(KEY)).items()}
        known = {int(client): share for client, share in shares.items() if client.isdecimal() and share is not None}
        for client, share in known.items():
            weights.setdefault(client, []).append(share * len(known))
    return weights


def _name(run: Run, client: int) -> str:
    names = list_of(run.files[COUNTS_FILE].get("names"))
    return str(names[client]) if client < len(names) else f"client {client}"


def _table(run: Run, method: str, lines: list[tuple[int, tuple[str, float, int]]]) -> Table:
    counts = counts_of(run)
    few = lines if len(lines) <= MOST_ROWS else [*lines[: MOST_ROWS // 2], *lines[-MOST_ROWS // 2 :]]
    rows = []
    for client, (name, weight, rounds) in few:
        held = ("", "")
        if counts is not None and client < len(counts):
            held = f"{counts[client].sum():,}", str((counts[client] > 0).sum())
        rows.append((name, f"{weight:.2f}", str(rounds), *held))
    about = "" if len(few) == len(lines) else f" The {MOST_ROWS // 2} heaviest and the {MOST_ROWS // 2} lightest."
    return Table(("client", "weight", "rounds", "rows", "classes"), rows, f"Teachers of {method}.{about}")
