"""What is sent and what is reported are two decisions; what the server believes is held against the truth."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from run_helpers import (
    CLASSES,
    FEATURES,
    LoopEngine,
    cross_entropy,
    fedavg,
    linear_model,
    toy_federation,
    without_clock,
)
from run_helpers import average as apply_average
from running import federate
from toy import same_bits

from fedstill.compose.wrappers import report_only, send_only
from fedstill.core.trainer import Trained
from fedstill.core.tree import tree_map
from fedstill.core.types import (
    Dataset,
    Federation,
    Method,
    Need,
    Objective,
    Output,
    Phase,
    ServerStep,
    Targets,
    Training,
    Uploads,
    Weights,
)
from fedstill.loop.checkpoint import load_weights
from fedstill.loop.evaluate import NotMeasured
from fedstill.loop.resume import TARGETS_FILE
from fedstill.loop.round import look_at_targets


def average() -> ServerStep:
    return ServerStep("average", apply_average)


def negated(weights):
    return tree_map(lambda leaf: -leaf, weights)


def ruin(needs=()) -> ServerStep:
    """A refinement that ruins the model: its accuracy tells which model was looked at."""
    return ServerStep("ruin", lambda candidate, state, _: (negated(candidate), state), needs=frozenset(needs))


def run(*server: ServerStep, federation=None, **settings):
    federation, model = federation or toy_federation(), linear_model()
    method = Method(Objective(cross_entropy), average(), server)
    settings = {"training": Training(batch_size=6, lr=0.2), "rounds": 4, "cohort": 5, **settings}
    engine = LoopEngine(model, federation)
    return federate(method=method, model=model, federation=federation, engine=engine, **settings)


def test_a_model_that_is_only_reported_is_evaluated_but_never_sent():
    plain, told = run(), run(report_only(ruin()))
    assert same_bits(told.weights, negated(plain.weights))
    assert [row["train_loss"] for row in told.history.rows] == [row["train_loss"] for row in plain.history.rows]
    assert told.history.last["accuracy"] < plain.history.last["accuracy"] - 0.3


def test_a_model_that_is_only_sent_is_what_clients_start_from_and_the_one_before_it_is_evaluated():
    plain, sent = run(ruin()), run(send_only(ruin()))
    assert same_bits(sent.weights, negated(plain.weights))
    assert [row["train_loss"] for row in sent.history.rows] == [row["train_loss"] for row in plain.history.rows]
    assert [row["accuracy_sent"] for row in sent.history.rows] == [row["accuracy"] for row in plain.history.rows]
    assert sent.history.rows[0]["accuracy"] > plain.history.rows[0]["accuracy"] + 0.3


@pytest.mark.parametrize("two_models", [report_only, send_only])
def test_the_run_folder_holds_the_reported_model_and_a_resumed_run_goes_on_from_the_one_sent(tmp_path, two_models):
    server = two_models(ruin())
    whole = run(server, run_dir=tmp_path / "whole", checkpoint_every=1)
    run(server, rounds=2, run_dir=tmp_path / "cut", checkpoint_every=1)
    resumed = run(server, run_dir=tmp_path / "cut", checkpoint_every=1, resume=True)
    assert same_bits(load_weights(tmp_path / "whole" / "last"), whole.weights)
    assert same_bits(resumed.weights, whole.weights)
    assert without_clock(resumed.history.rows) == without_clock(whole.history.rows)


def test_models_that_a_step_leaves_are_looked_at_by_name():
    def apply(candidate, state, round):
        round.models["ruined"] = negated(candidate)
        return candidate, state

    both, ruined = run(ServerStep("leave", apply)), run(report_only(ruin()))
    assert [row["accuracy_ruined"] for row in both.history.rows] == [row["accuracy"] for row in ruined.history.rows]


def leaving() -> ServerStep:
    """A step that leaves a model to be looked at."""

    def apply(candidate, state, round):
        round.models["ruined"] = negated(candidate)
        return candidate, state

    return ServerStep("leave", apply)


def refuse_all_in_round_three(round, client, message):
    if round == 3:
        raise RuntimeError("lost")
    return message


def test_a_round_that_moved_nothing_shows_no_model_of_the_round_before_also_after_a_resume(tmp_path):
    how = {"tamper": refuse_all_in_round_three, "checkpoint_every": 1}
    whole = run(leaving(), run_dir=tmp_path / "whole", **how)
    assert [row["accepted"] for row in whole.history.rows] == [5, 5, 0, 5]
    assert ["accuracy_ruined" in row for row in whole.history.rows] == [True, True, False, True]
    run(leaving(), rounds=2, run_dir=tmp_path / "cut", **how)
    resumed = run(leaving(), run_dir=tmp_path / "cut", resume=True, **how)
    assert without_clock(resumed.history.rows) == without_clock(whole.history.rows)


def test_what_the_server_believes_is_counted_by_class_and_held_against_the_truth():
    belief = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.4, 0.3, 0.3], [0.0, 0.2, 0.8]])
    targets = Targets(belief, torch.tensor([True, True, False, True]))
    row = look_at_targets(targets, torch.tensor([0, 2, 2, 2]))
    assert int(row["pseudo_labels"]) == 3
    assert row["pseudo_label_counts"].tolist() == [1, 1, 1]
    assert float(row["pseudo_label_accuracy"]) == pytest.approx(2 / 3)


def test_without_the_truth_there_is_no_accuracy_and_without_a_belief_nothing():
    targets = Targets(torch.eye(CLASSES), torch.zeros(CLASSES, dtype=torch.bool))
    assert look_at_targets(targets, None).keys() == {"pseudo_labels", "pseudo_label_counts"}
    assert look_at_targets(targets, torch.arange(CLASSES))["pseudo_label_accuracy"] is None
    assert look_at_targets(None, torch.arange(CLASSES)) == {}


def believing(seen: list, needs=(Need.UNLABELED,)) -> ServerStep:
    """Every unlabeled sample is of class 1."""

    def apply(candidate, state, round):
        seen.append(round)
        belief = torch.zeros(len(round.unlabeled), CLASSES).index_fill(1, torch.tensor([1]), 1.0)
        return candidate, {"targets": Targets(belief, torch.ones(len(belief), dtype=torch.bool))._asdict()}

    return ServerStep("believe", apply, needs=frozenset(needs))


def with_server_data(**more):
    federation = toy_federation()
    return dataclasses.replace(federation, unlabeled=federation.test.x, unlabeled_truth=federation.test.y, **more)


def test_rows_tell_how_right_the_server_is_and_the_folder_keeps_what_it_believes(tmp_path):
    seen: list = []
    federation = with_server_data()
    result = run(believing(seen), federation=federation, run_dir=tmp_path)
    share = float((federation.test.y == 1).double().mean())
    assert [row["pseudo_label_accuracy"] for row in result.history.rows] == [pytest.approx(share)] * 4
    assert result.history.last["pseudo_label_counts"] == [0, len(federation.test.y), 0]
    kept = safetensors.torch.load_file(tmp_path / TARGETS_FILE)
    assert torch.equal(kept["probabilities"], result.targets.probabilities)
    assert bool(kept["kept"].all())


def test_no_method_sees_the_truth_and_labeled_data_only_those_that_declare_it():
    seen: list = []
    held = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    run(believing(seen), federation=with_server_data(validation=held), rounds=1)
    run(believing(seen, (Need.UNLABELED, Need.VALIDATION)), federation=with_server_data(validation=held), rounds=1)
    truth = with_server_data().unlabeled_truth
    for round in seen:
        tensors = [value for value in vars(round).values() if isinstance(value, torch.Tensor)]
        assert not any(tensor.shape == truth.shape and torch.equal(tensor, truth) for tensor in tensors)
    assert seen[0].validation is None
    assert torch.equal(seen[1].validation[1], held[1])


def test_label_counts_leave_only_in_the_phases_whose_method_declares_them():
    """Two rounds without, two with: the bytes that clients send grow by a float32 for each class."""
    seen: list = []

    def counting(*needs: Need) -> Method:
        def apply(candidate, state, round):
            seen.append(round.uploads.label_counts)
            return candidate, state

        return Method(Objective(cross_entropy), average(), (ServerStep("look", apply, needs=frozenset(needs)),))

    federation, model = toy_federation(), linear_model()
    result = federate(
        method=(Phase(counting(), until=2), Phase(counting(Need.LABEL_COUNTS_UPLOADED))),
        model=model,
        federation=federation,
        engine=LoopEngine(model, federation),
        training=Training(batch_size=6, lr=0.2),
        rounds=4,
        cohort=5,
    )
    assert [counts is None for counts in seen] == [True, True, False, False]
    assert seen[2].sum(dim=1).tolist() == [12.0] * 5
    sent = [row["bytes_up"] for row in result.history.rows]
    assert [later - sent[0] for later in sent] == [0, 0, 5 * CLASSES * 4, 5 * CLASSES * 4]


# The loop's own cost, with an engine that does nothing but hand back tensors.


class IdleEngine(LoopEngine):
    """Uploads are the start model for everybody; `ends` is when each round came to its evaluation."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.ends = []

    def train(self, work, ids, states):
        count = len(ids)
        weights = Weights(*({k: v.expand(count, *v.shape).clone() for k, v in part.items()} for part in work.start))
        one = torch.ones(count)
        uploads = Uploads(weights, one.double(), one, one, one, {}, None, torch.from_numpy(np.asarray(ids)))
        return Trained(uploads, {k: v + 1 for k, v in states.items()})

    def outputs(self, weights, x, stacked=False, *, features=True, keep=True):
        if features:  # an evaluation, and not the loop's look at the first answers
            self.ends.append(time.perf_counter())
        return Output(torch.zeros(len(x), CLASSES), x)


def wide_federation(clients: int) -> Federation:
    """One row a client."""
    names = tuple("abc")
    train = Dataset("w", torch.zeros(clients, FEATURES), torch.arange(clients) % CLASSES, names)
    test = Dataset("w", torch.zeros(10, FEATURES), torch.arange(10) % CLASSES, names)
    return Federation(train, test, torch.arange(clients), torch.arange(clients + 1))


def round_lengths(objective: Objective, *, clients: int, cohort: int) -> np.ndarray:
    """Seconds of each of 29 rounds. Read the shortest ones: other processes can only make a round longer."""
    federation, model = wide_federation(clients), linear_model()
    engine = IdleEngine(model, federation)
    federate(
        method=fedavg(objective=objective), model=model, federation=federation, training=Training(), engine=engine,
        rounds=30, cohort=cohort,
    )  # fmt: skip
    return np.diff(engine.ends)


def remembering(width: int) -> Objective:
    return Objective(cross_entropy, init=lambda _: {"memory": torch.zeros(width)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [Objective(cross_entropy), remembering(64)], ids=["no state", "64 floats a client"]
)
def test_a_hundred_times_as_many_tiny_clients_cost_the_loop_hardly_more(objective):
    """5 microseconds for each client of the cohort, or 50 nanoseconds for each other client, would be too many."""
    few = round_lengths(objective, clients=1_000, cohort=10)
    many = round_lengths(objective, clients=100_000, cohort=1_000)
    assert many.min() < 4 * few.min()
    assert many[-10:].min() < 1.5 * many[:10].min() + 0.0005


def test_a_round_that_nobody_could_measure_counts_as_not_evaluated_and_the_run_goes_on():
    def away_in_round_two(weights, test, trainer):
        calls.append(1)
        if len(calls) == 2:
            raise NotMeasured("no site measured the model")
        return {"accuracy": 0.5}

    calls: list[int] = []
    result = run(evaluate=away_in_round_two, rounds=3)
    assert [row.get("accuracy") for row in result.history.rows] == [0.5, None, 0.5]
