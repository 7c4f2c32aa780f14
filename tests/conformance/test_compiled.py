"""Every method's step can be traced whole by torch.compile, and is then the same step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from method_rows import ROWS, distance, run

from fedstill.engine.step import Program

COMPILE = torch.compile
BUILD = Program.__init__


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_traced_step_is_the_step(row, monkeypatch):
    """Clients too, which an engine compiles on a GPU alone; `fullgraph`: a break in the trace is an error."""
    wanted = run(row.build(), engine="looped", net=row.net).weights
    traced = []

    def backend(graph, examples):
        traced.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend, fullgraph=True))
    monkeypatch.setattr(
        Program, "__init__", lambda self, *parts, **how: BUILD(self, *parts, **how | {"compiled": True})
    )
    torch.compiler.reset()
    found = run(row.build(), engine="looped", net=row.net).weights
    assert traced
    assert distance(found, wanted) < 1e-5  # a batch that is not full is cut to its rows, and padded where it is traced


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # a release's own compiler may use what that release deprecates
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fedavg", "fedlmd", "feddf", "fedaux", "simclr"])
def test_compiled_kernels_on_a_gpu_give_what_the_cpu_gives(name):
    row = next(row for row in ROWS if row.id.startswith(name))
    how = {"net": row.net, "engine": "looped"}
    precise = {"precision": "float32" if row.net == "mlp" else "float64"}
    found = run(row.build(), device="cuda", engine_options={**precise, "compile": True}, **how).weights
    assert distance(found, run(row.build(), engine_options=precise, **how).weights) < 1e-4
