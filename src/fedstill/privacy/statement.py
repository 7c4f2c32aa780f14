"""The privacy that a run may claim: the protected data, epsilon and delta, the adversary, and the open parts.

A claim is made only where its proof goes through:

- Neighbouring federations differ in one sample of one client, or in all that one client holds, replaced by at least one
  sample of any kind. Whoever protects all of a client protects each of its samples; not the other way round.
- Noise that a client adds holds against the server, and so against everybody (post-processing). Noise that a trusted
  server adds holds against the others only.
- A round's release counts only if nothing else that steers later rounds leaves without noise, in a round or before the
  first one. Otherwise the next uploads of other clients would depend on it, and the sensitivity of the release would no
  longer be that of one client. Noise that protects less (a sample, where the claim is about a client) counts as none.
- Poisson sampling amplifies a client-level release of the noisy sum alone, and only if cohorts are really drawn so.
  Where a round's noise depends on that of earlier rounds, no such effect is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

import numpy as np

from fedstill.core.types import Release
from fedstill.privacy.accountant import SMALLEST_DELTA, Event, epsilon_after
from fedstill.privacy.correlated import highest_price

Unit = Literal["sample", "client"]
Against = Literal["server", "public"]
UNITS: dict[Unit, str] = {"client": "all that one client holds", "sample": "each single sample"}
AGAINST: dict[Against, str] = {
    "server": "against everybody, the server included",
    "public": "against everybody but the server, which must be trusted",
}
SECRET = (
    "the noise and Poisson cohorts follow from a secret of the system's entropy, which is not in the run's folder: it "
    "stays with whoever adds the noise, and whoever has it can take the noise away"
)
NUMBERS = (
    "what is hidden and its noise are whole numbers of steps, drawn exactly, so that no last bits of floating point "
    "give a value away; how long a computation takes is not covered"
)
PUBLIC_SEED = "no claim: the seed is public (privacy.reproducible = true), and whoever knows it can take the noise away"
NEIGHBOURS = (
    "who the clients are, that each holds at least one sample, the classes, and the columns of a table with their "
    "words are public; what is protected is what clients hold, whatever else it might be"
)
ONE_RUN = (
    "this is what one run tells: several on the same data (other seeds, methods that are compared, a search over "
    "options) add up"
)
ALWAYS = (
    "a round is played however few uploads are sound, by noise alone where there is none: a quorum above 1 is refused"
)
FOLDER = (
    "the run's folder holds the release and what follows from it and from public data; what clients' own data say is "
    "left out (but for references.json, if the experiment asks for it: it is not covered)"
)
OPEN_FOLDER = (
    "the run's folder holds more than the claim covers (training losses, how many samples of each class a client "
    "holds, digests of the data): it is not to be published where the claim is to hold"
)
MEANT_DELTA = (
    "delta is to be far below 1 / (number of clients; of samples, where these are the unit): to publish one of them "
    "outright, whichever chance picks, has a delta of that size"
)
ROUNDING = 1e-9  # how exactly an epsilon is computed, as a share of it
UNTIL = " until round "
SECRET_COHORT = "each client takes part in a round by its own coin, and nobody learns how it fell"


@dataclass(frozen=True)
class Stretch:
    """The facts about the rounds of one method that a claim rests on, before or after they are played."""

    releases: tuple[Release, ...]
    rounds: int  # 0: only the messages before its first round
    leaves: Mapping[str, str]  # the parts of a client's upload, in the words of Release.covers -> in words for people
    sealed: bool = False  # the server's steps see nothing but the release
    individual: bool = False  # the server's steps look at each client's upload
    asks: bool = False  # clients answer a question before the first round that no release covers
    known: tuple[str, ...] = ()  # facts about the clients' data that everybody knows from the beginning
    probability: float = 1.0  # below 1: of each client to take part in a round (Poisson)
    visits: int | None = None  # rounds in which the client took part that was drawn most often; None: all
    # the factor of a noise -> how many rounds with independent noise cost the same, for the client that pays most
    paid: Mapping[tuple[int, ...], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """(epsilon, delta)-differential privacy of `covered`, for one unit and against one adversary."""

    unit: Unit
    against: Against
    epsilon: float
    delta: float
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the claim covers everything that reaches the adversary."""
        return not self.not_covered

    def text(self) -> str:
        return f"epsilon = {shown(self.epsilon)} {self.about()}"

    def about(self) -> str:
        """Return the claim in words, without its epsilon."""
        covered = ", ".join(self.covered) + ("" if self.complete else " (nothing else that leaves is covered)")
        return f"at delta = {self.delta:g} for {UNITS[self.unit]}, {AGAINST[self.against]}: {covered}"

    def as_dict(self) -> dict[str, Any]:
        """Return the claim for JSON; an infinite epsilon is null, because JSON has no infinity."""
        whom = AGAINST[self.against].removeprefix("against ") if self.complete else None
        epsilon = self.epsilon if math.isfinite(self.epsilon) else None
        return {**asdict(self), "epsilon": epsilon, "complete": self.complete, "complete_against": whom}


@dataclass(frozen=True)
class PrivacyStatement:
    """All claims of a run, and the parts that no claim covers. `text()` is for people, `as_dict()` for privacy.json."""

    rounds: int
    delta: float
    claims: tuple[Claim, ...]
    refused: tuple[str, ...]  # releases without a claim, and why
    open_to_server: Mapping[str, int]  # parts that leave a client unprotected from the server -> the first such round
    open_to_public: Mapping[str, int]  # parts of it that are protected from nobody at all
    assumptions: tuple[str, ...]
    stopped: str = ""  # why the run ended early
    notes: tuple[str, ...] = ()  # further lines of the text
    spent: tuple[tuple[int, float], ...] = ()  # (round, epsilon of the first claim after it), the last one at the end
    with_a_secret: tuple[Claim, ...] = ()  # of a run whose seed is public: what it would claim if it were not

    @property
    def not_covered(self) -> tuple[str, ...]:
        return tuple(self.open_to_server)

    def claim(self, unit: Unit, against: Against) -> Claim | None:
        return next((claim for claim in self.claims if (claim.unit, claim.against) == (unit, against)), None)

    def strongest(self) -> tuple[Claim, ...]:
        """Return the claims that follow from no other claim."""
        return _strongest(self.claims)

    def text(self) -> str:
        """Return the statement for people, mostly two or three lines."""
        lines = [claim.text() for claim in self.strongest()] or [PUBLIC_SEED if self.with_a_secret else "no claim"]
        lines += [f"with a secret seed: {claim.text()}" for claim in _strongest(self.with_a_secret)]
        lines += [f"no claim for {release}" for release in self.refused]
        public = self.open_to_public
        server = {part: since for part, since in self.open_to_server.items() if public.get(part) != since}
        lines += [*_unprotected_lines("anybody", public), *_unprotected_lines("the server", server), *self.notes]
        lines += [self.stopped] if self.stopped else []
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        claims, others = ([claim.as_dict() for claim in some] for some in (self.claims, self.with_a_secret))
        spent = [[number, epsilon if math.isfinite(epsilon) else None] for number, epsilon in self.spent]
        text = {"not_covered": self.not_covered, "text": self.text()}
        return {**asdict(self), "claims": claims, "with_a_secret": others, "spent": spent, **text}


def of_public_seed(made: PrivacyStatement) -> PrivacyStatement:
    """Return the statement of the same run where everybody knows the seed that its noise was drawn from."""
    assumed = tuple(line for line in made.assumptions if line not in (SECRET, SECRET_COHORT))
    return replace(made, claims=(), with_a_secret=made.claims, spent=(), assumptions=assumed)


def _strongest(claims: Sequence[Claim]) -> tuple[Claim, ...]:
    return tuple(claim for claim in claims if not any(_implies(other, claim) for other in claims))


def _unprotected_lines(whom: str, parts: Mapping[str, int]) -> list[str]:
    """Return a line for each round from which on some parts are open."""
    lines: dict[int, list[str]] = {}
    for part, since in parts.items():
        lines.setdefault(since, []).append(part)
    start = {since: "" if since == 1 else f" from round {since} on" for since in lines}
    return [f"NOT protected from {whom}{start[since]}: {'; '.join(lines[since])}" for since in sorted(lines)]


def shown(epsilon: float) -> str:
    """Return an epsilon in four digits, rounded up; an excess below the precision of its computation does not count.

    >>> shown(3.3411), shown(1.0), shown(969.99)
    ('3.342', '1', '970')
    """
    if not math.isfinite(epsilon):
        return f"{epsilon:g}"
    up = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(epsilon * (1 - ROUNDING)))
    return f"{float(up):.4g}"


def refusals(stretches: Sequence[Stretch], unit: Unit, against: Against) -> tuple[str, ...]:
    """Return the releases that protect nothing of this unit against this adversary, each with the reason."""
    return tuple(f"{release}: {why}" for release, why in _ledger(stretches, unit, against).refused.items())


def statement(stretches: Sequence[Stretch], delta: float, *, stopped: str = "") -> PrivacyStatement:
    """Return the privacy statement of methods that ran one after the other."""
    stretches, notes = _resolved(stretches, delta)
    claims: list[Claim] = []
    pairs: list[tuple[Unit, Against]] = [(u, a) for u in ("client", "sample") for a in ("server", "public")]  # type: ignore[misc]
    for unit, against in pairs:
        ledger = _ledger(stretches, unit, against)
        if ledger.events:
            epsilon = epsilon_after(ledger.events, delta)
            claims.append(Claim(unit, against, epsilon, delta, ledger.covered_parts(), tuple(ledger.open)))
    return PrivacyStatement(
        rounds=sum(stretch.rounds for stretch in stretches),
        delta=delta,
        claims=tuple(claims),
        refused=refusals(stretches, "sample", "public"),  # the weakest claim: a release that fails here always fails
        open_to_server=_ledger(stretches, "sample", "server").open,
        open_to_public=_ledger(stretches, "sample", "public").open,
        assumptions=_assumptions(stretches, claims) if claims else (),
        stopped=stopped,
        notes=notes if claims else (),
    )


def _resolved(stretches: Sequence[Stretch], delta: float) -> tuple[Sequence[Stretch], tuple[str, ...]]:
    """Return the stretches and notes; where delta is too small for dp-accounting, cohorts no longer count as secret."""
    amplified = any(_amplified(release, stretch) for stretch in stretches for release in stretch.releases)
    if delta >= SMALLEST_DELTA or not amplified:
        return stretches, ()
    why = f"dp-accounting does not resolve delta = {delta:g} (only from {SMALLEST_DELTA:g} on)"
    note = f"{why}: the effect of Poisson sampling is not counted"
    return [replace(stretch, probability=1.0) for stretch in stretches], (note,)


@dataclass
class _Ledger:
    """The releases of a run that count for one unit and adversary, and the parts that stay open."""

    events: list[Event] = field(default_factory=list)
    covered: dict[str, int] = field(default_factory=dict)  # release -> the last round in which it is covered
    refused: dict[str, str] = field(default_factory=dict)  # release -> why it makes no claim
    open: dict[str, int] = field(default_factory=dict)  # part -> the first round in which it is unprotected
    repeated: set[str] = field(default_factory=set)  # covered releases that are sent each round
    played: int = 0

    def covered_parts(self) -> tuple[str, ...]:
        """Return the covered releases; one that only the first methods cover says until which round."""
        ended = {
            release
            for release, last in self.covered.items()
            if release in self.refused or (release in self.repeated and last < self.played)
        }
        return tuple(f"{part}{UNTIL}{last}" if part in ended else part for part, last in self.covered.items())


def _ledger(stretches: Sequence[Stretch], unit: Unit, against: Against) -> _Ledger:
    ledger = _Ledger()
    spoiled = ""  # the parts that left without noise in an earlier stretch and steer everything after it
    for stretch in stretches:
        begin = ledger.played + 1
        ledger.played += stretch.rounds
        first, later = _unprotected(stretch, unit, against)
        for release in stretch.releases:
            fault = _no_claim(release, stretch, unit, against)
            bare = ", ".join((first if release.when == "once" else {**first, **later}).values())
            steered = f"{bare} leave without {_noise(unit)} and steer what follows" if bare else ""
            if reason := fault or spoiled or steered:
                ledger.refused[release.what] = reason
                if release.when == "once" or not fault:  # else the parts that it was to cover are listed by name
                    ledger.open.setdefault(release.what, begin)
            elif release.when == "once" or stretch.rounds:
                ledger.events.append(_event(release, stretch))
                ledger.covered[release.what] = ledger.played
                ledger.repeated |= {release.what} if release.when == "round" else set()
        unprotected = {**first, **(later if stretch.rounds else {})}
        if unprotected:
            for part in unprotected.values():
                ledger.open.setdefault(part, begin)
            spoiled = f"{', '.join(unprotected.values())} left without {_noise(unit)} in the rounds before"
    return ledger


def _noise(unit: Unit) -> str:
    return "noise" if unit == "sample" else f"noise that hides {UNITS[unit]}"


def _event(release: Release, stretch: Stretch) -> Event:
    assert release.multiplier is not None
    if release.when == "once":
        return Event(release.multiplier)
    if _amplified(release, stretch):
        return Event(release.multiplier, stretch.rounds, stretch.probability)
    if len(release.factor) > 1:
        everybody = [np.zeros(1, np.int64)] * stretch.rounds
        paid = stretch.paid.get(release.factor)
        return Event(release.multiplier, highest_price(everybody, 1, release.factor) if paid is None else paid)
    return Event(release.multiplier, stretch.rounds if stretch.visits is None else stretch.visits)


def _amplified(release: Release, stretch: Stretch) -> bool:
    """Return whether a release is the noisy sum over a secret cohort, and nothing else, with noise of its own."""
    secret = stretch.probability < 1 and stretch.sealed and len(release.factor) == 1
    return secret and release.when == "round" and release.unit == "client" and release.against == "public"


def _no_claim(release: Release, stretch: Stretch, unit: Unit, against: Against) -> str:
    """Return why a release protects nothing of this unit against this adversary; an empty text if it does protect."""
    if release.multiplier is None:
        return release.why or "it has no noise that is fitted to its sensitivity"
    if unit == "client" and release.unit == "sample":
        return "it protects single samples, not all that a client holds"
    if release.against == "server":
        return ""
    if against == "server":
        return "its noise comes after the server has looked"
    if release.when == "round" and stretch.individual:
        return "the server learns from each client's upload, not from the noisy average alone"
    if release.when == "round" and not stretch.sealed:
        return "nothing keeps the server's other steps from the uploads without noise"
    return ""


def _unprotected(stretch: Stretch, unit: Unit, against: Against) -> tuple[dict[str, str], dict[str, str]]:
    """Return the parts that leave a client before the first round, and in a round, and that no valid release covers."""
    void = [release for release in stretch.releases if _no_claim(release, stretch, unit, against)]
    covered = {part for release in stretch.releases if release not in void for part in release.covers}
    later = {part: words for part, words in stretch.leaves.items() if part not in covered}
    names = [release.what for release in void if release.when == "once" and not release.covers]  # others: in `later`
    first = {part: part for part in (*names, *stretch.known)}
    if stretch.asks:
        first["answers"] = "the clients' answers before the first round"
    return first, later


def _assumptions(stretches: Sequence[Stretch], claims: Sequence[Claim]) -> tuple[str, ...]:
    covered = {part.split(UNTIL)[0] for claim in claims for part in claim.covered}
    reasons = [
        f"{release.what}: {release.why}"
        for stretch in stretches
        for release in stretch.releases
        if release.why and release.what in covered
    ]
    pairs = [(release, stretch) for stretch in stretches for release in stretch.releases if release.when == "round"]
    drawn = [SECRET_COHORT if _amplified(release, stretch) else _drawn(stretch) for release, stretch in pairs]
    folder = FOLDER if covers_the_public(claims) else OPEN_FOLDER
    always = [ALWAYS] if any(stretch.sealed for stretch in stretches) else []
    return tuple(
        dict.fromkeys(
            [NEIGHBOURS, ONE_RUN, SECRET, MEANT_DELTA, *filter(None, drawn), *always, *reasons, folder, NUMBERS]
        )
    )


def covers_the_public(claims: Sequence[Claim]) -> bool:
    """Return whether a claim covers everything that reaches those who see what the server publishes."""
    return any(claim.complete and claim.against == "public" for claim in claims)


def _drawn(stretch: Stretch) -> str:
    if stretch.visits is None or stretch.visits >= stretch.rounds:
        return ""
    counted = f"at most {stretch.visits} of {stretch.rounds} rounds"
    return f"a client tells something when it takes part, in {counted}; who takes part may be public"


def _implies(strong: Claim, weak: Claim) -> bool:
    """Return whether a claim follows from another: samples follow from their client, the public from the server."""
    if strong is weak or strong.covered != weak.covered or strong.epsilon > weak.epsilon * (1 + 1e-9):
        return False
    units = strong.unit == weak.unit or strong.unit == "client"
    return units and (strong.against == weak.against or strong.against == "server")
