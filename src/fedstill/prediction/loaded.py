"""A finished run as one object: its experiment, its data's contract, its numbers, its models, and answers by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import FedstillError
from fedstill.core.types import Weights
from fedstill.data.contract import Contract
from fedstill.experiment.config import Experiment
from fedstill.experiment.model import Network
from fedstill.experiment.recorded import read_rows
from fedstill.loop.checkpoint import load_weights
from fedstill.loop.history import History, Result, Row
from fedstill.methods.lookup import label
from fedstill.prediction import Predictions, open_run, predict

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class LoadedRun:
    """The run in a folder; `load_run` makes it."""

    folder: Path
    experiment: Experiment
    contract: Contract  # how its data are read, its classes, fingerprints of its rows
    result: Result
    model: Network | None = None

    def __repr__(self) -> str:
        return f"LoadedRun({self.experiment!r},\n  {self.result!r})"

    @property
    def history(self) -> list[Row]:
        """One row a round."""
        return self.result.history.rows

    @property
    def frame(self) -> pandas.DataFrame:
        """The history as a table, a row a round and a column a metric; the index is the round. It needs pandas."""
        try:
            import pandas
        except ImportError:
            raise FedstillError("a DataFrame needs pandas: pip install 'fedstill[data]'") from None
        return pandas.DataFrame(self.history).set_index("round")

    @property
    def summary(self) -> dict[str, Any]:
        return self.result.summary()

    @property
    def weights(self) -> Weights:
        """The last model."""
        return self.result.weights

    @property
    def best_weights(self) -> Weights:
        """The model of the best round."""
        return self.result.best_weights

    def predict(self, inputs: Any = None, *, from_: str = "last", out: str | Path | None = None) -> Predictions:
        """Label a DataFrame, an array, a list of texts, a file or a folder, as `fedstill.predict` does."""
        return predict(self.folder, inputs, from_=from_, out=out, model=self.model)


def load_run(folder: str | Path, *, model: Network | None = None) -> LoadedRun:
    """Return the run in a folder as one object; nothing is trained and no training data are read.

    model: the network of a run that was started with a network in Python.
    """
    run = open_run(Path(folder), model)
    history = History(read_rows(run.folder))
    last, best = (load_weights(run.folder / which) for which in ("last", "best"))
    seconds = history.total("seconds")
    result = Result(history, last, best, label(run.experiment.method.name), seconds, run.folder, run.experiment.target)
    return LoadedRun(run.folder, run.experiment, run.contract, result, model)
