"""Numbers for Prometheus at both ends: a text file that the node exporter's textfile collector reads.

A file needs no package, no open port and no thread, and a site opens no port at all. So there is no extra to install.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fedstill.deploy.folder import Deployment
from fedstill.loop.callbacks import Callback, RunInfo
from fedstill.loop.history import Row
from fedstill.population.remote import Transport
from fedstill.population.wire import unseal
from fedstill.storage.files import writing

Labels = tuple[tuple[str, str], ...]
METRICS_FILE = "metrics.prom"


class Measure(NamedTuple):
    """One metric: its name, kind, what it says, and its values by labels."""

    name: str
    kind: str  # counter or gauge
    help: str
    values: Mapping[Labels, float]


def write_metrics(path: Path, measures: list[Measure], **labels: str) -> None:
    """Write metrics in Prometheus' text format, whole or not at all. labels: of every value."""
    lines = []
    for measure in measures:
        lines += [f"# HELP {measure.name} {measure.help}", f"# TYPE {measure.name} {measure.kind}"]
        for value_labels, value in measure.values.items():
            shown = ",".join(f'{name}="{_escaped(word)}"' for name, word in (*labels.items(), *value_labels))
            lines.append(f"{measure.name}{{{shown}}} {float(value)!r}")
    with writing(path, durable=False) as file:
        file.write(("\n".join(lines) + "\n").encode())


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass
class _Heard:
    """What the server has of one site since it started."""

    answers: int = 0
    failures: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    last: float = 0.0


@dataclass
class ServerMetrics(Callback):
    """Writes metrics.prom into the run's folder after each round: the round, its accuracy, and each site's answers."""

    folder: Path
    deployment: Deployment
    rounds: int = 0
    sites: dict[str, _Heard] = field(default_factory=dict)

    def heard_over(self, transport: Transport) -> Transport:
        """Return the same transport, whose answers are counted."""
        return _Listening(transport, self)

    def hear(self, name: str, sent: int, answer: bytes | Exception, seconds: float) -> None:
        site = self.sites.setdefault(name, _Heard())
        site.sent += sent
        if isinstance(answer, bytes):
            site.answers, site.last = site.answers + 1, time.time()
            site.received, site.seconds = site.received + len(answer), seconds
        else:
            site.failures += 1

    def on_start(self, info: RunInfo) -> bool | None:
        self.rounds = info.rounds
        return None

    def on_round(self, row: Row) -> bool | None:
        names = sorted(self.sites)

        def each(value: str) -> dict[Labels, float]:
            return {(("site", name),): float(getattr(self.sites[name], value)) for name in names}

        numbers = [("round", row["round"]), ("rounds", self.rounds), ("cohort", row["cohort"])]
        numbers += [("accepted", row["accepted"]), ("accuracy", row.get("accuracy")), ("train_loss", row["train_loss"])]
        about = {
            "round": "the last round that was played", "rounds": "rounds of the whole run",
            "cohort": "sites that the last round asked", "accepted": "uploads that the last round took",
            "accuracy": "of the model after the last evaluated round", "train_loss": "mean of the last round",
        }  # fmt: skip
        shown = {name: value for name, value in numbers if value is not None}
        measures = [Measure(f"fedstill_{name}", "gauge", about[name], {(): value}) for name, value in shown.items()]
        measures += [
            Measure(f"fedstill_site_{name}", kind, words, each(value))
            for name, kind, words, value in (
                ("answers_total", "counter", "answers of a site, refusals among them", "answers"),
                ("failures_total", "counter", "orders that a site could not be asked", "failures"),
                ("sent_bytes_total", "counter", "bytes sent to a site", "sent"),
                ("received_bytes_total", "counter", "bytes received from a site", "received"),
                ("last_answer_seconds", "gauge", "how long its last answer took", "seconds"),
                ("last_answer_timestamp_seconds", "gauge", "when it last answered", "last"),
            )
        ]
        with suppress(OSError):  # a disk without room for it ends no run
            write_metrics(self.folder / METRICS_FILE, measures, run=self.deployment.run)
        return None


class _Listening:
    """Counts what goes to and comes from each client over a transport."""

    def __init__(self, transport: Transport, metrics: ServerMetrics) -> None:
        self.transport, self.metrics = transport, metrics
        self.names = metrics.deployment.names

    def exchange(self, common: bytes, each: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        began = time.monotonic()
        for client, answer in self.transport.exchange(common, each):
            if client in each:
                sent = len(common) + len(each[client])
                self.metrics.hear(self.names[client], sent, answer, time.monotonic() - began)
            yield client, answer


@dataclass
class SiteMetrics:
    """Writes metrics.prom into a site's folder after each answer."""

    path: Path
    run: str
    site: str
    answers: dict[str, int] = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    round: int = 0

    def note(self, order: int, answer: bytes, seconds: float) -> None:
        """Count an answer to an order of so many bytes."""
        kind = str(unseal(answer, limit=len(answer)).facts["kind"])
        self.answers[kind] = self.answers.get(kind, 0) + 1
        self.received, self.sent = self.received + order, self.sent + len(answer)
        kinds: dict[Labels, float] = {(("kind", kind),): float(count) for kind, count in self.answers.items()}
        measures = [
            Measure("fedstill_site_answers_total", "counter", "answers by their kind", kinds),
            Measure("fedstill_site_round", "gauge", "round of the last order that was answered", {(): self.round}),
            Measure("fedstill_site_received_bytes_total", "counter", "bytes of orders", {(): self.received}),
            Measure("fedstill_site_sent_bytes_total", "counter", "bytes that left this site", {(): self.sent}),
            Measure("fedstill_site_last_answer_seconds", "gauge", "how long the last answer took", {(): seconds}),
            Measure("fedstill_site_last_answer_timestamp_seconds", "gauge", "when it was given", {(): time.time()}),
        ]
        write_metrics(self.path, measures, run=self.run, site=self.site)
