"""Who holds what: clients by classes, their sizes, and how skewed that is beside known splits."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from fedstill.core.errors import FedstillError
from fedstill.partition import PARTITIONS, class_counts, describe
from fedstill.report.charts import Chart, bars, heat_map, plain_names, thin
from fedstill.report.panels import Panel, Table
from fedstill.report.partition import COUNTS_FILE
from fedstill.report.runs import Run, Runs, list_of, number

MOST_CLIENTS, MOST_CLASSES = 60, 50  # in a picture
ALPHAS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 100.0)
MOST_LABELS, MOST_PARTIES = 20_000, 200  # of the splits that are drawn for comparison
BINS = 20


def panel(runs: Runs) -> Panel | None:
    counts = counts_of(runs.first)
    if counts is None:
        return None
    run, sizes = runs.first, counts.sum(axis=1)
    names = [str(name) for name in list_of(run.files[COUNTS_FILE].get("names"))]
    names = names if len(names) == len(counts) else [str(place) for place in range(len(counts))]
    order = np.argsort(-sizes, kind="stable")
    clients = [int(order[place]) for place in thin(range(len(order)), MOST_CLIENTS)]
    kinds = thin(range(counts.shape[1]), MOST_CLASSES)
    labels = plain_names(run.classes if len(run.classes) == counts.shape[1] else map(str, range(counts.shape[1])), 20)
    shown = plain_names([names[client] for client in clients], 16)
    shares = 100 * counts / np.maximum(sizes[:, None], 1)
    skew = describe(counts)
    kind = "client" if names[0] == "0" else "party"
    cells = [(shown[place], labels[c], float(shares[client, c])) for place, client in enumerate(clients) for c in kinds]
    about = f"{len(clients)} of {len(counts):,} clients" if len(clients) < len(counts) else f"{len(counts)} clients"
    chart = heat_map(
        cells,
        columns=shown,
        rows=[labels[c] for c in kinds],
        x=f"{kind}, the largest first",
        y="class",
        value=f"share of the {kind}'s rows (%)",
        title=f"Classes of the rows of {about}",
    )
    sentences = [
        f"{len(counts):,} clients hold {int(sizes.sum()):,} rows of {counts.shape[1]} classes. The smallest client has "
        f"{int(sizes.min()):,} rows, the median {np.median(sizes):,.0f}, the largest {int(sizes.max()):,}.",
        f"A client has rows of {skew['classes_present']:.1f} classes on average, and its most frequent class is "
        f"{100 * skew['top_class_share']:.0f} % of its rows.",
        *_like(counts.tobytes(), counts.shape[1], skew["total_variation"]),
    ]
    if len({run.split for run in runs.all}) > 1:
        sentences.append(f"This is the split {run.split}; other runs have other splits.")
    if len(runs.all) > 1 and len({run.seed for run in runs.all}) > 1:
        sentences.append(f"This is the split of seed {run.seed}; other seeds split anew.")
    population = number(run.files[COUNTS_FILE].get("clients"))
    if population is not None and population > len(counts):
        sentences.append(
            f"These are the first {len(counts):,} of {population:,.0f} clients, as many as the file holds."
        )
    if len(clients) < len(counts) or len(kinds) < counts.shape[1]:
        sentences.append(f"The heat map shows {about} and {len(kinds)} classes, evenly spaced in their order.")
    rows = [(words, form.format(skew[key])) for key, words, form in MEASURES]
    charts = [chart, _sizes(sizes, names, order, kind)]
    return Panel("Who holds what", sentences, charts, Table(("measure", "value"), rows, SKEW))


SKEW = "Measures of the split. Distances and the Gini coefficient go from 0 (all alike) to 1."
MEASURES = (
    ("label_entropy", "label entropy of a client, 0 (one class) to 1 (all classes alike)", "{:.3f}"),
    ("total_variation", "distance of the class shares of two clients (total variation)", "{:.3f}"),
    ("hellinger", "distance of the class shares of two clients (Hellinger)", "{:.3f}"),
    ("top_class_share", "share of a client's most frequent class", "{:.3f}"),
    ("size_gini", "Gini coefficient of the sizes", "{:.3f}"),
)


def counts_of(run: Run) -> np.ndarray | None:
    """Return a run's class counts (clients, classes); None where its partition.json has no such numbers."""
    rows = list_of(run.files[COUNTS_FILE].get("counts"))
    try:
        counts = np.array(rows, dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        return None
    usable = counts.ndim == 2 and counts.size > 0 and counts.min() >= 0 and counts.max() < 2**40 and counts.sum() > 0
    return counts if usable else None


def _sizes(sizes: np.ndarray, names: list[str], order: np.ndarray, kind: str) -> Chart:
    if len(sizes) <= MOST_CLIENTS:
        return bars(
            [(names[client], float(sizes[client])) for client in order],
            x=f"{kind}, the largest first",
            y="rows",
            alt=f"Bars: the rows of each of {len(sizes)} clients, from {sizes.max():,} to {sizes.min():,}.",
        )
    heights, edges = np.histogram(sizes, bins=BINS)
    spans = [f"{low:,.0f} to {high:,.0f}" for low, high in pairwise(edges)]
    return bars(
        list(zip(spans, heights.astype(float).tolist(), strict=True)),
        x="rows of a client",
        y="clients",
        alt=f"Histogram: how many of {len(sizes):,} clients have how many rows.",
    )


@lru_cache(maxsize=4)  # a live page asks again and again
def _like(content: bytes, classes: int, distance: float) -> list[str]:
    """Say which Dirichlet split of the same classes over as many clients has the nearest distance between clients.

    content: the class counts (clients, classes), as bytes of int64.
    """
    counts = np.frombuffer(content, dtype=np.int64).reshape(-1, classes)
    clients = min(len(counts), MOST_PARTIES)
    if clients < 2 or classes < 2:
        return []
    totals = counts.sum(axis=0) / counts.sum()
    labels = np.repeat(np.arange(classes), np.maximum(1, (totals * min(counts.sum(), MOST_LABELS)).astype(int)))
    distances = {}
    for alpha in ALPHAS:
        try:
            parts = PARTITIONS["lda"](labels, clients, seed=0, alpha=alpha, min_size=0)
        except FedstillError:
            continue
        distances[alpha] = describe(class_counts(parts, labels, classes))["total_variation"]
    if not distances:
        return []
    nearest = min(distances, key=lambda alpha: abs(distances[alpha] - distance))
    return [
        f"In labels this is like LDA {nearest:g}: the class shares of two clients differ by "
        f"{distance:.2f} on average (total variation), and by {distances[nearest]:.2f} in a Dirichlet "
        f"split with alpha = {nearest:g}, the nearest of {len(ALPHAS)}."
    ]
