"""A site at work: its rows are read and checked, its people consent, and a desk answers orders at a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from fedstill.core.errors import FedstillError
from fedstill.core.trainer import threads
from fedstill.core.types import Dataset, Federation
from fedstill.data import hold_client_tests
from fedstill.deploy.consent import given_consent, record_consent, what_leaves
from fedstill.deploy.folder import SiteFolder
from fedstill.deploy.metrics import METRICS_FILE, SiteMetrics
from fedstill.deploy.rows import Rows, read_rows
from fedstill.deploy.socket import serve
from fedstill.experiment.build import build
from fedstill.population.desk import Desk, only_client
from fedstill.population.wire import shown, unseal
from fedstill.report import human_bytes
from fedstill.storage.files import working_in


@dataclass(frozen=True)
class OpenedSite:
    """A site that is ready to ask for consent."""

    folder: SiteFolder
    rows: Rows
    desk: Desk
    text: str  # what would leave


def open_site(site: SiteFolder) -> OpenedSite:
    """Read and check a site's rows, and prepare its desk; nothing is answered yet."""
    rows = read_rows(site.experiment, site.data)
    desk = desk_of(site, rows.data)
    return OpenedSite(site, rows, desk, what_leaves(site, desk))


def desk_of(site: SiteFolder, data: Dataset) -> Desk:
    """Return the desk of a site with these rows. Its budget is the smaller one of the experiment's and its own."""
    experiment, wanted = site.experiment, site.experiment.privacy.epsilon
    if site.epsilon is not None:
        least = site.epsilon if wanted is None else min(wanted, site.epsilon)
        experiment = experiment.model_copy(update={"privacy": replace(experiment.privacy, epsilon=least)})
    built = build(experiment, federation_of(site, data))
    site.memory.mkdir(parents=True, exist_ok=True)
    site.memory.chmod(0o700)  # what it remembers follows from its rows
    return Desk(
        built,
        site.client,
        site.memory,
        run=site.facts,
        begin_anew=site.begin_anew,
        # what a model gets right has no noise, so under a budget nobody hears it
        evaluates=site.evaluates and experiment.data.client_test_share > 0 and experiment.privacy.epsilon is None,
    )


def federation_of(site: SiteFolder, data: Dataset) -> Federation:
    """Return a federation in which only this site has rows; it holds some back to measure on, as a simulation does."""
    everybody = torch.zeros(site.seats + 1, dtype=torch.int64)
    frame = Federation(replace(data, x=data.x[:0], y=data.y[:0]), data, everybody[:0], everybody)
    alone, share = only_client(data, site.client, frame), site.experiment.data.client_test_share
    return hold_client_tests(alone, share, seed=site.experiment.seed) if share else alone


def consent(opened: OpenedSite, *, yes: bool, ask: Callable[[], bool] | None) -> str:
    """Make sure that somebody consented to exactly what would leave, and return who and when; refuse without.

    ask: asks the person in front; None: nobody is there.
    """
    folder, text = opened.folder.folder, opened.text
    if given := given_consent(folder, text):
        return given
    if not yes and ask is None:
        raise FedstillError(
            "nobody consented to what would leave this site: read it above, and call this command with --yes, or in a "
            "terminal"
        )
    if not yes and ask is not None and not ask():
        raise FedstillError("without consent nothing is answered; nothing has left this site")
    record_consent(folder, text, how="--yes" if yes else "typed")
    return given_consent(folder, text)


def serve_site(opened: OpenedSite, *, tell: Callable[[str], None], stop: threading.Event | None = None) -> None:
    """Answer orders until `stop` is set; tell a line for each."""
    site, count = opened.folder, opened.folder.experiment.engine.threads
    working = _Working(opened, tell)
    with ExitStack() as held:
        held.enter_context(working_in(site.memory))  # two services over one memory would count a budget twice
        held.enter_context(nullcontext() if count is None else threads(count))
        serve(
            working,
            site.socket,
            stop=stop,
            group=site.group,
            ready=lambda: tell(f"ready: {site.name} waits for orders at {site.socket}"),
        )


class _Working:
    """A desk that says a line for each order, and keeps the numbers for Prometheus."""

    def __init__(self, opened: OpenedSite, tell: Callable[[str], None]) -> None:
        self.desk, self.tell, site = opened.desk, tell, opened.folder
        self.metrics = SiteMetrics(site.folder / METRICS_FILE, site.run, site.name)

    def answer(self, common: bytes, own: bytes) -> bytes:
        began = time.perf_counter()
        answer = self.desk.answer(common, own)
        seconds = time.perf_counter() - began
        facts = unseal(answer, limit=len(answer)).facts
        order, number = _order(common, self.desk.largest)
        self.metrics.round = number or self.metrics.round
        with suppress(OSError):  # a full disk keeps no answer from leaving that the audit has
            self.metrics.note(len(common) + len(own), answer, seconds)
        sizes = f"{human_bytes(len(common) + len(own))} came, {human_bytes(len(answer))} left"
        if facts["kind"] == "refused":
            self.tell(f"{order}: refused, {shown(facts.get('reason'), 200)} ({sizes})")
        else:
            self.tell(f"{order}: answered in {seconds:.2f} s ({sizes})")
        return answer


def _order(common: bytes, limit: int) -> tuple[str, int]:
    """Return an order in words, and its round; 0 where it has none."""
    try:
        facts = unseal(common, limit=limit).facts
    except FedstillError:
        return "an order that cannot be read", 0
    number = facts.get("round")
    known = number if type(number) is int and 0 < number < 10**9 else 0
    request = "trained" if facts.get("kind") == "play" else f"question '{shown(facts.get('question'))}'"
    return f"round {known}: {request}", known
