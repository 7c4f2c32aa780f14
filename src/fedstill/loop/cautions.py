"""Cautions: lines that a careful colleague would say about a run, each once and with the cure.

`try_objective` refuses mistakes in a method's local terms before its first round. `Cautions` looks at a run before,
during and after training, and warns: in the log 'fedstill.run', in log.txt of the run folder and on stderr.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.groups import part_of, slots_of
from fedstill.core.author_mistakes import check_objective
from fedstill.core.seeds import torch_generator
from fedstill.core.trainer import LocalWork
from fedstill.core.tree import rows as rows_of
from fedstill.core.types import Batch, Dataset, Federation, Local, Model, Phase, Training, Tree
from fedstill.engine.device_data import Feed
from fedstill.loop.guard import AuditRecord
from fedstill.loop.history import History, Row

PATIENCE, PATIENCE_AT_END = 5, 3  # evaluated rounds in a row before a warning about the model's answers
LOSS_RISE, ACCURACY_FALL = 1.25, 0.02  # against the round with the lowest test loss: a factor, and a difference
TRIED_ROWS, PADDED_ROWS = 8, 3  # of the batch on which an objective is tried, and how many of them are padding
LEAST_ROWS = 20  # of a table whose columns are compared with the label
ROWS_AT_ONCE = 65_536
MEASURED_SECONDS = 2.0  # over which the free cores are counted

_log = logging.getLogger("fedstill.run")
_shown_lines: ContextVar[set[str] | None] = ContextVar("shown_lines", default=None)


@contextmanager
def each_once(lines: set[str]) -> Iterator[None]:
    """Leave out `lines`, and add all other lines to them: the runs of a comparison share their data."""
    token = _shown_lines.set(lines)
    try:
        yield
    finally:
        _shown_lines.reset(token)


def caution(line: str) -> None:
    """Warn in the log 'fedstill.run', and on stderr where no handler of the user's shows the log."""
    lines = _shown_lines.get()
    if lines is not None:
        if line in lines:
            return
        lines.add(line)
    _log.warning("%s", line)
    handlers = [*_log.handlers, *logging.getLogger("fedstill").handlers, *logging.getLogger().handlers]
    if handlers and not any(map(_shows, handlers)):  # without any, Python itself prints warnings
        print(f"fedstill: {line}", file=sys.stderr, flush=True)


def _shows(handler: logging.Handler) -> bool:
    """Whether a person may see the handler's lines now: they go neither into a file nor into memory nor nowhere."""
    kept = isinstance(handler, (logging.FileHandler, logging.NullHandler))
    return not kept and not isinstance(getattr(handler, "stream", None), io.StringIO)


def try_objective(model: Model, federation: Federation, work: LocalWork, ids: np.ndarray, states: Tree) -> None:
    """Refuse an objective that counts padding or reads no label, by its value on a few rows of one client.

    ids: the cohort, of whose clients the one with most rows is taken. states: the cohort's, stacked.
    """
    sizes = federation.offsets.diff()[torch.from_numpy(ids)]
    place = int(sizes.argmax())
    client = int(ids[place])
    first, last = federation.offsets[client : client + 2].tolist()
    rows = torch.from_numpy(np.unique(federation.indices[first:last].numpy())[:TRIED_ROWS])
    if len(rows) < 2:
        return
    network = model.network_of(client)
    start, model = part_of(work.start, network), model.networks[network]
    generator, leaf = torch_generator(0), next(iter(start.params.values()))

    def moved(param: Tensor) -> Tensor:  # a term that compares a client's model with the start is zero at the start
        noise = torch.randn(param.shape, generator=generator).to(param)
        return param + (0.5 * param.abs().mean() + 0.02) * noise

    params = {name: moved(param) for name, param in start.params.items()}
    train, size = federation.train, torch.tensor(float(last - first), device=leaf.device)
    feed = Feed(train.x[rows], train.y[rows], train, leaf.device, leaf.dtype)
    x, y = feed.inputs(slice(None)), feed.y
    weight = torch.ones(len(rows), device=leaf.device, dtype=leaf.dtype)
    weight[-min(PADDED_ROWS, len(rows) - 1) :] = 0.0
    counts = torch.bincount(train.y[federation.indices[first:last]], minlength=len(train.classes)).to(weight)
    local = Local(
        params=params,
        buffers=start.buffers,
        start=start,
        received=slots_of(work.received, network),
        state=slots_of(rows_of(states, place), network),
        frozen={},
        label_counts=counts,
        size=size,
        steps=torch.ones_like(size),
        travel=torch.ones_like(size) * work.training.lr,
        lr=torch.ones_like(size) * work.training.lr,
        seed=torch.zeros((), dtype=torch.int64, device=leaf.device),
    )
    try:
        with torch.no_grad():
            teachers = work.objective.frozen.items()
            received = local._replace(params={}, buffers={})  # all that a teacher may look at
            frozen = {name: model.apply(teacher(received), x, training=False)[0] for name, teacher in teachers}
            output, _ = model.apply(start._replace(params=params), x, training=False)
    except Exception:  # the first training step fails too, and its error names the cause
        return
    check_objective(work.objective, output, Batch(x, y, weight), local._replace(frozen=frozen))


class Usage(NamedTuple):
    """Seconds of processors at a point in time."""

    idle: float  # of all processors of the machine; NaN where it does not say
    used: float  # by this process
    now: float


class Cautions:
    """Watches one run: `before` its first round, `after_round`, and `at_end`."""

    def __init__(self, label: str, federation: Federation, training: Training, past: Sequence[Row] = ()) -> None:
        self.label, self.who = label or "the method", f"{label}: " if label else ""
        self.federation, self.training = federation, training
        self.warned: set[str] = set()
        self.evaluated = [row for row in past if row.get("accuracy") is not None]
        self.usage: Usage | None = None

    def before(self, phases: Sequence[Phase], rounds: int, model: Model, logits: Iterable[Tensor]) -> None:
        """Warn of the label among the inputs, a phase that is never reached, and a model that does not suit the loss.

        logits: the answers (n, K) of each network to some rows.
        """
        train = self.federation.train
        for column in label_columns(train):
            caution(
                f"{column} says which class a row has, in all {len(train.y):,} training rows: the label is among the "
                "inputs, and the accuracy will say nothing about new data: name the column in data.drop, or take it "
                "out of data.inputs"
            )
        if len(train.y) and bool((train.y == train.y[:1]).all()):
            caution(
                f"all {len(train.y):,} training rows have the class '{train.classes[int(train.y[0])]}', so nothing is "
                "learnt and every answer seems right: look at the column of the labels (data.label)"
            )
        last_switch = max((phase.until or 0 for phase in phases), default=0)
        if last_switch >= rounds:
            caution(
                f"'{self.label}' switches after round {last_switch}, the run has {rounds}: its last phase is never "
                "reached: give the run more rounds, or switch earlier"
            )
        for name, network in model.networks.items():
            if network.classes > len(train.classes):
                caution(
                    f"model '{name or model.name}' has {network.classes} outputs, and the data have "
                    f"{len(train.classes)} classes: it can answer with classes that do not exist: build it with "
                    f"classes={len(train.classes)}"
                )
        if any(are_probabilities(answers) for answers in logits):
            caution(
                f"model '{model.name}' answers with probabilities, and the loss takes a softmax of them once more, "
                "which hardly learns: take the softmax layer out of the model, so that it answers with logits"
            )

    def after_round(self, row: Row, records: Sequence[AuditRecord], device: torch.device) -> None:
        """Warn of no accepted upload, one answer for everything, a rising loss, and more threads than free cores."""
        if row["cohort"] and not row["accepted"]:
            self._once(
                "refused",
                f"{self.who}round {row['round']}: no upload of {row['cohort']} was accepted {_reason(records)}",
            )
        if device.type == "cpu":
            self._look_at_cores()
        if row.get("accuracy") is None:
            return
        self.evaluated.append(row)
        if answer := self._only_answer(PATIENCE):
            self._once("one class", f"{self.who}round {row['round']}: the model still answers {answer}")
        if best := rising_from(self.evaluated):
            self._once(
                "rising",
                f"{self.who}round {row['round']}: since round {best['round']} the test loss has risen from "
                f"{best['loss']:.3g} to {row['loss']:.3g} and the accuracy fallen from {100 * best['accuracy']:.1f} to "
                f"{100 * row['accuracy']:.1f} %: use a lower local.lr (now {self.training.lr:g}) or less local work "
                "(local.epochs, local.steps)",
            )

    def at_end(self, history: History) -> None:
        """Warn of a run that learnt nothing, and of a last model with one answer for everything."""
        if all_refused(history):
            caution(
                f"{self.who}no upload of the whole run was accepted, so nothing was learnt {_reason(history.audit)}"
            )
        elif answer := self._only_answer(PATIENCE_AT_END):
            caution(f"{self.who}the last model answers {answer}")

    def _once(self, kind: str, line: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            caution(line)

    def _only_answer(self, patience: int) -> str:
        """The class that the last model gives to every row, in words; empty unless the latest models gave one each."""
        answers = [only_answer(row) for row in self.evaluated[-patience:]]
        if len(answers) < patience or None in answers:
            return ""
        name = self.federation.train.classes[answers[-1] or 0]
        cures = f"try a lower local.lr (now {self.training.lr:g}), a smaller network, or more rounds"
        return f"'{name}' for every row of the test set, and so did {patience - 1} models before it: {cures}"

    def _look_at_cores(self) -> None:
        """Warn once of more threads than cores that other programs leave free, counted while the run works."""
        count = torch.get_num_threads()
        if count == 1 or "threads" in self.warned:
            return
        now = read_usage()
        self.usage = self.usage or now
        if now.now - self.usage.now < MEASURED_SECONDS:
            return
        free, self.usage = free_cores(self.usage, now), now
        if count > free + 0.5:
            self._once(
                "threads",
                f"torch works with {count} threads, and {free:.1f} cores are free: threads that wait for each other "
                f"slow the run down: set engine.threads = {max(1, math.floor(free + 0.5))}",
            )


def all_refused(history: History) -> bool:
    """Whether clients took part and no upload of the whole run was accepted."""
    return history.total("cohort") > 0 and history.total("accepted") == 0


def _reason(records: Iterable[AuditRecord]) -> str:
    """The most frequent reason among the clients' records, else among the server's, with its cure."""
    records = [record for record in records if not record.get("note")]
    reasons = Counter(record["reason"] for record in records if record["client"] is not None)
    reasons = reasons or Counter(record["reason"] for record in records)
    reason = reasons.most_common(1)[0][0] if reasons else "no reason is recorded"
    cures = (
        ("NaN or Inf", "use a lower local.lr, or local.clip = 1.0"),
        ("update norm", "use a lower local.lr, or a larger guard.norm_bound"),
        ("extra upload exceeds", "use a larger guard.extra_bound"),
        ("quorum", "use a lower guard.quorum or a larger cohort"),
    )
    cure = next((cure for word, cure in cures if word in reason), "the audit of the run has every reason")
    return f"({reason}): {cure}"


def only_answer(row: Row) -> int | None:
    """The class that the model gives to every test row, by the accuracy of each class; None where it knows several."""
    tested = [(value, number) for number, value in enumerate(row.get("class_accuracy") or ()) if value is not None]
    right = [number for value, number in tested if value > 0]
    if len(tested) > 1 and len(right) == 1 and row["class_accuracy"][right[0]] == 1.0:
        return right[0]
    return None


def rising_from(evaluated: Sequence[Row]) -> Row | None:
    """The row with the lowest test loss, if all of the latest rows are clearly worse in loss and in accuracy."""
    rows = [row for row in evaluated if row.get("loss") is not None]
    best, latest = min(rows, key=lambda row: row["loss"], default=None), rows[-PATIENCE:]
    if best is None or len(rows) <= PATIENCE:
        return None
    worse = (
        row["loss"] > LOSS_RISE * best["loss"] and row["accuracy"] < best["accuracy"] - ACCURACY_FALL for row in latest
    )
    return best if all(worse) else None


def are_probabilities(answers: Tensor) -> bool:
    """Whether each row (n, K) of a model's answers is a distribution over several classes."""
    if answers.ndim != 2 or answers.shape[1] < 2 or not len(answers):
        return False
    sums, inside = answers.double().sum(1), (answers >= 0) & (answers <= 1)
    return bool(inside.all()) and bool((sums - 1).abs().max() < 1e-3)


def label_columns(train: Dataset) -> list[str]:
    """Names of the inputs of a table that are a copy of the label, under whatever values: one value for each class.

    A column of words is one input for each word, and such a copy is a column whose words are one for each class.
    """
    x, y = train.x, train.y
    if x.ndim != 2 or not x.is_floating_point() or len(x) < LEAST_ROWS:
        return []
    classes, places = np.unique(y.numpy(), return_index=True)
    if len(classes) < 2 or 2 * len(classes) > len(x):
        return []
    values = x[places]  # of the first row of each class
    which = torch.from_numpy(np.searchsorted(classes, y.numpy()))
    copies = torch.ones(x.shape[1], dtype=torch.bool)  # inputs with one value for all rows of a class
    for begin in range(0, len(x), ROWS_AT_ONCE):
        piece = slice(begin, begin + ROWS_AT_ONCE)
        copies &= (x[piece] == values[which[piece]]).all(0)
        if not copies.any():
            return []
    columns = [(f"column '{column.name}'", column.width) for column in train.columns]
    columns = columns or [(f"input {number} (counted from 1)", 1) for number in range(1, x.shape[1] + 1)]
    names, begin = [], 0
    for name, width in columns:
        inputs = slice(begin, begin + width)
        if copies[inputs].all() and len(np.unique(values[:, inputs].numpy(), axis=0)) == len(classes):
            names.append(name)
        begin += width
    return names


def read_usage() -> Usage:
    """Read how long processors were idle and how long this process has worked, both since they began."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        idle = sum(ticks[3:5]) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for a disk
    except (OSError, ValueError):
        idle = math.nan
    return Usage(idle, time.process_time(), time.perf_counter())


def allowed_cores() -> float:
    """The cores that this process may use: by its affinity, and by the limit of its container."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no container, or the limit is "max"
        return cores


def free_cores(then: Usage, now: Usage) -> float:
    """The cores that this process had or could have had between two looks, because it used them or they were idle."""
    had = (now.idle - then.idle + now.used - then.used) / (now.now - then.now)
    return allowed_cores() if math.isnan(had) else min(allowed_cores(), had)
