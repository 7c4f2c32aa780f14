"""Budgets, Poisson cohorts and label counts: what a run does before it starts, while it runs, and what it states."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from answering import clients_of
from running import changed_on_the_way, run_on_trial
from students import student_of

from fedstill.about.toy import trial_federation, trial_model
from fedstill.compose.join import join
from fedstill.core.errors import FedstillError
from fedstill.core.needs import needs_of
from fedstill.core.seeds import seed_for
from fedstill.core.trainer import CohortEngine
from fedstill.core.types import Mechanism, Method, Need, Phase, Release, ServerStep
from fedstill.engine import build_engine
from fedstill.local.terms import cross_entropy
from fedstill.loop.callbacks import Callback
from fedstill.loop.checkpoint import load_newest
from fedstill.loop.evaluate import label_counts
from fedstill.loop.guard import Guard, is_finite
from fedstill.loop.privacy_plan import extra_slots, noisy_label_counts
from fedstill.loop.round import draw_cohort
from fedstill.loop.setup import Asked
from fedstill.methods import METHODS, dp_fedavg, fedaux, fedavg, fedprox, scaffold
from fedstill.methods.fedaux.certainty import Scoring, client_answer
from fedstill.methods.lookup import build_method
from fedstill.models import build_model
from fedstill.privacy.accountant import Event, analytic_gaussian_multiplier, epsilon_after, epsilon_of
from fedstill.privacy.plan import Privacy
from fedstill.server.aggregate import average

DELTA = 1e-5
QUIET = dp_fedavg(noise_multiplier=8.0, trust="nobody")  # a multiplier of 4 a round


def run(method, **how):
    return run_on_trial(method, **{"rounds": 6, "cohort": 4, **how})


def after(rounds: int, multiplier: float = 4.0) -> float:
    """Gaussian rounds of everybody: one Gaussian of multiplier / sqrt(rounds)."""
    return epsilon_of(DELTA, multiplier / math.sqrt(rounds))


def test_the_last_round_that_the_budget_allows_is_the_end(caplog):
    class Watch(Callback):
        told = ()

        def on_prepare(self, what, share):
            self.told += (what,)

    watch = Watch()
    budget = 0.5 * (after(3) + after(4))
    with caplog.at_level("INFO", logger="fedstill.run"):
        result = run(QUIET, privacy=Privacy(epsilon=budget), callbacks=[watch])
    assert len(result.history.rows) == 3
    assert result.history.last["round"] == 3  # evaluated, as an end is
    assert result.privacy.claim("client", "server").epsilon == pytest.approx(after(3))
    (why,) = watch.told
    assert why == f"privacy.epsilon = {budget:g} allows 3 of 6 rounds: one more would exceed it"
    assert why in caplog.text
    assert result.privacy.stopped == why


def test_a_statement_has_the_epsilon_after_evenly_spaced_rounds_and_at_the_end(tmp_path):
    result = run(QUIET, rounds=43, run_dir=tmp_path)
    rounds, epsilons = zip(*result.privacy.spent, strict=True)
    assert rounds == (*range(3, 43, 3), 43)  # 43 / 20 is above 2
    assert epsilons == pytest.approx([after(played) for played in rounds])
    assert json.loads((tmp_path / "privacy.json").read_text())["spent"] == [list(pair) for pair in result.privacy.spent]


def test_a_budget_that_fits_to_the_last_digit_is_used_up_and_no_more():
    assert len(run(QUIET, privacy=Privacy(epsilon=after(2) * (1 + 1e-9))).history.rows) == 2
    assert len(run(QUIET, privacy=Privacy(epsilon=after(2) * (1 - 1e-9))).history.rows) == 1
    whole = run(QUIET, privacy=Privacy(epsilon=after(6) * 1.001))
    assert len(whole.history.rows) == 6
    assert whole.privacy.stopped == ""


def test_a_resumed_run_stops_where_an_uninterrupted_one_would(tmp_path):
    how = {"privacy": Privacy(epsilon=0.5 * (after(4) + after(5))), "checkpoint_every": 1}
    whole = run(QUIET, run_dir=tmp_path / "whole", **how)
    run(QUIET, rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(QUIET, run_dir=tmp_path / "cut", resume=True, **how)
    again = run(QUIET, run_dir=tmp_path / "cut", resume=True, **how)
    assert [len(one.history.rows) for one in (whole, resumed, again)] == [4, 4, 4]
    texts = [json.loads((tmp_path / name / "privacy.json").read_text()) for name in ("whole", "cut")]
    assert texts[0] == texts[1]
    assert texts[0]["rounds"] == 4


SCORES = Release("scores", "sample", 2.0, when="once", against="server")


def asks(*releases: Release, names: tuple[str, ...] = ("scores",), heard: list | None = None) -> Method:
    """Asks every client as many questions as there are names."""

    def question(data):
        if heard is not None:
            heard.append(data.id)
        return {"size": torch.tensor(float(len(data.x)))}

    def prepare(candidate, state, preparation):
        answers = [preparation.ask(question, release=name) for name in names]
        return candidate, {"sizes": answers[0].values["size"]}

    step = ServerStep("ask", init=lambda _: {"sizes": {}}, prepare=prepare)
    base = dp_fedavg(noise_multiplier=8.0, trust="nobody")
    return dataclasses.replace(base, server=(*base.server, step), way=(*base.way, Mechanism(releases=releases)))


def test_what_is_sent_before_the_first_round_counts_too():
    both = epsilon_of(DELTA, 1 / math.sqrt(1 / 4.0 + 2 / 16.0))
    result = run(asks(SCORES), privacy=Privacy(epsilon=both * 1.0001, unit="sample"))
    assert len(result.history.rows) == 2
    assert result.privacy.claim("sample", "server").epsilon == pytest.approx(both)


def test_if_that_alone_exceeds_the_budget_nothing_is_sent_at_all(tmp_path):
    with pytest.raises(FedstillError, match="too small for the messages before the first round alone"):
        run(asks(SCORES), privacy=Privacy(epsilon=0.5, unit="sample"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("releases", "names", "told"),
    [
        ((), ("",), "wants an answer that no release speaks of"),
        ((SCORES,), ("scores", ""), "wants an answer that no release speaks of"),
        ((SCORES,), ("scores", "sizes"), "wants an answer that no release speaks of"),
        ((SCORES,), ("scores", "scores"), "wants a second answer of 'scores'"),
    ],
)
def test_a_question_without_noise_is_not_asked_under_a_budget_and_voids_the_claim_of_a_run_without(
    releases, names, told
):
    heard = []
    with pytest.raises(FedstillError, match=told):
        run(asks(*releases, names=names, heard=heard), privacy=Privacy(epsilon=50.0, unit="sample"))
    assert heard == [0, 1, 2, 3] * (len(names) - 1)
    made = run(asks(*releases, names=names), rounds=2).privacy
    assert made.claims == ()
    assert "the clients' answers before the first round" in made.text()


def test_clients_of_two_architectures_may_be_asked_for_one_release_in_turn():
    asking = Asked(
        clients_of(trial_federation()), np.arange(4), torch.device("cpu"), 1, releases=["scores"], strict=True
    )
    for members in ({0, 2}, {1, 3}):
        asking.ask(lambda data: {"a": torch.zeros(1)}, among=members, release="scores")
    with pytest.raises(FedstillError, match="a second answer of 'scores'"):
        asking.ask(lambda data: {"a": torch.zeros(1)}, among={3}, release="scores")


def test_a_budget_for_rounds_that_open_scores_steer_is_refused():
    """It ran at epsilon = 0.0065, and replacing a client moved the model by 2.5 where 0.0005 was possible."""
    method = build_method('dp_fedavg(trust="nobody", noise_multiplier=1000, clip=0.001)+fedaux(student.steps=2)')
    with pytest.raises(FedstillError, match="certainty scores leave without noise that hides all that one client"):
        run(method, privacy=Privacy(epsilon=0.1, against="server", partial=True))


LOUD, HUSHED = dp_fedavg(noise_multiplier=0.1), dp_fedavg(noise_multiplier=20.0)


@pytest.mark.parametrize(
    ("first", "then", "how", "told"),
    [
        (LOUD, HUSHED, {}, r"noise was .*with noise of 0.05.* and is .*with noise of 10.0"),
        (LOUD, (Phase(LOUD, until=2), Phase(HUSHED)), {}, "noise was .* and is .*until round 2"),
        (fedavg(), HUSHED, {}, r"noise was \[\] and is"),
        (LOUD, LOUD, {"privacy": Privacy(label_epsilon=9.0)}, "privacy.label_epsilon was 1.0 and is 9.0"),
    ],
)
def test_a_run_cannot_be_resumed_with_other_noise(tmp_path, first, then, how, told):
    """Five rounds at epsilon = 969.6 were resumed with 200 times the noise, and the whole was stated as 0.7255."""
    where = {"run_dir": tmp_path / "run", "checkpoint_every": 1, "cohort": 2}
    run(first, rounds=5, **where)
    with pytest.raises(FedstillError, match=told):
        run(then, resume=True, **where, **how)
    assert len(run(first, resume=True, **where).history.rows) == 6


def test_a_run_may_be_resumed_with_another_budget(tmp_path):
    where = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    run(QUIET, rounds=2, **where)
    assert len(run(QUIET, resume=True, privacy=Privacy(epsilon=50.0), **where).history.rows) == 6


@pytest.mark.parametrize("rounds", [6, 5, 2], ids=["as many rounds", "fewer, cut", "fewer, all allowed"])
def test_a_run_that_is_resumed_beyond_its_new_budget_says_that_it_is_exceeded(tmp_path, rounds):
    """It said that the run ends after round 3 of 6, and six had been played."""
    where, budget = {"run_dir": tmp_path / "run", "checkpoint_every": 1}, 0.5 * (after(3) + after(4))
    run(QUIET, privacy=Privacy(epsilon=50.0), **where)
    made = run(QUIET, rounds=rounds, resume=True, privacy=Privacy(epsilon=budget), **where).privacy
    assert made.rounds == 6
    told = f"privacy.epsilon = {budget:g} is exceeded since round 4: these 6 rounds were played with another budget"
    assert made.stopped == told
    assert told in made.text()
    kept = run(QUIET, rounds=rounds, resume=True, privacy=Privacy(epsilon=49.0), **where).privacy
    assert kept.stopped == ""


@pytest.mark.parametrize(
    ("quorum", "how"), [(2, {"cohort": 4}), (1.0, {"cohort": 4}), (0.5, {"cohort": 1, "sampling": "poisson"})]
)
def test_a_quorum_is_refused_where_a_trusted_server_adds_the_noise(quorum, how):
    """Of 10 clients at q = 0.3, z = 1 and a quorum of 6, delta at the claimed 3.276 was 9.4e-5 and not 1e-5."""
    with pytest.raises(FedstillError, match=r"set guard.quorum = 1, or use dp_fedavg\(trust='nobody'\)"):
        run(dp_fedavg(), guard=Guard(quorum=quorum), **how)
    assert run(QUIET, guard=Guard(quorum=quorum), rounds=1, cohort=4).privacy.claims


def test_a_quorum_of_one_upload_is_none():
    assert run(dp_fedavg(), guard=Guard(quorum=0.25), rounds=1).privacy.claims


@pytest.mark.parametrize(
    ("method", "privacy", "told"),
    [
        (fedavg(), {}, "this method makes no such claim"),
        (QUIET, {"epsilon": 0.1}, "too small for the first round alone"),
        (
            dp_fedavg(),
            {"against": "server"},
            r"use dp_fedavg\(trust='nobody'\), or .*it has one for unit = 'client', against = 'public'",
        ),
        (fedavg(), {}, r"add a method that does \(e\.g\. dp_fedavg\), or take privacy\.epsilon away"),
        (dp_fedavg(noise_multiplier=0.0), {}, r"no noise: set noise_multiplier\): change that"),
        ((Phase(fedavg(), until=1), Phase(QUIET)), {}, r"left without noise .* in the rounds before\): change that"),
        (
            fedaux(form="mean", epsilon=1.0),
            {},
            r"\(certainty scores: it protects single samples, .*\): it has one for unit = 'sample', against = 'server' "
            r"with partial = true \(certainty scores alone\)",
        ),
        (
            (Phase(QUIET, until=2), Phase(fedavg())),
            {"epsilon": 50.0},
            "only model updates until round 2 can be counted",
        ),
        (asks(SCORES), {"epsilon": 50.0}, "model updates: scores leave without noise that hides all that one client"),
    ],
)
def test_a_budget_without_a_claim_teaches(method, privacy, told):
    with pytest.raises(FedstillError, match=told):
        run(method, privacy=Privacy(**{"epsilon": 1.0, **privacy}))


def test_a_part_of_what_leaves_may_have_a_budget_if_that_is_said():
    privacy = Privacy(epsilon=2.5, unit="sample", partial=True)
    only_scores = dataclasses.replace(fedavg(), way=(Mechanism(releases=(SCORES,)),))
    result = run(only_scores, privacy=privacy)
    assert len(result.history.rows) == 6
    assert not result.privacy.claim("sample", "server").complete


def test_a_run_that_says_nothing_about_privacy_has_no_statement(tmp_path):
    assert run(fedavg(), rounds=1, run_dir=tmp_path / "run").privacy is None
    assert not (tmp_path / "run" / "privacy.json").exists()


def test_a_client_that_is_drawn_now_and_then_pays_for_those_rounds():
    clients = np.arange(4)
    drawn = np.bincount(np.concatenate([draw_cohort(clients, 1, seed=3, round=r) for r in range(1, 7)]), minlength=4)
    assert drawn.max() < 6
    result = run(QUIET, cohort=1, seed=3)
    assert result.privacy.claim("client", "server").epsilon == pytest.approx(after(int(drawn.max())))


def test_every_client_has_its_own_coin():
    """200 rounds of 50 clients at 0.2: a client takes part in 40 +- 5.7, a cohort has 10 +- 2.8 members."""
    clients = np.arange(50)
    cohorts = [draw_cohort(clients, 10, seed=1, round=r, sampling="poisson") for r in range(1, 201)]
    visits, sizes = np.bincount(np.concatenate(cohorts), minlength=50), np.array([len(one) for one in cohorts])
    assert abs(visits.mean() - 40) < 2
    assert visits.min() > 15
    assert visits.max() < 65
    assert 2.2 < sizes.std() < 3.5
    some = draw_cohort(clients[10:], 8, seed=1, round=3, sampling="poisson")  # the same probability, fewer clients
    assert some.tolist() == [one for one in cohorts[2].tolist() if one >= 10]


def test_poisson_sampling_is_counted_for_a_trusted_server_only():
    loud = dp_fedavg(noise_multiplier=4.0)
    sampled = run(loud, cohort=1, sampling="poisson", rounds=3).privacy.claim("client", "public")
    assert sampled.epsilon == pytest.approx(epsilon_after([Event(2.0, 3, 0.25)], DELTA))
    repeated = Privacy(reproducible=True)
    local = run(QUIET, cohort=1, sampling="poisson", rounds=3, seed=1, privacy=repeated).privacy.with_a_secret[0]
    visits = np.bincount(
        np.concatenate([draw_cohort(np.arange(4), 1, seed=1, round=r, sampling="poisson") for r in (1, 2, 3)])
    ).max()
    assert local.epsilon == pytest.approx(after(int(visits)))


def empty_seed() -> int:
    """A seed whose second Poisson cohort of one in four is empty."""
    return next(s for s in range(100) if not len(draw_cohort(np.arange(4), 1, seed=s, round=2, sampling="poisson")))


@pytest.mark.parametrize("engine", ["looped", "batched"])
def test_a_round_that_nobody_was_drawn_for_keeps_the_model_and_says_so(engine):
    seed, how = empty_seed(), {"cohort": 1, "sampling": "poisson", "engine": engine}
    for method in (fedavg(), scaffold()):
        one, two = (run(method, seed=seed, rounds=rounds, **how) for rounds in (1, 2))
        assert all(torch.equal(leaf, one.weights.params[name]) for name, leaf in two.weights.params.items())
        row = two.history.rows[1]
        assert (row["cohort"], row["accepted"], row["train_loss"], row["bytes_up"]) == (0, 0, None, 0)
        assert two.audit[-1]["reason"] == "nobody was drawn; the round keeps the old model"
        assert run(method, seed=seed, rounds=3, **how).history.last["round"] == 3


def test_with_a_trusted_server_the_model_moves_by_noise_so_that_nobody_can_tell():
    seed, how = empty_seed(), {"cohort": 1, "sampling": "poisson", "privacy": Privacy(reproducible=True)}
    one, two = (run(dp_fedavg(clip=0.1), seed=seed, rounds=rounds, **how).weights.params for rounds in (1, 2))
    moves = torch.cat([(two[name] - one[name]).flatten() for name in one])
    assert float(moves.std()) == pytest.approx(0.1, rel=0.1)  # about 1,000 parameters


def test_a_poisson_run_resumes_as_such_and_as_nothing_else(tmp_path):
    how = {"cohort": 2, "sampling": "poisson", "checkpoint_every": 1}
    whole = run(fedavg(), run_dir=tmp_path / "whole", **how)
    run(fedavg(), rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(fedavg(), run_dir=tmp_path / "cut", resume=True, **how)
    assert all(torch.equal(leaf, whole.weights.params[name]) for name, leaf in resumed.weights.params.items())
    with pytest.raises(FedstillError, match="sampling was poisson and is fixed now"):
        run(fedavg(), run_dir=tmp_path / "cut", resume=True, **{**how, "sampling": "fixed"})


def counting(seen: list) -> Method:
    def look(candidate, state, round):
        seen.append(round.uploads.label_counts)
        return candidate, state

    step = ServerStep("look", look, needs=frozenset({Need.LABEL_COUNTS_UPLOADED}))
    return Method(cross_entropy(), average(), (step,))


def test_exact_label_counts_are_sent_as_they_are():
    seen = []
    run(counting(seen), rounds=1)
    assert seen[0].sum(dim=1).tolist() == [24.0] * 4


def test_noisy_label_counts_are_made_once_and_counted_once():
    seen, privacy = [], Privacy(label_counts="dp", label_epsilon=2.0)
    made = run(counting(seen), rounds=3, privacy=privacy).privacy
    exact = []
    run(counting(exact), rounds=1)
    assert all(torch.equal(one, seen[0]) for one in seen)
    assert bool((seen[0] >= 0).all())
    assert not torch.equal(seen[0], exact[0])
    claim = made.claim("sample", "server")
    assert claim.covered == ("label counts",)
    assert claim.epsilon == pytest.approx(2.0, rel=1e-6)
    assert made.claim("client", "server") is None


def test_the_noise_on_label_counts_is_that_of_a_moved_sample():
    """epsilon 2 at 1e-5: multiplier m; one sample leaves a class and enters another, so sigma = sqrt(2) m."""
    counts = torch.full((2000, 5), 1000.0, dtype=torch.float64)
    noisy = noisy_label_counts(counts, Privacy(label_counts="dp", label_epsilon=2.0), seed=3)
    wanted = math.sqrt(2.0) * analytic_gaussian_multiplier(2.0, DELTA)
    assert float((noisy - counts).std()) == pytest.approx(wanted, rel=0.03)


def test_a_method_that_needs_label_counts_is_refused_when_none_may_be_sent():
    with pytest.raises(FedstillError, match="needs each client's label counts: set 'dp' or 'exact'"):
        run(counting([]), privacy=Privacy(label_counts="none"))
    assert run(fedavg(), rounds=1, privacy=Privacy(label_counts="none")).history.rows


def test_what_a_client_sends_beside_its_model_is_found_without_running_it():
    weights = trial_model().init(0)
    found = {
        name: extra_slots(METHODS[name](), weights) for name in ("fedavg", "moon", "feddyn", "scaffold", "fedcurv")
    }
    assert found == {
        "fedavg": (),
        "moon": (),
        "feddyn": (),
        "scaffold": ("control_delta",),
        "fedcurv": ("fisher_delta", "fisher_weights_delta"),
    }


def test_a_term_that_cannot_be_tried_is_believed_to_send_something():
    def finish(local, measured):
        raise KeyError("data")

    odd = dataclasses.replace(cross_entropy(), finish=finish)
    assert extra_slots(Method(odd, average()), trial_model().init(0)) == ("what its local terms send beside the model",)


def test_batchnorm_under_noise_is_told_in_the_log(caplog):
    model = build_model("resnet8", input_shape=(1, 8, 8), classes=3, norm="batch")
    run(QUIET, model=model, rounds=1)
    assert "BatchNorm" in caplog.text


# Data on which training breaks: that it did must not be told by a model that stays, or an answer that is missing.


def spoilt(client: int, samples: int | None = None):
    """The trial federation in float, with samples of one client that no training survives."""
    federation = trial_federation()
    x = federation.train.x.float() / 255
    first, last = federation.offsets[client : client + 2].tolist()
    x[federation.indices[first:last][:samples]] = 3e38
    unlabeled = federation.unlabeled.float() / 255
    return dataclasses.replace(federation, train=dataclasses.replace(federation.train, x=x), unlabeled=unlabeled)


def run_on(federation, method, **how):
    return run(method, federation=federation, **{"rounds": 1, **how})


def every_client_spoilt():
    federation = spoilt(0)
    x = torch.full_like(federation.train.x, 3e38)
    return dataclasses.replace(federation, train=dataclasses.replace(federation.train, x=x))


@pytest.mark.parametrize("trust", ["server", "nobody"])
def test_a_round_in_which_all_training_broke_moves_the_model_by_its_noise(trust):
    """z = 2, C = 1, four clients: a standard deviation of 2 / 4, or of 2 / sqrt(4). The model stayed as it was."""
    result = run_on(every_client_spoilt(), dp_fedavg(trust=trust, noise_multiplier=2.0))
    start = trial_model().init(seed_for(0, "model")).params
    moves = torch.cat([(leaf - start[name]).flatten() for name, leaf in result.weights.params.items()])
    assert float(moves.std()) == pytest.approx(0.5 if trust == "server" else 1.0, rel=0.1)  # about 1,000 parameters


def test_clients_that_trust_nobody_do_not_tell_the_server_that_training_broke():
    result = run_on(spoilt(2), dp_fedavg(trust="nobody"))
    assert result.history.rows[0]["accepted"] == 4
    assert result.audit == []


def test_a_trusted_server_knows_that_and_adds_its_noise():
    result = run_on(every_client_spoilt(), dp_fedavg(), privacy=Privacy(reproducible=True))
    assert result.history.rows[0]["accepted"] == 0
    assert result.audit[-1]["reason"] == "no sound upload is left; the model moves by noise alone"


def test_what_a_client_keeps_is_not_spoilt_by_a_round_that_broke(tmp_path):
    """FedDyn keeps a gradient on each client: the guard cannot see that it is NaN when the upload is hidden."""
    method = build_method('dp_fedavg(trust="nobody")+feddyn')
    run_on(spoilt(2), method, run_dir=tmp_path / "run", checkpoint_every=1, rounds=2)
    parts = load_newest(tmp_path / "run" / "checkpoints", torch.device("cpu")).clients
    kept = dict(zip(("ids", "states"), next(iter(parts)), strict=True))
    assert kept["ids"].tolist() == [0, 1, 3]
    assert is_finite(kept["states"])


def test_one_sample_does_not_decide_whether_a_client_sends_its_scores():
    """One of four clients fell out, which anybody could see at a stated epsilon of 1."""
    result = run_on(spoilt(1, samples=1), fedaux(student=student_of(fedaux, steps=2), form="mean", epsilon=1.0))
    assert result.history.rows[0]["prepare/scored_clients"] == 4
    assert not any("preparation" in record["reason"] for record in result.audit)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gamma", ["negatives", "both"])
def test_features_that_are_not_finite_count_as_zero(bad, gamma):
    drawn = torch.randn(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own, negatives, scoring = drawn[:4], drawn[4:], Scoring(form="mean", gamma=gamma, noise=1.0)
    broken, zero = own.clone(), own.clone()
    broken[1, 2], zero[1] = bad, 0.0
    found, wanted = (client_answer(rows, negatives, scoring, 7) for rows in (broken, zero))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# Label counts that a method reads every round: one draw of noise a client, and a way on for those who send none.


DP = Privacy(label_counts="dp", label_epsilon=2.0)
NONE = Privacy(label_counts="none")
ZERO = torch.tensor([0])
FORM = "counter(labels='uniform', ensemble='uniform')"


def run_pairs(method, **how):
    return run_on_trial(method, **{"rounds": 6, **how})


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
    run_pairs(counter(seen))
    exact = label_counts(trial_federation())
    assert len(seen) == 6
    assert all(torch.equal(one, exact[client]) for client, own in by_client(seen).items() for one in own)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_client_sends_one_draw_of_noise_however_often_it_is_drawn(sampling):
    """Fresh noise every round would let the server average it away: six rounds at epsilon 2 are far more than 2."""
    seen: list = []
    result = run_pairs(counter(seen), privacy=DP, sampling=sampling, seed=1)
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
    all_of_it = run_pairs(counter(whole), privacy=DP, secret=bytes(32))
    where = {"privacy": DP, "secret": bytes(32), "run_dir": tmp_path / "run", "checkpoint_every": 1}
    run_pairs(counter(cut), rounds=3, **where)
    resumed = run_pairs(counter(rest), resume=True, **where)
    for (number, one), (same, other) in zip(whole, cut + rest, strict=True):
        assert number == same
        assert all(torch.equal(own, other[client]) for client, own in one.items())
    assert resumed.privacy.as_dict() == all_of_it.privacy.as_dict()
    with pytest.raises(FedstillError, match=r"privacy\.label_epsilon was 2\.0 and is 1\.0"):
        run_pairs(counter([]), resume=True, **{**where, "privacy": Privacy(label_counts="dp")})


LIARS = torch.tensor([True, True, False, False])  # clients 0 and 1


@pytest.mark.parametrize("privacy", [Privacy(), DP])
def test_label_counts_that_no_client_can_hold_are_quarantined_and_the_run_goes_on(privacy):
    """Two of 3e38 are inf in float32, and labels in such proportions cannot be drawn."""

    def lie(uploads, start, seed):
        many = uploads.label_counts.index_fill(1, ZERO, 3e38)
        return uploads._replace(label_counts=torch.where(LIARS[:, None], many, uploads.label_counts))

    seen: list = []
    result = run_pairs(changed_on_the_way(counter(seen), lie), rounds=2, cohort=4, privacy=privacy)
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
    assert [(r["client"], r["reason"]) for r in run_pairs(counter([]), **more).audit] == [(0, told), (1, told)]
    assert run_pairs(counter([]), privacy=DP, **more).audit == []


def test_honest_counts_pass_where_the_size_does_not_leave_the_client():
    """`dp_fedavg` with nobody trusted sends 1 for the size."""
    seen: list = []
    hidden = dataclasses.replace(counter(seen), way=(Mechanism(per_client=dp_fedavg(trust="nobody").per_client[0]),))
    assert run_pairs(hidden, rounds=1, cohort=4).audit == []
    assert torch.equal(torch.stack(list(seen[0][1].values())), label_counts(trial_federation()))


def test_a_budget_for_the_counts_alone_does_not_shrink_with_the_rounds():
    part = {"unit": "sample", "partial": True}
    enough, short = (dataclasses.replace(DP, epsilon=epsilon, **part) for epsilon in (2.001, 1.9))
    assert len(run_pairs(counter([]), privacy=enough).history.rows) == 6
    with pytest.raises(FedstillError, match="too small for the messages before the first round alone"):
        run_pairs(counter([]), privacy=short)


def test_two_methods_in_turn_get_the_same_counts_and_are_charged_once():
    first, then = [], []
    made = run_pairs((Phase(counter(first), until=3), Phase(counter(then))), privacy=DP, cohort=4).privacy
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
        run_pairs(counter([]), privacy=NONE)
    assert str(refused.value) == (
        "privacy.label_counts = 'none': this method needs each client's label counts: use "
        "counter(labels='uniform', ensemble='uniform'), or set 'dp' or 'exact'"
    )


@pytest.mark.parametrize("options", [{"labels": "uniform"}, {"ensemble": "uniform"}])
def test_one_of_the_two_options_is_not_enough(options):
    with pytest.raises(FedstillError, match="use counter"):
        run_pairs(counter([], **options), privacy=NONE)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_library_that_needs_counts_names_a_form_that_needs_none(name):
    method = METHODS[name]()
    if Need.LABEL_COUNTS_UPLOADED in needs_of(method):
        (phase,) = build_method(method.without_counts)
        assert Need.LABEL_COUNTS_UPLOADED not in needs_of(phase.method)


@pytest.mark.parametrize("mode", ["none", "dp", "exact"])
def test_in_that_form_it_runs_and_nobody_sends_counts(mode):
    seen: list = []
    result = run_pairs(counter(seen, labels="uniform", ensemble="uniform"), privacy=Privacy(label_counts=mode))
    assert [counts for _, counts in seen] == [None] * 6
    if mode == "exact":  # nothing is asked for, so nothing is stated
        assert result.privacy is None
    else:
        assert "label counts" not in result.privacy.text()


def test_a_method_without_such_a_form_is_told_to_send_them():
    bare = dataclasses.replace(counter([]), without_counts="")
    with pytest.raises(FedstillError, match="label counts: set 'dp' or 'exact'"):
        run_pairs(bare, privacy=NONE)


def test_methods_together_hand_the_form_on_where_all_that_need_counts_have_one():
    counts = frozenset({Need.LABEL_COUNTS_UPLOADED})

    def other(form: str) -> Method:
        return Method(cross_entropy(), average(), (ServerStep("count", needs=counts),), without_counts=form)

    assert join({"fedprox": fedprox(), "counter": counter([])}).without_counts == FORM
    assert join({"other": other("other(a=1)"), "counter": counter([])}).without_counts == f"other(a=1) and {FORM}"
    assert join({"other": other(""), "counter": counter([])}).without_counts == ""
    assert join({"fedavg": fedavg(), "fedprox": fedprox()}).without_counts == ""
    with pytest.raises(FedstillError, match=r"use counter\(labels='uniform', ensemble='uniform'\), or set 'dp'"):
        run_pairs(join({"fedprox": fedprox(), "counter": counter([])}), privacy=NONE)
