"""BatchNorm's statistics taken anew on invented samples: in float32, of any size, with any momentum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.methods.data_free.hard_samples import fresh_statistics
from fedstill.models import from_module

CLASSES = 3


class Normed(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2, momentum=momentum), nn.Linear(2, CLASSES)

    def forward(self, x):
        return self.head(self.norm(x))


@pytest.mark.parametrize("momentum", [0.1, 1.0, None, 0.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_statistics_of_any_size_are_taken_anew_in_float32_whatever_the_momentum(momentum, scale):
    """A layer with momentum 0 never moves them: it keeps its own."""
    net = from_module(lambda: Normed(momentum), input_shape=(2,), classes=CLASSES, check=False)
    x = scale * (1 + torch.randn(500, 2, generator=torch.Generator().manual_seed(0)))
    before = net.init(0)
    before.buffers["norm.num_batches_tracked"] += 10**6  # without a momentum the next batch would count a millionth
    found = fresh_statistics(net, before, x, 0)
    mean, var = (torch.zeros(2), torch.ones(2)) if momentum == 0.0 else (x.mean(0), x.var(0))
    torch.testing.assert_close(found["norm.running_mean"], mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(found["norm.running_var"], var, rtol=1e-5, atol=0)
