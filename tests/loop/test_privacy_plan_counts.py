"""Label counts that a method reads every round: one draw of noise a client, and a way on for those who send none."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from running import changed_on_the_way, federate

from fedstill.about.toy import trial_federation, trial_model
from fedstill.compose.join import join
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.trainer import CohortEngine
from fedstill.core.types import Mechanism, Method, Need, Phase, ServerStep, Training
from fedstill.engine import build_engine
from fedstill.local.terms import cross_entropy
from fedstill.loop.evaluate import label_counts
from fedstill.methods import METHODS, dp_fedavg, fedavg, fedprox
from fedstill.methods.lookup import build_method
from fedstill.privacy.plan import Privacy
from fedstill.server.aggregate import average

DP = Privacy(label_counts="dp", label_epsilon=2.0)
NONE = Privacy(label_counts="none")
ZERO = torch.tensor([0])
FORM = "counter(labels='uniform', ensemble='uniform')"


def run(method, **how):
    settings = {
        "model": trial_model(), "federation": trial_federation(), "training": Training(batch_size=8, lr=0.05),
        "rounds": 6, "cohort": 2, "engine": "looped", "device": "cpu",
    }  # fmt: skip
    return federate(method=method, **{**settings, **how})


def counter(seen: list, *, labels: str = "quota", ensemble: str = "class") -> Method:
    """Reads every client's label counts in every round, unless both of its options can do without."""
    counts = frozenset({Need.LABEL_COUNTS_UPLOADED}) if {labels, ensemble} != {"uniform"} else frozenset()

    def look(candidate, state, round):
        told = round.uploads.label_counts
        own = None if told is None else dict(zip(round.uploads.ids.tolist(), told, strict=True))
        seen.append((round.number, own))
        return candidate, state

    step = ServerStep("look", look, needs=counts)
    return Method(cross_entropy(), average(), (step,), without_counts=FORM if counts else "")


def by_client(seen: list) -> dict[int, list[torch.Tensor]]:
    told: dict[int, list[torch.Tensor]] = {}
    for _, counts in seen:
        for client, own in counts.items():
            told.setdefault(client, []).append(own)
    return told


def test_exact_counts_are_the_clients_own_in_every_round():
    seen: list = []
    run(counter(seen))
    exact = label_counts(trial_federation())
    assert len(seen) == 6
    assert all(torch.equal(one, exact[client]) for client, own in by_client(seen).items() for one in own)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_client_sends_one_draw_of_noise_however_often_it_is_drawn(sampling):
    """Fresh noise every round would let the server average it away: six rounds at epsilon 2 are far more than 2."""
    seen: list = []
    result = run(counter(seen), privacy=DP, sampling=sampling, seed=1)
    told, exact = by_client(seen), label_counts(trial_federation())
    assert max(map(len, told.values())) >= 3
    for client, own in told.items():
        assert all(torch.equal(one, own[0]) for one in own)
        assert not torch.equal(own[0], exact[client])
    first, other, *_ = ((own[0] - exact[client])[exact[client] > 0] for client, own in told.items())
    assert not torch.isclose(first, other, atol=1e-6).any()  # each client draws its own
    assert result.privacy.claim("sample", "server").epsilon == pytest.approx(2.0, rel=1e-6)


def test_a_resumed_run_sends_the_same_noise_and_is_charged_once(tmp_path):
    whole, cut, rest = [], [], []
    all_of_it = run(counter(whole), privacy=DP)
    where = {"privacy": DP, "run_dir": tmp_path / "run", "checkpoint_every": 1}
    run(counter(cut), rounds=3, **where)
    resumed = run(counter(rest), resume=True, **where)
    for (number, one), (same, other) in zip(whole, cut + rest, strict=True):
        assert number == same
        assert all(torch.equal(own, other[client]) for client, own in one.items())
    assert resumed.privacy.as_dict() == all_of_it.privacy.as_dict()
    with pytest.raises(FedstillError, match=r"privacy\.label_epsilon was 2\.0 and is 1\.0"):
        run(counter([]), resume=True, **{**where, "privacy": Privacy(label_counts="dp")})


LIARS = torch.tensor([True, True, False, False])  # clients 0 and 1


@pytest.mark.parametrize("privacy", [Privacy(), DP])
def test_label_counts_that_no_client_can_hold_are_quarantined_and_the_run_goes_on(privacy):
    """Two of 3e38 are inf in float32, and labels in such proportions cannot be drawn."""

    def lie(uploads, start, seed):
        many = uploads.label_counts.index_fill(1, ZERO, 3e38)
        return uploads._replace(label_counts=torch.where(LIARS[:, None], many, uploads.label_counts))

    seen: list = []
    result = run(changed_on_the_way(counter(seen), lie), rounds=2, cohort=4, privacy=privacy)
    told = "label counts hold a number that is not in [0, 1e+09]"
    assert [(r["round"], r["client"], r["reason"]) for r in result.audit] == [
        (t, c, told) for t in (1, 2) for c in (0, 1)
    ]
    assert [sorted(own) for _, own in seen] == [[2, 3], [2, 3]]


@dataclasses.dataclass
class Boasting:
    """An engine two of whose clients say that they hold three samples more than they do."""

    engine: CohortEngine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def train(self, work, ids, states):
        trained = self.engine.train(work, ids, states)
        return trained._replace(uploads=trained.uploads._replace(size=trained.uploads.size + 3 * LIARS))


def test_exact_counts_that_do_not_sum_to_the_size_are_quarantined_and_noisy_ones_are_not():
    engine = Boasting(build_engine("looped", "cpu", model=trial_model(), federation=trial_federation()))
    more = {"rounds": 1, "cohort": 4, "engine": engine}
    told = "label counts sum to 24, and size is 27"
    assert [(r["client"], r["reason"]) for r in run(counter([]), **more).audit] == [(0, told), (1, told)]
    assert run(counter([]), privacy=DP, **more).audit == []


def test_honest_counts_pass_where_the_size_does_not_leave_the_client():
    """`dp_fedavg` with nobody trusted sends 1 for the size."""
    seen: list = []
    hidden = dataclasses.replace(counter(seen), way=(Mechanism(per_client=dp_fedavg(trust="nobody").per_client[0]),))
    assert run(hidden, rounds=1, cohort=4).audit == []
    assert torch.equal(torch.stack(list(seen[0][1].values())), label_counts(trial_federation()))


def test_a_budget_for_the_counts_alone_does_not_shrink_with_the_rounds():
    part = {"unit": "sample", "partial": True}
    enough, short = (dataclasses.replace(DP, epsilon=epsilon, **part) for epsilon in (2.001, 1.9))
    assert len(run(counter([]), privacy=enough).history.rows) == 6
    with pytest.raises(FedstillError, match="what is sent before the first round alone takes more"):
        run(counter([]), privacy=short)


def test_two_methods_in_turn_get_the_same_counts_and_are_charged_once():
    first, then = [], []
    made = run((Phase(counter(first), until=3), Phase(counter(then))), privacy=DP, cohort=4).privacy
    assert [number for number, _ in first + then] == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(own, then[0][1][client]) for client, own in first[0][1].items())
    claim = made.claim("sample", "server")
    assert claim.epsilon == pytest.approx(2.0, rel=1e-6)
    assert claim.covered == ("label counts",)  # to the end: the second method is told nothing new
    assert made.refused == ()


def test_the_page_on_privacy_names_the_epsilon_of_a_tenth_of_a_class_in_noise():
    """500 samples of ten classes: 50 a class, sigma 5 = sqrt(2) m; the exact curve of the Gaussian mechanism at m."""
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    m, epsilon = 5 / math.sqrt(2), float(re.findall(r"`label_epsilon = ([0-9.]+)`", page)[0])

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    delta = normal(0.5 / m - epsilon * m) - math.exp(epsilon) * normal(-0.5 / m - epsilon * m)
    assert delta == pytest.approx(1e-5, rel=0.01)


def test_without_counts_a_method_that_has_such_a_form_is_refused_by_a_line_that_names_it():
    with pytest.raises(FedstillError) as refused:
        run(counter([]), privacy=NONE)
    assert str(refused.value) == (
        "privacy.label_counts = 'none': this method needs each client's label counts: use "
        "counter(labels='uniform', ensemble='uniform'), or set 'dp' or 'exact'"
    )


@pytest.mark.parametrize("options", [{"labels": "uniform"}, {"ensemble": "uniform"}])
def test_one_of_the_two_options_is_not_enough(options):
    with pytest.raises(FedstillError, match="use counter"):
        run(counter([], **options), privacy=NONE)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_library_that_needs_counts_names_a_form_that_needs_none(name):
    method = METHODS[name]()
    if Need.LABEL_COUNTS_UPLOADED in needs_of(method):
        (phase,) = build_method(method.without_counts)
        assert Need.LABEL_COUNTS_UPLOADED not in needs_of(phase.method)


@pytest.mark.parametrize("mode", ["none", "dp", "exact"])
def test_in_that_form_it_runs_and_nobody_sends_counts(mode):
    seen: list = []
    result = run(counter(seen, labels="uniform", ensemble="uniform"), privacy=Privacy(label_counts=mode))
    assert [counts for _, counts in seen] == [None] * 6
    told = result.privacy
    assert told is None or "label counts" not in told.text()


def test_a_method_without_such_a_form_is_told_to_send_them():
    bare = dataclasses.replace(counter([]), without_counts="")
    with pytest.raises(FedstillError, match="label counts: set 'dp' or 'exact'"):
        run(bare, privacy=NONE)


def test_methods_together_hand_the_form_on_where_all_that_need_counts_have_one():
    counts = frozenset({Need.LABEL_COUNTS_UPLOADED})

    def other(form: str) -> Method:
        return Method(cross_entropy(), average(), (ServerStep("count", needs=counts),), without_counts=form)

    assert join({"fedprox": fedprox(), "counter": counter([])}).without_counts == FORM
    assert join({"other": other("other(a=1)"), "counter": counter([])}).without_counts == f"other(a=1) and {FORM}"
    assert join({"other": other(""), "counter": counter([])}).without_counts == ""
    assert join({"fedavg": fedavg(), "fedprox": fedprox()}).without_counts == ""
    with pytest.raises(FedstillError, match=r"use counter\(labels='uniform', ensemble='uniform'\), or set 'dp'"):
        run(join({"fedprox": fedprox(), "counter": counter([])}), privacy=NONE)
