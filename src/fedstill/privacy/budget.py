"""A budget: how many rounds a run may play before it has told more than it was allowed to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedstill.core.errors import FedstillError
from fedstill.privacy.statement import AGAINST, UNITS, Against, Claim, Stretch, Unit, statement

LabelCounts = Literal["exact", "dp", "none"]


@dataclass(frozen=True)
class Privacy:
    """What a run may tell; the words of [privacy] in an experiment file.

    epsilon: the budget of the whole run at `delta`; None: no limit, the statement says what was spent.
    unit, against: what the budget is about.
    partial: it may be about a part of what leaves a client (FedAUX's scores), and the rest is unprotected.
    label_counts: how methods that need each client's label counts get them: exact, dp (Gaussian noise, once, at
    label_epsilon and delta) or none (such a method is refused).
    """

    epsilon: float | None = None
    delta: float = 1e-5
    unit: Unit = "client"
    against: Against = "public"
    partial: bool = False
    label_counts: LabelCounts = "exact"
    label_epsilon: float = 1.0


def rounds_within(privacy: Privacy, after: Callable[[int], Sequence[Stretch]], rounds: int) -> int:
    """The last round that the budget allows; `after` tells what has left clients when so many rounds are played."""
    if privacy.epsilon is None:
        return rounds

    def fits(played: int) -> bool:
        claim = _claim(privacy, after(played))
        return claim is None or claim.epsilon <= budget

    budget = privacy.epsilon
    _check_claim(privacy, after(1))
    _check_claim(privacy, after(rounds))
    if not fits(0):
        raise FedstillError(_too_much(privacy, after(0), "what is sent before the first round"))
    if not fits(1):
        raise FedstillError(_too_much(privacy, after(1), "the first round"))
    if fits(rounds):
        return rounds
    low, high = 1, rounds  # the first fits, the last does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _claim(privacy: Privacy, stretches: Sequence[Stretch]) -> Claim | None:
    return statement(stretches, privacy.delta).claim(privacy.unit, privacy.against)


def _check_claim(privacy: Privacy, stretches: Sequence[Stretch]) -> None:
    """A budget needs something that it can be about."""
    made = statement(stretches, privacy.delta)
    claim = made.claim(privacy.unit, privacy.against)
    about = f"privacy.epsilon = {privacy.epsilon:g} for {UNITS[privacy.unit]}, {AGAINST[privacy.against]}"
    if claim is None:
        why = "; ".join(made.refused) or "no part of it adds noise that is fitted to a bound"
        other = "; ".join(f"unit = '{one.unit}', against = '{one.against}'" for one in made.claims)
        cure = f"it has one for {other}" if other else "add dp_fedavg, or take privacy.epsilon away"
        raise FedstillError(f"{about}: this method makes no such claim ({why}): {cure}")
    if not claim.complete and not privacy.partial:
        told, rest = ", ".join(claim.covered), ", ".join(claim.not_covered)
        raise FedstillError(
            f"{about}: only {told} can be counted, unprotected are {rest}: add dp_fedavg, or set "
            f"privacy.partial = true for a budget of {told} alone"
        )


def _too_much(privacy: Privacy, stretches: Sequence[Stretch], what: str) -> str:
    claim = _claim(privacy, stretches)
    spent = "" if claim is None else f" (epsilon = {claim.epsilon:.4g} at delta = {claim.delta:g})"
    return f"privacy.epsilon = {privacy.epsilon:g}: {what} alone takes more{spent}: allow more, or add more noise"
