"""A budget: how many rounds a run may play before it has told more than it was allowed to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fedstill.core.errors import FedstillError
from fedstill.core.limits import SECTION, Example, Flag, OpenShare, Positive, check_limits
from fedstill.privacy.statement import AGAINST, UNITS, Against, Claim, Stretch, Unit, refusals, shown, statement

LabelCounts = Literal["exact", "dp", "none"]
EXAMPLE = "(e.g. dp_fedavg)"  # for a method without any noise; one that has some names its own way to more
LARGEST_DELTA = 0.1


@dataclass(frozen=True)
class Privacy:
    """What a run may tell; the words of [privacy] in an experiment file.

    epsilon: the budget of the whole run at `delta`; None: no limit, the statement says what was spent.
    unit, against: what the budget is about.
    partial: it may be about a part of what leaves a client (FedAUX's scores), and the rest is unprotected.
    label_counts: how methods that need each client's label counts get them: exact, dp (Gaussian noise, once, at
    label_epsilon and delta) or none (such a method is refused).
    """

    __pydantic_config__ = SECTION
    epsilon: Annotated[Positive | None, Example(8.0)] = None
    delta: OpenShare = 1e-5
    unit: Unit = "client"
    against: Against = "public"
    partial: Flag = False
    label_counts: LabelCounts = "exact"
    label_epsilon: Positive = 1.0

    def __post_init__(self) -> None:
        check_limits("privacy", self)
        if self.delta > LARGEST_DELTA:
            raise FedstillError(
                f"privacy.delta = {self.delta:g}: to publish one client of {1 / self.delta:.3g} outright would keep "
                f"that, whatever epsilon says: use at most {LARGEST_DELTA:g}, and far less than 1 / (number of "
                "clients), e.g. 1e-5"
            )


def rounds_within(privacy: Privacy, after: Callable[[int], Sequence[Stretch]], rounds: int) -> int:
    """The last round that the budget allows; `after` tells what has left clients when so many rounds are played."""
    if privacy.epsilon is None:
        return rounds

    def fits(played: int) -> bool:
        claim = _claim(privacy, after(played))
        return claim is None or claim.epsilon <= budget

    budget = privacy.epsilon
    _check_claim(privacy, after(rounds))
    _check_claim(privacy, after(1))
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
        refused = refusals(stretches, privacy.unit, privacy.against)
        why = "; ".join(refused) or "no part of it adds noise that is fitted to a bound"
        raise FedstillError(f"{about}: this method makes no such claim ({why}): {_cure(privacy, stretches)}")
    if not claim.complete and not privacy.partial:
        told, rest = ", ".join(claim.covered), ", ".join(claim.not_covered)
        raise FedstillError(
            f"{about}: only {told} can be counted, unprotected are {rest}: add noise that covers them {EXAMPLE} in "
            f"every phase, or set privacy.partial = true for a budget of {told} alone"
        )


def _cure(privacy: Privacy, stretches: Sequence[Stretch]) -> str:
    """What to do about a claim that is not made."""
    releases = [release for stretch in stretches for release in stretch.releases]
    if not releases:
        return f"add a method that does {EXAMPLE}, or take privacy.epsilon away"
    claims = statement(stretches, privacy.delta).strongest()
    if not claims:
        return "change that, or take privacy.epsilon away"
    has = "; ".join(f"unit = '{one.unit}', against = '{one.against}'{_alone(one)}" for one in claims)
    own = ", ".join(dict.fromkeys(one.without_trust for one in releases if one.without_trust))
    use = f"use {own}, or another claim: " if own and privacy.against == "server" else ""
    return f"{use}it has one for {has}"


def _alone(claim: Claim) -> str:
    return "" if claim.complete else f" with partial = true ({', '.join(claim.covered)} alone)"


def _too_much(privacy: Privacy, stretches: Sequence[Stretch], what: str) -> str:
    claim = _claim(privacy, stretches)
    spent = "" if claim is None else f" (epsilon = {shown(claim.epsilon)} at delta = {claim.delta:g})"
    return f"privacy.epsilon = {privacy.epsilon:g}: {what} alone takes more{spent}: allow more, or add more noise"
