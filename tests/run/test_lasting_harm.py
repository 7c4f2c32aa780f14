"""One finite but huge upload must not stop learning for the rounds to come."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from running import federate

from fedstill.core.errors import FedstillError
from fedstill.core.types import Training
from fedstill.data import federation_from_tensors
from fedstill.loop.guard import Guard
from fedstill.methods import build_algorithm
from fedstill.models import build_model


def blobs(clients: int = 4, size: int = 20):
    """Two classes a straight line can part; every client has both."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(clients + 1):
        y = torch.arange(size) % 2
        pairs.append((torch.randn(size, 3, generator=generator) + 3.0 * y[:, None], y))
    return federation_from_tensors(pairs[:-1], test=pairs[-1])


def run(method: str, spoil, guard: Guard):
    """Eight rounds; in the second one, client 0's upload passes through `spoil`."""
    method = build_algorithm(method, {})
    seen = []

    def transmit(uploads, start, seed):
        seen.append(None)
        return spoil(uploads) if len(seen) == 2 else uploads

    return federate(
        method=dataclasses.replace(method, transmit=transmit),
        model=build_model("mlp", input_shape=(3,), classes=2, hidden=(8,), init="torch"),
        federation=blobs(),
        training=Training(epochs=2, batch_size=10, lr=0.1),
        rounds=8,
        cohort=4,
        guard=guard,
    )


def huge_control(uploads):
    delta = {name: leaf.clone() for name, leaf in uploads.extra["control_delta"].items()}
    for leaf in delta.values():
        leaf[0] = 1e30
    return uploads._replace(extra={"control_delta": delta})


def huge_params(uploads):
    for leaf in uploads.weights.params.values():
        leaf[0] = 1e20
    return uploads


def test_a_bound_on_what_is_sent_beside_the_model_keeps_scaffold_learning():
    result = run("scaffold", huge_control, Guard(extra_bound=1e3))
    assert [record["client"] for record in result.history.audit] == [0]
    assert "extra upload" in result.history.audit[0]["reason"]
    assert result.history.last["accuracy"] > 0.9


def test_a_server_state_that_overflows_is_not_kept():
    result = run("fedadam", huge_params, Guard())
    assert any(record["client"] is None for record in result.history.audit)
    assert result.history.last["accuracy"] > result.history.rows[1]["accuracy"]


def test_a_bound_must_be_positive():
    with pytest.raises(FedstillError, match=r"guard\.extra_bound"):
        Guard(extra_bound=0.0)
