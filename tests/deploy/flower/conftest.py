"""Loads Flower before a test does, because it uses functions that its own libraries call old."""

from __future__ import annotations

import warnings
from contextlib import suppress

with warnings.catch_warnings(), suppress(ImportError):
    warnings.simplefilter("ignore")
    import flwr.app
    import flwr.clientapp
    import flwr.serverapp  # noqa: F401
