"""The privacy budget of a run: how many rounds it may play."""

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
    """The section [privacy] of an experiment: how much a run may reveal about its clients.

    epsilon: the budget of the whole run at `delta`; None: no limit, the statement says how much was spent.
    unit, against: the data that the budget protects, and the adversary that it protects them from.
    partial: the budget may cover a part of a client's messages (FedAUX's scores), and leave the others unprotected.
    label_counts: how methods that need each client's label counts get them: exact, dp (Gaussian noise, once, at
    label_epsilon and delta) or none (such a method is refused).
    reproducible: noise and cohorts follow from the run's seed, as everything else does, so that another run repeats
    them. Whoever knows the seed can take the noise away, and the run claims nothing.
    """

    __pydantic_config__ = SECTION
    epsilon: Annotated[Positive | None, Example(8.0)] = None
    delta: OpenShare = 1e-5
    unit: Unit = "client"
    against: Against = "public"
    partial: Flag = False
    label_counts: LabelCounts = "exact"
    label_epsilon: Positive = 1.0
    reproducible: Flag = False

    def __post_init__(self) -> None:
        check_limits("privacy", self)
        if self.delta > LARGEST_DELTA:
            raise FedstillError(
                f"privacy.delta = {self.delta:g}: to publish one client of {1 / self.delta:.3g} outright would keep "
                f"that, whatever epsilon says: use at most {LARGEST_DELTA:g}, and far less than 1 / (number of "
                "clients), e.g. 1e-5"
            )


def rounds_within(privacy: Privacy, after: Callable[[int], Sequence[Stretch]], rounds: int) -> int:
    """Return the last round that the budget allows; `after(n)` lists the stretches of a run after n rounds."""
    if privacy.epsilon is None:
        return rounds

    def fits(played: int) -> bool:
        claim = _claim(privacy, after(played))
        return claim is None or claim.epsilon <= budget

    budget = privacy.epsilon
    _check_claim(privacy, after(rounds))
    _check_claim(privacy, after(1))
    for played, part in enumerate(("the messages before the first round", "the first round")):
        if not fits(played):
            claim = _claim(privacy, after(played))
            spent = "" if claim is None else f" (epsilon = {shown(claim.epsilon)} at delta = {claim.delta:g})"
            problem = f"privacy.epsilon = {budget:g} is too small for {part} alone{spent}"
            raise FedstillError(f"{problem}: allow more, or add more noise")
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
    """Refuse a budget for which the method makes no claim, or only a claim about a part of the messages."""
    made = statement(stretches, privacy.delta)
    claim = made.claim(privacy.unit, privacy.against)
    about = f"privacy.epsilon = {privacy.epsilon:g} for {UNITS[privacy.unit]}, {AGAINST[privacy.against]}"
    if claim is None:
        refused = refusals(stretches, privacy.unit, privacy.against)
        why = "; ".join(refused) or "no part of it adds noise that is fitted to a bound"
        raise FedstillError(f"{about}: this method makes no such claim ({why}): {_cure(privacy, stretches)}")
    if not claim.complete and not privacy.partial:
        covered, unprotected = ", ".join(claim.covered), ", ".join(claim.not_covered)
        raise FedstillError(
            f"{about}: only {covered} can be counted, unprotected are {unprotected}: add noise that covers them "
            f"{EXAMPLE} in every phase, or set privacy.partial = true for a budget of {covered} alone"
        )


def _cure(privacy: Privacy, stretches: Sequence[Stretch]) -> str:
    """Return the advice for a budget whose claim the method does not make."""
    releases = [release for stretch in stretches for release in stretch.releases]
    if not releases:
        return f"add a method that does {EXAMPLE}, or take privacy.epsilon away"
    claims = statement(stretches, privacy.delta).strongest()
    if not claims:
        return "change that, or take privacy.epsilon away"
    parts = ["" if claim.complete else f" with partial = true ({', '.join(claim.covered)} alone)" for claim in claims]
    texts = [f"unit = '{claim.unit}', against = '{claim.against}'" for claim in claims]
    other = ", ".join(dict.fromkeys(release.without_trust for release in releases if release.without_trust))
    use = f"use {other}, or another claim: " if other and privacy.against == "server" else ""
    return f"{use}it has one for {'; '.join(map(str.__add__, texts, parts))}"
