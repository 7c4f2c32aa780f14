"""The order of server steps."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """Where a server step stands when methods are joined: in this order."""

    AGGREGATE = "make one model from the cohort's"  # one a method
    MOVE = "decide the server's step from the sent model"  # at most one a method
    KEEP = "keep something, and pass the model through"
    REFINE = "improve the model"
    REPORT = "improve a copy that is reported, and pass the model through"
