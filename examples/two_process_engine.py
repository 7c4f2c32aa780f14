"""A cohort engine of your own: each of two processes trains half of the cohort.

The file holds the whole engine. One line registers its name, which engine.name then accepts:

    ENGINES["two_processes"] = TwoProcesses

python examples/two_process_engine.py
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch

from fedstill import Experiment, Federation, FedstillError, Model, build_method, run
from fedstill.core.trainer import LocalWork, Trained
from fedstill.core.tree import as_tree, concatenate, from_tree, rows
from fedstill.core.types import Tree
from fedstill.engine import ENGINES, build_engine, choose_device
from fedstill.loop.local_work import Packed, Unpack, pack

PROCESSES = 2


class TwoProcesses:
    """An engine that trains cohorts as the looped engine does, bit for bit. Work travels to the processes as data."""

    name = "two_processes"

    def __init__(self, device: str = "auto", *, model: Model, federation: Federation, **options: Any) -> None:
        self.device = choose_device(device)
        if model.recipe is None:
            raise FedstillError(f"model '{model.name}' was made by hand and cannot be built in another process")
        self.pool = ProcessPoolExecutor(
            PROCESSES,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=begin,
            initargs=(model.recipe, federation, str(self.device), options, torch.get_num_threads()),
        )

    def train(self, work: LocalWork, ids: np.ndarray, states: Tree) -> Trained:
        """Let each process train half of the clients; return the results in the order of `ids`."""
        packed = pack(work)
        parts = [places for places in np.array_split(np.arange(len(ids)), PROCESSES) if len(places)]
        calls = [self.pool.submit(train, packed, ids[part], rows(states, torch.from_numpy(part))) for part in parts]
        done = [call.result() for call in calls]
        uploads = from_tree(concatenate([as_tree(half.uploads) for half in done]))
        return Trained(uploads, concatenate([half.states for half in done]))


in_this_process: dict[str, Any] = {}


def begin(recipe: Any, federation: Federation, device: str, options: dict[str, Any], threads: int) -> None:
    """Build the model and an engine, once in each process."""
    torch.set_num_threads(threads)
    model = recipe()
    in_this_process["engine"] = build_engine("looped", device, model=model, federation=federation, **options)
    in_this_process["unpack"] = Unpack(model, build_method, device)


def train(packed: Packed, ids: np.ndarray, states: Tree) -> Trained:
    """Train some clients of a cohort, in one of the processes."""
    trained: Trained = in_this_process["engine"].train(in_this_process["unpack"](packed), ids, states)
    return trained


ENGINES[TwoProcesses.name] = TwoProcesses

if __name__ == "__main__":
    for name in ("looped", "two_processes"):
        experiment = Experiment(
            rounds=3, cohort=10, method="scaffold", model={"name": "mlp"}, engine={"name": name, "device": "cpu"}
        )
        print(f"{name:14} accuracy {run(experiment).history.rows[-1]['accuracy']:.4f}")
