"""Before the first round: what a method may ask, what it changes, and when it happens."""

import numpy as np
import pytest
import torch
from answering import clients_of
from running import run_on_trial
from toy import same_bits

from fedstill.about.toy import trial_federation
from fedstill.compose.wrappers import after, remember, report_only, rollback
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seed_for
from fedstill.core.setup import Question
from fedstill.core.tree import tree_map
from fedstill.core.types import Method, Phase, ServerStep
from fedstill.local.terms import cross_entropy
from fedstill.loop.callbacks import Callback
from fedstill.loop.setup import Asked
from fedstill.server.aggregate import average


def counts_samples(candidate, state, preparation):
    """Ask every client how many samples it holds."""
    answers = preparation.ask(lambda data: {"size": torch.tensor(float(len(data.x)))})
    preparation.metrics["samples"] = float(answers.values["size"].sum())
    preparation.tell("counted", 1.0)
    return candidate, {"sizes": answers.values["size"], "ids": answers.ids}


def zeros(candidate, state, preparation):
    return tree_map(torch.zeros_like, candidate), state


SIZES = ServerStep("sizes", init=lambda _: {"sizes": {}, "ids": {}}, prepare=counts_samples)
FROM_ZERO = ServerStep("zero", prepare=zeros)


def method(*steps):
    return Method(cross_entropy(), average(), (*steps,))


def run(method, **options):
    return run_on_trial(method, **{"rounds": 2, **options})


def test_every_client_that_holds_data_is_asked_once_and_what_it_costs_is_noted_in_the_first_round():
    result = run(method(SIZES))
    first, second = result.history.rows
    assert first["prepare/samples"] == 4 * 24  # trial_federation: 4 clients of 24
    assert first["bytes_prepared"] == 4 * 4  # a float from each
    assert first["seconds_prepared"] >= 0
    assert not any(key.startswith("prepare/") for key in second)


def test_a_step_that_prepares_nothing_changes_no_bit_of_a_run():
    assert same_bits(run(method()).weights, run(method(SIZES)).weights)


def test_the_first_cohort_starts_from_the_prepared_model():
    result = run(method(FROM_ZERO), rounds=1)
    fresh = run(method(), rounds=1)
    assert not same_bits(result.weights, fresh.weights)
    # all-zero weights of a ReLU net: only the last bias has a gradient
    moved = [name for name, leaf in result.weights.params.items() if bool(leaf.any())]
    assert moved == ["head.bias"]


@pytest.mark.parametrize(
    "wrapped",
    [after(1, SIZES), report_only(SIZES), rollback(SIZES, 0.5), remember(lambda _: SIZES, 2)],
    ids=["after", "report_only", "rollback", "remember"],
)
def test_wrapped_steps_are_prepared_too(wrapped):
    assert run(method(wrapped)).history.rows[0]["prepare/samples"] == 96


def test_a_method_that_follows_another_is_prepared_when_its_turn_comes():
    rows = run((Phase(method(), until=1), Phase(method(SIZES))), rounds=3).history.rows
    assert ["prepare/samples" in row for row in rows] == [False, True, False]


def test_a_resumed_run_is_not_prepared_again_and_ends_with_the_same_bits(tmp_path):
    whole = run(method(FROM_ZERO), rounds=3)
    run(method(FROM_ZERO), rounds=1, run_dir=tmp_path, checkpoint_every=1)
    resumed = run(method(FROM_ZERO), rounds=3, run_dir=tmp_path, checkpoint_every=1, resume=True)
    assert same_bits(whole.weights, resumed.weights)


def test_a_watcher_hears_how_far_it_is():
    heard = []

    class Listener(Callback):
        def on_prepare(self, what, share):
            heard.append((what, share))

    run(method(SIZES), callbacks=[Listener()])
    assert heard == [("counted", 1.0)]


def test_a_preparation_that_ends_in_nan_is_refused_in_words():
    spoilt = ServerStep(
        "spoilt", prepare=lambda weights, state, _: (tree_map(lambda leaf: leaf * float("nan"), weights), state)
    )
    with pytest.raises(FedstillError, match="NaN or Inf"):
        run(method(spoilt))


def asked():
    return Asked(clients_of(trial_federation()), np.arange(4), torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda data: 1 / 0, "ZeroDivisionError"),
        (lambda data: {"a": torch.tensor(float("inf"))}, "NaN or Inf"),
        (lambda data: {"a": torch.zeros(2)}, "another form"),
    ],
)
def test_a_client_that_fails_is_left_out_and_recorded(fault, reason):
    asking = asked()
    answers = asking.ask(lambda data: fault(data) if data.id == 2 else {"a": torch.tensor(float(data.id))})
    assert answers.ids.tolist() == [0, 1, 3]
    assert answers.values["a"].tolist() == [0.0, 1.0, 3.0]
    (record,) = asking.records
    assert record["client"] == 2
    assert reason in record["reason"]


@pytest.mark.parametrize("hostile", range(4))
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"a": torch.ones(2)}, "another form than most"),
        ({"a": torch.ones((), dtype=torch.float64)}, "another form than most"),
        ({"b": torch.ones(())}, "another form than most"),
        ({"a": torch.tensor(1e9)}, "the norm of 'a' 1e"),
    ],
)
def test_whoever_answers_first_does_not_decide_what_an_answer_looks_like(hostile, answer, reason):
    asking = Asked(clients_of(trial_federation()), np.arange(4), torch.device("cpu"), 1, outlier=20.0)
    answers = asking.ask(lambda data: answer if data.id == hostile else {"a": torch.tensor(1.0 + data.id)})
    assert answers.ids.tolist() == [client for client in range(4) if client != hostile]
    (record,) = asking.records
    assert record["client"] == hostile
    assert reason in record["reason"]


@pytest.mark.parametrize("hostile", [0, 2])
@pytest.mark.parametrize("answer", [{"a/b": torch.tensor(1.0)}, {"a": {"b": torch.tensor(1.0)}, "c": {}}])
def test_an_answer_that_is_nested_otherwise_is_left_out(hostile, answer):
    asking = asked()
    honest = {"a": {"b": torch.tensor(2.0)}}
    answers = asking.ask(lambda data: answer if data.id == hostile else honest)
    assert answers.ids.tolist() == [client for client in range(4) if client != hostile]
    assert "another form than most" in asking.records[0]["reason"]


def test_what_is_sent_for_a_question_is_counted_for_every_client_that_is_asked():
    def prepare(candidate, state, preparation):
        preparation.ask(lambda data: {"a": torch.zeros(3)}, sent={"table": torch.zeros(10)})
        preparation.ask(lambda data: {"a": torch.zeros(1)}, among={0, 2}, sent=torch.zeros(5, dtype=torch.float64))
        preparation.ask(lambda data: {"a": torch.zeros(1)})
        return candidate, state

    row = run(method(ServerStep("asks", prepare=prepare)), rounds=1).history.rows[0]
    assert row["bytes_prepared_down"] == 4 * 40 + 2 * 40
    assert row["bytes_prepared"] == 4 * 12 + 2 * 4 + 4 * 4


def test_a_question_by_name_reads_what_was_sent_and_tells_how_many_have_answered():
    heard = []
    clients = clients_of(trial_federation(), seed=3, noise_seed=4)
    asking = Asked(clients, np.arange(4), torch.device("cpu"), 2, tell=lambda what, share: heard.append((what, share)))

    def answer(data, sent, tools):
        return {"sum": sent["number"] + data.id, "seeds": torch.tensor([tools.seed, tools.noise_seed]) % 1000}

    answers = asking.ask(Question("sums", answer), among={0, 3}, sent={"number": torch.tensor(10.0)})
    assert answers.values["sum"].tolist() == [10.0, 13.0]
    seeds = [seed_for(seed, "prepare", 2) % 1000 for seed in (3, 4)]
    assert answers.values["seeds"].tolist() == [seeds, seeds]
    assert heard == [("sums", 0.5), ("sums", 1.0)]


def test_every_phase_knows_the_runs_seed_and_has_one_of_its_own():
    seen = []

    def prepare(candidate, state, preparation):
        seen.append((preparation.run_seed, preparation.seed))
        return candidate, state

    first, second = (method(ServerStep("asks", prepare=prepare)) for _ in range(2))
    run((Phase(first, until=1), Phase(second)), seed=6)
    (first, own), (second, other) = seen
    assert first == second == 6
    assert own != other


def test_some_clients_can_be_asked_alone():
    heard = []
    answers = asked().ask(lambda data: heard.append(data.id) or {"a": torch.zeros(1)}, among={3, 1, 99})
    assert heard == answers.ids.tolist() == [1, 3]


def test_a_client_is_shown_its_own_rows_and_no_others():
    asking, federation = asked(), trial_federation()
    answers = asking.ask(lambda data: {"total": data.x.double().sum()})
    for client in range(4):
        rows = federation.indices[federation.offsets[client] : federation.offsets[client + 1]]
        assert answers.values["total"][client] == federation.train.x[rows].double().sum()


def test_nobody_left_is_an_error_that_says_where_to_look():
    with pytest.raises(FedstillError, match="audit"):
        asked().ask(lambda data: 1 / 0)
