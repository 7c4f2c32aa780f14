"""What a run leaves behind: rows of numbers, an audit, and the result that carries both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor

from fedstill.core.types import Samples, Targets, Weights
from fedstill.loop.evaluate import is_lower_better
from fedstill.loop.guard import AuditRecord
from fedstill.privacy.statement import PrivacyStatement
from fedstill.storage.files import appending, write_whole

if TYPE_CHECKING:
    from fedstill.loop.references import References

_SHOWN = ("method", "rounds", "accuracy_last", "accuracy_best", "run_dir")
Row = dict[str, Any]  # one round; `pandas.DataFrame(history.rows)` is a table


@dataclass
class History:
    """One row a round. Rounds that were not evaluated have no "accuracy".

    best_by: the metric by which the best round is chosen.
    """

    rows: list[Row] = field(default_factory=list)
    audit: list[AuditRecord] = field(default_factory=list)
    best_by: str = "accuracy"

    def __repr__(self) -> str:
        last = f", accuracy {self.last['accuracy']:.4f}" if self.last else ""
        return f"History({len(self.rows)} rounds{last})"

    @property
    def evaluated(self) -> list[Row]:
        return [row for row in self.rows if row.get("accuracy") is not None]

    @property
    def last(self) -> Row | None:
        """The last evaluated round."""
        return next((row for row in reversed(self.rows) if row.get("accuracy") is not None), None)

    @property
    def best(self) -> Row | None:
        """The evaluated round whose `best_by` is best, the first of equals."""
        return max(self.evaluated, key=self.rank, default=None)

    def rank(self, row: Row) -> tuple[bool, float]:
        """Return a key that is larger for a better round; a round in which the metric is not defined comes last."""
        value = row.get(self.best_by)
        if value is None:
            return False, 0.0
        return True, -value if is_lower_better(self.best_by) else value

    def mean_last(self, count: int = 10, metric: str = "accuracy") -> float:
        """Mean of `metric` over the last `count` rounds that have it; NaN when none has."""
        values = [row[metric] for row in self.rows if row.get(metric) is not None][-count:]
        return sum(values) / len(values) if values else math.nan

    def rounds_to(self, target: float) -> int | None:
        """The first round with at least the target accuracy; None when it was never reached."""
        return next((int(row["round"]) for row in self.evaluated if row["accuracy"] >= target), None)

    def total(self, metric: str) -> float:
        return sum(row.get(metric) or 0 for row in self.rows)

    @property
    def bytes_up(self) -> int:
        """All that clients sent, in the rounds and before the first one."""
        return int(self.total("bytes_up") + self.total("bytes_prepared"))

    @property
    def bytes_down(self) -> int:
        """All that they were sent."""
        return int(self.total("bytes_down") + self.total("bytes_prepared_down"))


@dataclass(frozen=True)
class Result:
    """A finished run. `weights` is the last model, `best_weights` the one of `history.best`."""

    history: History
    weights: Weights
    best_weights: Weights
    method: str
    seconds: float
    run_dir: Path | None = None
    target: float | None = None
    targets: Targets | None = None  # what the server believes about its unlabeled data, if the method forms a belief
    reported: str = ""  # of several architectures: which model the accuracy is of, and which one predicts
    prototypes: tuple[str, ...] = ()  # their names; a row has the accuracy of each as accuracy_<name>
    privacy: PrivacyStatement | None = None  # where a part of the run speaks of it
    samples: Samples | None = None  # what the server's generator invented last, if the method has one
    generated: Mapping[str, Any] | None = None  # generated.json: how near they are to training samples
    references: References | None = None  # accuracies without a federation, where the experiment asks for them
    party_accuracy: tuple[float | None, ...] = ()  # of `weights` on each client's own test rows, where there are
    ended_early: str = ""  # why the run ended before its last round, where early stopping ended it
    stands_for: str = ""  # in a comparison: the method with options that its bare name takes from the experiment

    def __repr__(self) -> str:
        """Without the weights, which would fill a notebook's page."""
        summary = self.summary()
        return f"Result({', '.join(f'{key}={summary[key]!r}' for key in _SHOWN)})"

    @property
    def audit(self) -> list[AuditRecord]:
        return self.history.audit

    @property
    def best(self) -> Row | None:
        return self.history.best

    @property
    def rounds_to_target(self) -> int | None:
        return None if self.target is None else self.history.rounds_to(self.target)

    def summary(self) -> dict[str, Any]:
        last, best = self.history.last, self.history.best
        reported: dict[str, Any] = {"reported": self.reported} if self.reported else {}
        if self.prototypes and last:
            reported["prototypes"] = {name: last[f"accuracy_{name}"] for name in self.prototypes}
        private = {} if self.privacy is None else {"privacy": self.privacy.text()}
        invented = {} if self.generated is None else {"generated": self.generated["text"]}
        return {
            "method": self.method,
            **reported,
            **private,
            **invented,
            "rounds": len(self.history.rows),
            "accuracy_last": last["accuracy"] if last else None,
            "accuracy_best": best["accuracy"] if best else None,
            "seconds": round(self.seconds, 3),
            "bytes_up": self.history.bytes_up,
            "bytes_down": self.history.bytes_down,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            **({"ended_early": self.ended_early} if self.ended_early else {}),
            **({} if self.references is None else {"references": self.references.summary()}),
        }


def plain(value: Any) -> Any:
    """A value that JSON can hold: tensors become numbers or lists, NaN and Inf become None."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class Journal:
    """metrics.jsonl and audit.jsonl of a run folder, a line a record.

    Opening writes the history it is given anew: after a resume no round is there twice and none is missing.
    """

    def __init__(self, folder: Path, history: History) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_anew(folder / "metrics.jsonl", history.rows)
        self._audit = _open_anew(folder / "audit.jsonl", history.audit)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._metrics.close()
        self._audit.close()

    def add(self, row: Row, records: list[AuditRecord]) -> None:
        self._metrics.write(_line(row))
        self._metrics.flush()
        if records:
            self._audit.write("".join(_line(record) for record in records))
            self._audit.flush()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _open_anew(path: Path, records: list[dict[str, Any]]) -> IO[str]:
    write_whole(path, "".join(_line(record) for record in records))
    return appending(path)
