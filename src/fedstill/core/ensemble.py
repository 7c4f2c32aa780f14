"""Which of several architectures is looked at: told without tensors, so that a configuration can be checked alone."""

from __future__ import annotations

from collections.abc import Iterable

from fedstill.core.errors import FedstillError, suggest

ENSEMBLE = "ensemble"  # all prototypes together: the mean of their logits


def check_report(report: str, prototypes: Iterable[str]) -> None:
    """What is looked at is the ensemble or one of the prototypes."""
    choices = (ENSEMBLE, *prototypes)
    if report not in choices:
        raise FedstillError(f"model.report = '{report}' is unknown: {suggest(report, choices)}")
