"""Attacks on a simulation: what hostile clients do instead of their part. `ATTACKS` names the kinds.

No attack knows a method, and no method knows an attack: an attack changes rows before clients train on them, uploads on
their way, and answers to questions. A deployment has no attacks; `Built` refuses them there.
"""

from __future__ import annotations

from collections.abc import Callable

from fedstill.attack.kinds import Attack, Kind, adaptive, backdoor, gaussian, label_flip, scale, sign, sure, together

ATTACKS: dict[str, Callable[..., Kind]] = {
    "sign": sign,
    "scale": scale,
    "gaussian": gaussian,
    "label_flip": label_flip,
    "adaptive": adaptive,
    "backdoor": backdoor,
    "sure": sure,
}

__all__ = [
    "ATTACKS",
    "Attack",
    "Kind",
    "adaptive",
    "backdoor",
    "gaussian",
    "label_flip",
    "scale",
    "sign",
    "sure",
    "together",
]
