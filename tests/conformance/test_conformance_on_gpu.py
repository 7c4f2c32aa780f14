"""Every method on every engine of a GPU gives what the loop on the CPU gives."""

from __future__ import annotations

import pytest
import torch
from method_rows import ROWS, distance, run

from fedstill.core.types import Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


CASES = [(row, net) for row in ROWS for net in (("mlp", "norm") if row.net == "mlp" else (row.net,))]


@pytest.mark.parametrize(("row", "net"), CASES, ids=lambda part: part if isinstance(part, str) else part.id)
@pytest.mark.parametrize("engine", ["batched", "looped"])
def test_the_gpu_gives_what_the_cpu_gives(row, engine, net):
    """Strict float32, three rounds: 1e-4 of 1 + the largest weight, since sums run in another order.

    A GPU draws noise of its own: such a row is held against the loop on the GPU. Pre-training runs in float64: its
    Adam makes whole steps of gradients that are zero but for rounding (of a bias in front of a norm).
    """
    options = {"net": net, "engine_options": {"precision": "float32" if row.net == "mlp" else "float64"}}
    found = run(row.build(), engine=engine, device="cuda", **options).weights
    place = "cuda" if row.noise_by_place else "cpu"
    wanted = run(row.build(), engine="looped", device=place, **options).weights
    assert all(leaf.device.type == "cuda" for leaf in found.params.values())
    assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("row", [row for row in ROWS if row.build().objective.measure], ids=lambda row: row.id)
@pytest.mark.parametrize("engine", ["batched", "looped"])
def test_gradients_after_training_run_through_convolutions(row, engine):
    """The kernels for many clients know no torch.func.grad: a look at the data after training must go around them."""
    how = {"net": "cnn", "rounds": 2, "training": Training(batch_size=4, lr=0.02)}
    found = run(row.build(), engine=engine, device="cuda", **how).weights  # TF32: about three digits
    assert distance(found, run(row.build(), engine="looped", **how).weights) < 5e-3
