"""The example of a cohort engine: two processes, one registry line, the bits of the looped engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fedstill import Experiment, run
from fedstill.core.tree import flatten
from fedstill.engine import ENGINES

FILE = Path(__file__).parents[2] / "examples" / "two_process_engine.py"


@pytest.fixture
def registered(monkeypatch):
    """The example as an imported module; its registry line is taken back afterwards."""
    monkeypatch.setattr("fedstill.engine.ENGINES", ENGINES)
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, FILE.stem, module)
    spec.loader.exec_module(module)
    yield
    del ENGINES["two_processes"]


@pytest.mark.slow
def test_two_processes_train_as_the_looped_engine_does(registered):
    settings = {"rounds": 2, "cohort": 5, "partition": {"scheme": "lda", "clients": 8, "alpha": 0.5}}
    for method, model in (("scaffold", {"name": "mlp", "hidden": [8]}), ("feddf(student.steps=3)", {"name": "cnn"})):
        both = {
            name: run(
                Experiment(
                    **settings,
                    method=method,
                    model=model,
                    data={"source": "digits", "unlabeled": 50},
                    engine={"name": name, "device": "cpu", "threads": 1},
                )
            )
            for name in ("looped", "two_processes")
        }
        found, wanted = (flatten(both[name].weights) for name in ("two_processes", "looped"))
        assert all(torch.equal(found[key], leaf) for key, leaf in wanted.items())
