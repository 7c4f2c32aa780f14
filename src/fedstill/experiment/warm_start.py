"""The model of another run as the start of a new one: `[model] start = "RUN"`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten
from fedstill.core.types import Dataset, Model, Weights
from fedstill.data.contract import task_differences
from fedstill.experiment.run_folder import read_contract, start_file
from fedstill.loop.checkpoint import load_weights


def start_weights(start: str, model: Model, data: Dataset) -> Weights:
    """Return the last model of the run in the folder `start`; a model of another form or task is refused.

    The scale of inputs may differ, because parties that go on with a model have other data.
    """
    folder = Path(start)
    if (folder / "results.json").is_file():
        raise FedstillError(
            f"model.start = '{start}' holds a comparison: give the folder of one run, e.g. {start}/fedavg/seed-0"
        )
    if not start_file(start).is_file():
        raise FedstillError(f"model.start = '{start}' holds no model (no last/): give the folder of a finished run")
    then = read_contract(folder).data.data
    now = replace(data, mean=then.mean, std=then.std, label=then.label)
    for difference in task_differences(then, now):
        raise FedstillError(
            f"model.start = '{start}' was trained for another task: {difference}: start from a run with the same "
            "inputs and classes, or leave model.start out"
        )
    weights = load_weights(start_file(start))
    for difference in _differences(weights, model.init(0)):
        raise FedstillError(
            f"model.start = '{start}' holds another network: {difference}: copy [model] from {start}/config.toml, or "
            "leave model.start out"
        )
    return weights


def _differences(start: Weights, wanted: Weights) -> Iterator[str]:
    there, here = flatten(start), flatten(wanted)
    for name in dict.fromkeys((*here, *there)):
        layer = name.partition("/")[2]
        if name not in there:
            yield f"it has no layer '{layer}'"
        elif name not in here:
            yield f"its layer '{layer}' is not in this network"
        elif there[name].shape != here[name].shape:
            yield f"layer '{layer}' has the shape {tuple(there[name].shape)}, not {tuple(here[name].shape)}"
