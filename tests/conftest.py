"""Hypothesis draws fewer examples in the quick run than in `make test-all`, where the mark `matrix` is not left out."""

from __future__ import annotations

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    quick = "not matrix" in config.option.markexpr
    settings.register_profile("fedstill", max_examples=20 if quick else 100, deadline=None)
    settings.load_profile("fedstill")
