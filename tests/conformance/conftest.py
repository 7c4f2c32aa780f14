"""Noise that protects depends on engine, order and data, because runs share none: here it follows from the seed."""

from __future__ import annotations

import pytest

from fedstill.loop import federate


@pytest.fixture(autouse=True)
def noise_by_seed_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise for runs that are compared, but where the claim is that clients draw their own."""
    if "loopback" not in request.node.path.name:
        monkeypatch.setattr(federate, "noise_seed", lambda seed, run, secret=b"": seed)
