"""Privacy: noise on what leaves a client, what it costs together, and what may be claimed."""

from fedstill.privacy.accountant import (
    Event,
    analytic_gaussian_multiplier,
    classic_multiplier,
    delta_of,
    epsilon_after,
    epsilon_of,
)
from fedstill.privacy.mechanisms import clip_and_noise, noisy_mean, noisy_moves
from fedstill.privacy.plan import Privacy
from fedstill.privacy.statement import Claim, PrivacyStatement, Stretch, statement

__all__ = [
    "Claim",
    "Event",
    "Privacy",
    "PrivacyStatement",
    "Stretch",
    "analytic_gaussian_multiplier",
    "classic_multiplier",
    "clip_and_noise",
    "delta_of",
    "epsilon_after",
    "epsilon_of",
    "noisy_mean",
    "noisy_moves",
    "statement",
]
