"""One run that is to be done, as it goes from the plan to whoever does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.bench.results import engine_of, engine_text
from fedstill.config import Experiment


@dataclass(frozen=True)
class Order:
    """The cell, its seed, and where it is written."""

    row: str
    column: str
    preset: str
    key: str
    experiment: Experiment  # with seed, device and the place of its data
    folder: Path

    @property
    def run_id(self) -> tuple[str, int, str]:
        """As `results.run_id` has it of the record that it becomes."""
        return self.key, self.experiment.seed, engine_text(engine_of(self.experiment))

    @property
    def label(self) -> str:
        return f"{self.row} {self.column} seed {self.experiment.seed}"

    def as_json(self) -> dict[str, Any]:
        """Plain values only: it goes to another process."""
        own = {"row": self.row, "column": self.column, "preset": self.preset, "key": self.key}
        return {**own, "experiment": self.experiment.model_dump(mode="json"), "folder": str(self.folder)}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Order:
        experiment = Experiment.model_validate(table["experiment"])
        return cls(**{**table, "experiment": experiment, "folder": Path(table["folder"])})
