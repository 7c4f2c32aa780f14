"""Federated learning on non-IID data by knowledge distillation.

>>> import fedstill
>>> experiment = fedstill.Experiment(
...     rounds=2,
...     cohort=3,
...     partition={"scheme": "lda", "clients": 5, "alpha": 0.5},
...     model={"name": "mlp", "hidden": [16]},
... )
>>> result = fedstill.run(experiment)
>>> len(result.history.rows)
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstill.compose.combine import combine
    from fedstill.compose.wrappers import after, every, remember, rollback
    from fedstill.core.errors import FedstillError
    from fedstill.core.seeds import seed_for
    from fedstill.core.types import (
        Batch,
        Dataset,
        Federation,
        Local,
        Method,
        Model,
        Need,
        Objective,
        Output,
        Phase,
        Round,
        ServerStep,
        Training,
        Uploads,
        Weights,
    )
    from fedstill.data import (
        Source,
        federation_from_tensors,
        from_csv,
        from_hf,
        from_tensors,
        make_federation,
        split_unlabeled,
        tokenise,
    )
    from fedstill.data.given import from_data
    from fedstill.engine import build_engine, build_engines
    from fedstill.experiment.build import build, build_federation
    from fedstill.experiment.choose import Choice, choose
    from fedstill.experiment.classifier import FederatedClassifier
    from fedstill.experiment.compare import Comparison, compare, sweep
    from fedstill.experiment.config import Experiment
    from fedstill.experiment.run import resume_run, run
    from fedstill.loop.callbacks import Callback, EarlyStop
    from fedstill.loop.federate import Built, Schedule, federate
    from fedstill.loop.guard import Guard
    from fedstill.loop.history import History, Result
    from fedstill.methods.lookup import build_method
    from fedstill.methods.own_code import allow
    from fedstill.models import build_model, from_module, mixed_model
    from fedstill.prediction import Predictions, Predictor, load, predict
    from fedstill.prediction.export import export
    from fedstill.prediction.loaded import LoadedRun, load_run

# Imported when first used: torch takes a second, and `fedstill --help` should not.
_HOMES = {
    "fedstill.loop.callbacks": "Callback EarlyStop",
    "fedstill.experiment.compare": "Comparison compare sweep",
    "fedstill.experiment.config": "Experiment",
    "fedstill.compose.combine": "combine",
    "fedstill.compose.wrappers": "after every remember rollback",
    "fedstill.core.errors": "FedstillError",
    "fedstill.core.seeds": "seed_for",
    "fedstill.core.types": (
        "Method Batch Dataset Federation Local Model Need Objective Output Phase Round ServerStep Training "
        "Uploads Weights"
    ),
    "fedstill.data": (
        "Source federation_from_tensors from_csv from_hf from_tensors make_federation split_unlabeled tokenise"
    ),
    "fedstill.data.given": "from_data",
    "fedstill.experiment.build": "build build_federation",
    "fedstill.experiment.choose": "Choice choose",
    "fedstill.experiment.classifier": "FederatedClassifier",
    "fedstill.experiment.run": "resume_run run",
    "fedstill.loop.guard": "Guard",
    "fedstill.loop.history": "History Result",
    "fedstill.methods.lookup": "build_method",
    "fedstill.methods.own_code": "allow",
    "fedstill.models": "build_model from_module mixed_model",
    "fedstill.prediction": "Predictions Predictor load predict",
    "fedstill.prediction.export": "export",
    "fedstill.prediction.loaded": "LoadedRun load_run",
    "fedstill.engine": "build_engine build_engines",
    "fedstill.loop.federate": "Built Schedule federate",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Batch",
    "Built",
    "Callback",
    "Choice",
    "Comparison",
    "Dataset",
    "EarlyStop",
    "Experiment",
    "FederatedClassifier",
    "Federation",
    "FedstillError",
    "Guard",
    "History",
    "LoadedRun",
    "Local",
    "Method",
    "Model",
    "Need",
    "Objective",
    "Output",
    "Phase",
    "Predictions",
    "Predictor",
    "Result",
    "Round",
    "Schedule",
    "ServerStep",
    "Source",
    "Training",
    "Uploads",
    "Weights",
    "after",
    "allow",
    "build",
    "build_engine",
    "build_engines",
    "build_federation",
    "build_method",
    "build_model",
    "choose",
    "combine",
    "compare",
    "every",
    "export",
    "federate",
    "federation_from_tensors",
    "from_csv",
    "from_data",
    "from_hf",
    "from_module",
    "from_tensors",
    "load",
    "load_run",
    "make_federation",
    "mixed_model",
    "predict",
    "remember",
    "resume_run",
    "rollback",
    "run",
    "seed_for",
    "split_unlabeled",
    "sweep",
    "tokenise",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedstill")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedstill' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
