"""Every method's step can be traced whole by torch.compile, and is then the same step."""

from __future__ import annotations

import pytest
import torch
from method_rows import ROWS, distance, run

from fedstill.engine.program import Program

COMPILE = torch.compile
BUILD = Program.__init__


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_traced_step_is_the_step(row, monkeypatch):
    """Clients too, which an engine compiles on a GPU alone; `fullgraph`: a break in the trace is an error."""
    wanted = run(row.build(), engine="looped", net=row.net).weights
    traced = []

    def compile(function, **how):
        traced.append(function)
        return COMPILE(function, backend="aot_eager", fullgraph=True, **how)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(
        Program, "__init__", lambda self, *parts, **how: BUILD(self, *parts, **how | {"compiled": True})
    )
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # a trace for each size of a batch
        found = run(row.build(), engine="looped", net=row.net).weights
    assert traced
    assert distance(found, wanted) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fedavg", "fedlmd", "feddf", "fedaux", "simclr"])
def test_compiled_kernels_on_a_gpu_give_what_the_cpu_gives(name):
    row = next(row for row in ROWS if row.id.startswith(name))
    how = {"net": row.net, "engine": "looped"}
    precise = {"precision": "float32" if row.net == "mlp" else "float64"}
    found = run(row.build(), device="cuda", engine_options={**precise, "compile": True}, **how).weights
    assert distance(found, run(row.build(), engine_options=precise, **how).weights) < 1e-4
