"""Runs whose clients live elsewhere, to be compared with the same run in one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mixed_runs
from method_rows import COHORT, HARD_SAMPLES, ROUNDS, ROWS, TRAINING, federation, network
from running import built

from fedstill.core.types import Federation
from fedstill.loop.federate import Built
from fedstill.methods.lookup import build_method, write

REFINED = "student.steps=5, student.batch_size=8"
RUNS: dict[str, dict[str, Any]] = {
    "mixture": {"method": f"fedlmd+scaffold+mrtf({REFINED})"},
    "phases": {"method": f"scaffold until 2 then fedaux({REFINED})"},
    "fedaux": {"method": f"fedaux({REFINED})+fedprox(mu=0.1)"},
    "fedftg": {"method": f"scaffold+{write('fedftg', HARD_SAMPLES)}"},
    "head": {"method": "scaffold", "part": "head"},
    "adapters": {"method": f"fedlmd+scaffold+feddf({REFINED})", "net": "adapted"},
    "optimizers": {"method": "fedlmd", "keep_optimizer": True, "optimizer": "adam"},
    "median": {"method": "fedprox(mu=0.1)+median"},
    "poisson": {"method": "feddyn", "sampling": "poisson", "cohort": 0.5},
}


def a_run(method: Any, net: str = "mlp", **changes: Any) -> Built:
    training = {name: changes.pop(name) for name in ("part", "keep_optimizer", "optimizer") if name in changes}
    settings = {
        "method": method, "model": network(net), "federation": federation(net),
        "training": replace(TRAINING, **training),
        "rounds": ROUNDS, "cohort": COHORT, "seed": 5, "engine": "looped", "device": "cpu",
    }  # fmt: skip
    return built(**{**settings, **changes})


@dataclass(frozen=True)
class RecipeOf:
    """Builds a run of `case` in another process: the id of a row, a name of RUNS, or a method of several networks."""

    case: str
    changes: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Built:
        """Return the run in one process."""
        rows = {row.id: row for row in ROWS}
        if self.case in rows:
            return a_run(rows[self.case].build(), rows[self.case].net, **self.changes)
        if self.case in RUNS:
            how = {**self.changes, **RUNS[self.case]}
            return a_run(build_method(how.pop("method")), **how)
        mixed = {"model": mixed_runs.mixed(), "federation": mixed_runs.federation(), "cohort": 6, "rounds": 2}
        return a_run(build_method(self.case), **{**mixed, **self.changes})

    def __call__(self, federation: Federation, device: str) -> Built:
        return replace(self.run(), federation=federation)
