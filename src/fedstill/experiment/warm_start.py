"""The model of another run, or of a bundle, as the start of a new run: `[model] start = "RUN"`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.types import Dataset, Model, Seed, Weights
from fedstill.data.contract import task_differences
from fedstill.experiment.bundle import is_bundle, read_bundle
from fedstill.experiment.model import form_differences
from fedstill.experiment.run_folder import read_contract, start_file
from fedstill.loop.checkpoint import load_weights
from fedstill.models.adapters import on_base


def start_weights(start: str, model: Model, data: Dataset, seed: Seed = 0) -> Weights:
    """Return the last model of the run in the folder `start`, or the model of a bundle.

    A model of another form or task is refused. The scale of inputs may differ, because parties that go on with a model
    have other data. A network without adapters is the base of one that has them, which `seed` draws.
    """
    if is_bundle(start):
        trained = read_bundle(Path(start), key="model.start: ")
        then, weights, description = trained.contract.data, trained.weights, "the model card beside it"
    else:
        then, weights = _last_model(start)
        description = f"{start}/config.toml"
    now = replace(data, mean=then.mean, std=then.std, label=then.label)
    for difference in task_differences(then, now):
        raise FedstillError(
            f"model.start = '{start}' was trained for another task: {difference}: start from a model with the same "
            "inputs and classes, or leave model.start out"
        )
    first = model.init(seed_for(seed, "model"))
    weights = on_base(weights, first, model)
    for difference in form_differences(weights, first):
        raise FedstillError(
            f"model.start = '{start}' holds another network: {difference}: copy [model] from {description}, or "
            "leave model.start out"
        )
    return weights


def _last_model(start: str) -> tuple[Dataset, Weights]:
    """Return the task and the last model of the run in a folder."""
    if (Path(start) / "results.json").is_file():
        raise FedstillError(
            f"model.start = '{start}' holds a comparison: give the folder of one run, e.g. {start}/fedavg/seed-0"
        )
    if not start_file(start).is_file():
        raise FedstillError(f"model.start = '{start}' holds no model (no last/): give the folder of a finished run")
    return read_contract(Path(start)).data.data, load_weights(start_file(start))
