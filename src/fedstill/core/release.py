"""What a method says about its privacy: types only. `core.types` hands them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a client sends in a round: its parameters, BatchNorm statistics, size with steps, travel and loss, label counts,
# and whatever its objective sends beside (SCAFFOLD's control).
Upload = Literal["model", "buffers", "numbers", "label_counts", "extra"]


@dataclass(frozen=True)
class Release:
    """Something about private data that leaves clients with noise on it: what a privacy accountant composes.

    Neighbouring federations differ in one sample of one client, or in all that one client holds (`unit`).
    """

    what: str  # for people: "certainty scores", "model updates"
    unit: Literal["sample", "client"]
    multiplier: float | None  # standard deviation of the Gaussian noise / L2 sensitivity; None: no claim, see `why`
    when: Literal["once", "round"]
    against: Literal["server", "public"]  # noise before the server looks, or only before anybody else does
    why: str = ""  # why there is no claim, or what it rests on
    covers: tuple[Upload, ...] = ()  # of a round's: what it protects; a claim needs all that leaves
    without_trust: str = ""  # of noise that the server adds: what to use where each client is to add its own
