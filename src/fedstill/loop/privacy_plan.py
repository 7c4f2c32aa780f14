"""What a run promises about privacy before it starts, and states when it ends."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.compose.combine import broadcast_of, first_state
from fedstill.compose.moving import moving
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import Secret, seed_for
from fedstill.core.tree import leaves
from fedstill.core.types import Federation, Local, Method, Model, Need, Phase, Release, Seed, Tree, Weights, no_finish
from fedstill.loop.evaluate import global_test
from fedstill.loop.history import History
from fedstill.loop.round import OPEN_QUESTIONS, Task
from fedstill.privacy.accountant import analytic_gaussian_multiplier
from fedstill.privacy.correlated import highest_price
from fedstill.privacy.noise import gaussian_steps, steps_in
from fedstill.privacy.plan import Privacy, rounds_within
from fedstill.privacy.statement import (
    FOLDER,
    OPEN_FOLDER,
    Claim,
    PrivacyStatement,
    Stretch,
    covers_the_public,
    of_public_seed,
    statement,
)
from fedstill.storage.files import write_whole

STATEMENT_FILE = "privacy.json"
START = (
    "NOT hidden as well: what the first model (model.start) tells of the data that it was trained on. If clients of "
    "this run held some of them, the claim of that training adds up with this one"
)
MEASURED = (
    "NOT hidden as well: how well models do on rows that clients hold (evaluate, data.client_test_share). These "
    "numbers have no noise. They choose the best model, and may end the run: publish the last model of a run of fixed "
    "length"
)
CHOSEN = (
    "NOT hidden as well: {}, by which the best model is chosen or the run ends. These numbers have no noise: publish "
    "the last model of a run of fixed length"
)
# (first round, last round, the factor of the noise) -> what the client pays that pays most, in rounds
Price = Callable[[int, int, Sequence[int]], float]
POINTS = 20  # rounds after which a statement says what has been spent
_log = logging.getLogger("fedstill.run")


def stretches_of(
    phases: Sequence[Phase],
    weights: Weights,
    privacy: Privacy,
    *,
    sent: Weights | None = None,
    probability: float = 1.0,
    price: Price | None = None,
    known: tuple[str, ...] = (),
) -> Callable[[int], list[Stretch]]:
    """What has left the clients when so many rounds are played, as a function of their number.

    sent: what of the weights a client sends; None: all.
    price: what the client pays for some rounds that pays most; None: one that takes part in all of them.
    known: what of the clients' data everybody knows by how they were read.
    """
    ends = [phase.until for phase in phases]
    firsts = [1, *(end + 1 for end in ends[:-1] if end is not None)]
    sent = weights if sent is None else sent
    plain = [replace(_stretch(phase.method, weights, sent, probability), known=known) for phase in phases]
    plain = _with_label_counts(plain, phases, privacy)

    def after(played: int) -> list[Stretch]:
        begun = [i for i, first in enumerate(firsts) if first <= max(played, 1)]
        return [_played(plain[i], firsts[i], min(played, ends[i] or played), price) for i in begun]

    return after


def _played(stretch: Stretch, first: int, last: int, price: Price | None) -> Stretch:
    rounds = max(0, last - first + 1)
    if price is None or not rounds:
        return replace(stretch, rounds=rounds, visits=rounds)
    paid = {factor: price(first, last, factor) for factor in {(1,), *(release.factor for release in stretch.releases)}}
    return replace(stretch, rounds=rounds, visits=int(paid[1,]), paid=paid)


def _stretch(method: Method, weights: Weights, sent: Weights, probability: float) -> Stretch:
    trained = "trained models" if sent.params.keys() == weights.params.keys() else "trained heads"
    leaves = {"model": trained, "numbers": "numbers of samples and steps, training losses"}
    if sent.buffers:
        leaves["buffers"] = "BatchNorm statistics"
    if Need.LABEL_COUNTS_UPLOADED in needs_of(method):
        leaves["label_counts"] = "label counts"
    if slots := extra_slots(method, weights):
        leaves["extra"] = ", ".join(slots)
    return Stretch(
        method.releases,
        rounds=0,
        leaves=leaves,
        sealed=method.trusted is not None,
        individual=Need.INDIVIDUAL_UPLOADS in needs_of(method),
        probability=probability,
    )


def _with_label_counts(stretches: list[Stretch], phases: Sequence[Phase], privacy: Privacy) -> list[Stretch]:
    """Noisy label counts are made once: by the first method that needs them, the others get the same."""
    needing = [i for i, phase in enumerate(phases) if Need.LABEL_COUNTS_UPLOADED in needs_of(phase.method)]
    if privacy.label_counts != "dp" or not needing:
        return stretches
    release = Release(
        "label counts",
        unit="sample",
        multiplier=analytic_gaussian_multiplier(privacy.label_epsilon, privacy.delta),
        when="once",
        against="server",
        covers=("label_counts",),
    )
    for i in needing:
        if i == needing[0]:
            stretches[i] = replace(stretches[i], releases=(*stretches[i].releases, release))
        else:
            others = {part: text for part, text in stretches[i].leaves.items() if part != "label_counts"}
            stretches[i] = replace(stretches[i], leaves=others)
    return stretches


def extra_slots(method: Method, weights: Weights) -> tuple[str, ...]:
    """Return the slots that a client sends beside its model: call its objective's `finish` once, without data."""
    objective = method.objective
    if objective.finish is no_finish:
        return ()
    unit = torch.ones((), device=next(iter(weights.params.values())).device)
    measured: Tree = defaultdict(lambda: weights.params)
    try:
        received = broadcast_of(method, first_state(method, weights))
        state = objective.init(weights)
        numbers = {"label_counts": unit[None], "size": unit, "steps": unit, "travel": unit, "lr": unit}
        seed = torch.zeros_like(unit, dtype=torch.int64)
        local = Local(weights.params, weights.buffers, weights, received, state, {}, **numbers, seed=seed)
        return tuple(objective.finish(local, measured)[1])
    except Exception:  # a term that cannot be tried: say the worst
        return ("what its local terms send beside the model",)


def check_seal(phases: Sequence[Phase], model: Model, weights: Weights, quorum: int = 1) -> None:
    """A trusted party that shows only a noisy mean cannot serve a method that needs more.

    quorum: uploads that a round's largest cohort needs. Rounds that are not played tell who came to those that are.
    """
    for phase in phases:
        if phase.method.trusted is None:
            continue
        local_forms = ", ".join(release.without_trust for release in phase.method.releases if release.without_trust)
        beside = list(extra_slots(phase.method, weights))
        if Need.LABEL_COUNTS_UPLOADED in needs_of(phase.method):
            beside.append("label counts")
        missing = [*beside]
        if Need.INDIVIDUAL_UPLOADS in needs_of(phase.method):
            missing.append("each client's model")
        if model.groups is not None:
            missing.append("which client has which architecture")
        if missing:
            raise FedstillError(
                f"a server that is trusted with the noise shows its steps the noisy mean alone, and this method needs "
                f"{', '.join(missing)}: {_instead_of_trust(local_forms, beside)}"
            )
        if quorum > 1:
            raise FedstillError(
                "guard.quorum above 1 tells how many uploads were sound, which the noise of a trusted server does not "
                "hide: set guard.quorum = 1" + (f", or use {local_forms}" if local_forms else "")
            )


def _instead_of_trust(local_form: str, beside: Sequence[str]) -> str:
    """Return advice where a noisy mean is not enough; the clients' own noise hides nothing sent `beside` it."""
    if not local_form:
        return "use another method beside it"
    if not beside:
        return f"use {local_form}, or another method beside it"
    parts = ", ".join(beside)
    return f"use another method beside it ({local_form} would run, and claim nothing: it puts no noise on {parts})"


def noisy_label_counts(counts: Tensor, privacy: Privacy, seed: Seed) -> Tensor:
    """(N, K) with Gaussian noise, cut at 0: a replaced sample moves one count down and one up, by sqrt(2) together."""
    sigma = math.sqrt(2) * analytic_gaussian_multiplier(privacy.label_epsilon, privacy.delta)
    steps = steps_in(1.0, sigma)  # in one sample
    drawn = [
        gaussian_steps(seed_for(seed, "label counts", client), counts.shape[1:], sigma * steps)
        for client in range(len(counts))
    ]
    return (counts + (torch.stack(drawn).double() / steps).to(counts)).clamp_min(0.0)


@dataclass(frozen=True)
class Promise:
    """How far a run may go, and its statement about privacy."""

    rounds: int  # as many as the budget allows
    wanted: int
    privacy: Privacy
    after: Callable[[int], list[Stretch]] | None  # None: no part of the run speaks of privacy
    closed: bool = False  # the run's folder holds nothing that the claim does not cover: see loop/closed_folder.py
    beside: tuple[str, ...] = ()  # what the claim does not speak of, in words
    known: dict[int, Claim | None] = field(default_factory=dict)  # after some rounds: the first one

    @property
    def cut(self) -> str:
        """Why the run is shorter than it was asked to be; empty where it is not."""
        if self.rounds == self.wanted:
            return ""
        allowed = f"{self.rounds} of {self.wanted} rounds"  # true of a resumed run that has played more, too
        return f"privacy.epsilon = {self.privacy.epsilon:g} allows {allowed}: one more would exceed it"

    def statement(self, history: History, played: int) -> PrivacyStatement | None:
        """Return the statement of a run that has played so many rounds; answers without a release count, too."""
        if self.after is None:
            return None
        asked = {int(row["round"]) for row in history.rows if row.get(OPEN_QUESTIONS)}
        made = statement(self._stretches(asked, played), self.privacy.delta, stopped=self._ended(played))
        if not self.closed:
            assumed = tuple(OPEN_FOLDER if line == FOLDER else line for line in made.assumptions)
            made = replace(made, assumptions=assumed)
        notes = (*made.notes, *self.beside) if made.claims else made.notes
        made = replace(made, spent=self._spent(asked, made), notes=notes)
        return of_public_seed(made) if self.privacy.reproducible and made.claims else made

    def _spent(self, asked: Collection[int], made: PrivacyStatement) -> tuple[tuple[int, float], ...]:
        """Return the epsilon of the first claim after evenly spaced rounds and at the end.

        Rounds after which there is no claim for its unit against its adversary are left out.
        """
        if not made.claims:
            return ()
        claim, spent = made.claims[0], []
        for number in range(step := math.ceil(self.rounds / POINTS), made.rounds, step):
            if number not in self.known:
                claims = statement(self._stretches(asked, number), self.privacy.delta).claims
                self.known[number] = claims[0] if claims else None
            then = self.known[number]
            if then is not None and (then.unit, then.against) == (claim.unit, claim.against):
                spent.append((number, then.epsilon))
        return (*spent, (made.rounds, claim.epsilon))

    def _stretches(self, asked: Collection[int], played: int) -> list[Stretch]:
        """Return what has left the clients after some rounds; `asked`: rounds with a question that nothing covers."""
        assert self.after is not None
        stretches, first = self.after(played), 1
        for i, stretch in enumerate(stretches):
            if first in asked:
                stretches[i] = replace(stretch, asks=True)
            first += stretch.rounds
        return stretches

    def _ended(self, played: int) -> str:
        """Why a run ended that has played so many rounds, or how far a resumed one was beyond its budget."""
        if played <= self.rounds or self.after is None or self.privacy.epsilon is None:
            return self.cut if played >= self.rounds else ""
        privacy = replace(self.privacy, partial=True)  # another line names the parts that are not covered
        last = self.rounds if self.cut else rounds_within(privacy, self.after, played)
        if last == played:
            return ""
        since = f"privacy.epsilon = {privacy.epsilon:g} is exceeded since round {last + 1}"
        return f"{since}: these {played} rounds were played with another budget"


def make_promise(task: Task, weights: Weights, rounds: int) -> tuple[Task, Promise]:
    """The task with what may be sent for the label counts, and how many of its rounds the budget allows."""
    task, privacy = with_sent_counts(task), task.privacy
    largest = len(task.clients) if task.sampling == "poisson" else task.cohort
    check_seal(task.phases, task.model, weights, task.guard.needed(largest))
    if privacy == Privacy() and not any(phase.method.releases for phase in task.phases):
        return task, Promise(rounds, rounds, privacy, None)
    probability = task.cohort / len(task.clients) if task.sampling == "poisson" else 1.0
    how: dict[str, Any] = {"probability": probability, "price": _price(task), "known": task.federation.public_facts}
    after = stretches_of(task.phases, weights, privacy, sent=_sent_of(weights, task), **how)
    allowed, closed = rounds_within(privacy, after, rounds), can_be_closed(task, weights, after(rounds))
    beside = tuple(filter(None, (shared_rows(task.federation), START if task.warm else "", _measured_rows(task))))
    return task, Promise(allowed, rounds, privacy, after, closed=closed, beside=beside)


def _measured_rows(task: Task) -> str:
    """Say that clients' own rows choose the best model; empty: they do not."""
    return MEASURED if task.evaluate is not global_test or task.federation.client_test is not None else ""


def shared_rows(federation: Federation) -> str:
    """Say which rows several clients hold, because what hides one client does not hide them; empty: there are none."""
    holders = np.unique(federation.indices.cpu().numpy(), return_counts=True)[1]
    if not len(holders) or holders.max() == 1:
        return ""
    most, count = int(holders.max()), int((holders > 1).sum())
    return (
        f"NOT hidden as well: {count:,} row{'s' if count > 1 else ''} that several clients hold. epsilon is for one "
        f"client or sample in one place, and for a row with {most} clients it is {most} times as large"
    )


def can_be_closed(task: Task, weights: Weights, stretches: Sequence[Stretch]) -> bool:
    """Return whether the run's folder can hold nothing that its claim does not cover.

    It cannot where clients keep memories, which lie in checkpoints, where they test on rows of their own, and where a
    function of the user's measures the model, because it may look at anything.
    """
    made = statement(stretches, task.privacy.delta)
    remembered = any(phase.method.objective.init(weights) for phase in task.phases)
    return covers_the_public(made.claims) and not (task.privacy.reproducible or remembered or _measured_rows(task))


def with_sent_counts(task: Task) -> Task:
    """Return the task with the label counts that clients may send: exact ones, or with noise."""
    privacy = task.privacy
    if task.counts is not None and privacy.label_counts == "none":
        raise FedstillError(
            f"privacy.label_counts = 'none': this method needs each client's label counts: {_instead_of_counts(task)}"
        )
    if task.counts is not None and privacy.label_counts == "dp":
        return replace(task, counts=noisy_label_counts(task.counts, privacy, task.noise_seed))
    return task


def rounds_a_client_may_play(task: Task, weights: Weights, rounds: int) -> int | None:
    """Return how many rounds one client may play under `privacy.epsilon`, whoever draws it; None: it has no budget."""
    if task.privacy.epsilon is None:
        return None
    return rounds_within(task.privacy, stretches_of_client(task, weights), rounds)


def stretches_of_client(task: Task, weights: Weights) -> Callable[[int], list[Stretch]]:
    """Return what has left one client that took part in every round until now, as a function of their number."""
    known = task.federation.public_facts
    return stretches_of(task.phases, weights, task.privacy, sent=_sent_of(weights, task), known=known)


def _sent_of(weights: Weights, task: Task) -> Weights:
    return moving(weights, task.model, task.training.part)


def _instead_of_counts(task: Task) -> str:
    """Return the advice where label counts are needed and may not be sent."""
    needing = [phase.method for phase in task.phases if Need.LABEL_COUNTS_UPLOADED in needs_of(phase.method)]
    alternatives = dict.fromkeys(phase.without_counts for phase in needing)
    use = f"use {' and '.join(alternatives)}, or " if all(alternatives) else ""
    return f"{use}set 'dp' or 'exact'"


def warn_of_kept_statistics(task: Task) -> None:
    covered = {part for phase in task.phases for release in phase.method.releases for part in release.covers}
    if task.model.traits.batch_statistics and "buffers" in covered:
        _log.warning("BatchNorm: its statistics never leave the clients, the model keeps those it began with")


def noise_of(phases: Sequence[Phase]) -> list[str]:
    """Return the noise of each method's rounds, to the last digit: a resumed run must go on with the same."""
    if not any(phase.method.releases for phase in phases):
        return []

    def in_words(release: Release) -> str:
        covers = ", ".join(release.covers) or "itself"
        about = f"{release.unit}, {release.against}, {release.when}, covers {covers}"
        bands = f" in bands of {release.factor}" if len(release.factor) > 1 else ""
        return f"{release.what} ({about}) with noise of {release.multiplier!r}{bands}"

    def until(phase: Phase) -> str:
        return "to the end" if phase.until is None else f"until round {phase.until}"

    return [f"{until(phase)}: {'; '.join(map(in_words, phase.method.releases)) or 'no noise'}" for phase in phases]


def is_noisy(task: Task) -> bool:
    """Return whether a part of the run adds noise that protects."""
    noisy = any(release.multiplier is not None for phase in task.phases for release in phase.method.releases)
    return noisy or task.privacy.label_counts == "dp"


def fingerprint(task: Task, identity: Mapping[str, Any], settings: str, *, start: Weights, secret: bytes = b"") -> str:
    """What tells a run with noise that protects from all others, its data among it; empty where there is none.

    It covers all that changes a release. With a secret nobody can compare it with the fingerprint of other data.
    settings: the options that `identity` does not say. start: the model of round 0.
    """
    if not is_noisy(task):
        return ""
    federation, train, engine = task.federation, task.federation.train, task.engine
    how = [engine.name, torch.device(engine.device).type, str(getattr(engine, "precision", ""))]
    stays = {str(client): stay for client, stay in sorted(task.stays.items())}
    rules = [asdict(task.guard), how, stays, task.spare, task.clients.tolist()]
    words = json.dumps([identity, settings, train.mean, train.std, rules], sort_keys=True)
    hashed = hashlib.blake2b(words.encode(), digest_size=16, key=secret)
    data = (train.x, train.y, federation.indices, federation.offsets, task.unlabeled, *(task.validation or ()))
    for part in (part for part in (*data, *leaves(start)) if part is not None):
        hashed.update(f"{part.dtype} {tuple(part.shape)} ".encode())
        hashed.update(np.ascontiguousarray(part.cpu().numpy()).data)
    return hashed.hexdigest()


def noise_seed(seed: Seed, run: str, secret: bytes = b"") -> Seed:
    """Where the noise comes from: runs that differ in anything share none, or it would cancel in what they differ by.

    So several runs add up, with one seed too: other options, one more sample, compared methods.
    run: its fingerprint. secret: of the run, without which the noise follows from the seed.
    """
    if secret and run:
        return Secret.of(secret).below("noise that protects", run)
    return seed_for(seed, "noise that protects", run) if run else seed


def settings_of(privacy: Privacy) -> dict[str, Any]:
    """All of [privacy] but the budget, which a resumed run may change."""
    return {key: value for key, value in asdict(privacy).items() if key != "epsilon"}


def _price(task: Task) -> Price:
    """Who takes part does not depend on what anybody holds, so a client has told only what it sent when drawn."""

    def price(first: int, last: int, factor: Sequence[int]) -> float:
        drawn = [task.drawn(number) for number in range(first, last + 1)]
        return highest_price(drawn, task.federation.population, factor)

    return price


def write_statement(made: PrivacyStatement | None, folder: Path | None) -> None:
    """privacy.json of a run folder."""
    if made is not None and folder is not None:
        write_whole(folder / STATEMENT_FILE, json.dumps(made.as_dict(), indent=2) + "\n")
