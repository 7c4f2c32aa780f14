from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from quick import EITHER_ENGINE
from run_helpers import LoopEngine, average, counting_objective, fedavg, linear_model, toy_federation, without_clock
from running import federate
from toy import same_bits

from fedstill.core.errors import FedstillError
from fedstill.core.seeds import cohort_size, seed_for
from fedstill.core.types import Mechanism, Need, ServerStep, Training, Weights
from fedstill.loop.callbacks import Callback, EarlyStop
from fedstill.loop.checkpoint import load_weights
from fedstill.loop.guard import Guard
from fedstill.loop.round import draw_cohort

TRAINING = Training(batch_size=6, lr=0.2)


def run(method=None, *, federation=None, engine=None, **settings):
    federation = federation or toy_federation()
    model = linear_model()
    engine = engine or LoopEngine(model, federation)
    settings = {"training": TRAINING, "rounds": 3, "cohort": 5, **settings}
    return federate(method=method or fedavg(), model=model, federation=federation, engine=engine, **settings)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_client_with_one_full_batch_step_is_gradient_descent_on_its_data():
    """Against the softmax regression gradient X^T (p - y) / n written out in numpy."""
    federation = toy_federation([30])
    result = run(federation=federation, cohort=1, rounds=4, training=Training(batch_size=30, lr=0.5), seed=3)
    first = linear_model().init(seed_for(3, "model"))
    w, b = (first.params[k].numpy().astype(np.float64) for k in ("weight", "bias"))
    x, y = federation.train.x.numpy().astype(np.float64), np.eye(3)[federation.train.y.numpy()]
    for _ in range(4):
        z = np.exp(x @ w.T + b)
        error = z / z.sum(1, keepdims=True) - y
        w, b = w - 0.5 * error.T @ x / 30, b - 0.5 * error.mean(0)
    np.testing.assert_allclose(result.weights.params["weight"].numpy(), w, atol=1e-5)
    np.testing.assert_allclose(result.weights.params["bias"].numpy(), b, atol=1e-5)


def test_training_learns_the_classes():
    result = run(rounds=15, cohort=10)
    assert result.history.last["accuracy"] > 0.8
    assert result.history.last["loss"] < result.history.rows[0]["loss"]


def test_cohorts_do_not_depend_on_the_method_and_change_with_seed_and_round():
    def cohorts(method, seed):
        federation = toy_federation()
        engine = LoopEngine(linear_model(), federation)
        run(method, federation=federation, engine=engine, seed=seed, rounds=6)
        return [call["ids"] for call in engine.calls]

    idle = fedavg(objective=counting_objective(), aggregate=ServerStep("nothing"))
    plain, other = cohorts(fedavg(), 1), cohorts(idle, 1)
    assert plain == other
    assert plain != cohorts(fedavg(), 2)
    assert len({tuple(ids) for ids in plain}) > 1


def test_clients_without_data_are_never_drawn_and_everybody_else_is():
    clients = np.flatnonzero([0, 3, 0, 1, 5, 2])
    seen = [draw_cohort(clients, 2, seed=0, round=t) for t in range(60)]
    assert all(len(set(ids.tolist())) == 2 for ids in seen)
    assert set(np.concatenate(seen).tolist()) == {1, 3, 4, 5}
    federation = toy_federation([0, 4, 0, 4])
    engine = LoopEngine(linear_model(), federation)
    result = run(federation=federation, engine=engine, cohort=4)
    assert all(call["ids"] == [1, 3] for call in engine.calls)
    assert [row["cohort"] for row in result.history.rows] == [2, 2, 2]


@pytest.mark.parametrize("name", EITHER_ENGINE)
def test_an_engine_by_name_trains_as_the_plain_loop_does(name):
    """One full batch a client, so that the order of samples does not matter."""
    full = Training(batch_size=12, lr=0.2)
    method = fedavg(objective=counting_objective(), aggregate=momentum_server())
    ours, theirs = run(method, training=full), run(method, training=full, engine=name, device="cpu")
    torch.testing.assert_close(theirs.weights, ours.weights)
    assert [row["bytes_up"] for row in theirs.history.rows] == [row["bytes_up"] for row in ours.history.rows]


def test_two_runs_are_equal_bit_for_bit():
    first, second = run(rounds=4), run(rounds=4)
    assert same_bits(first.weights, second.weights)
    assert without_clock(first.history.rows) == without_clock(second.history.rows)
    assert not same_bits(first.weights, run(rounds=4, seed=1).weights)


def momentum_server() -> ServerStep:
    """A server with state, a broadcast, and buffers of every kind in it."""

    def init(weights):
        return {"v": {k: torch.zeros_like(v) for k, v in weights.params.items()}, "steps": torch.tensor(0), "none": {}}

    def apply(candidate, state, round):
        moved, _ = average(candidate, {}, round)
        v = {k: 0.9 * state["v"][k] + moved.params[k] - round.start.params[k] for k in moved.params}
        params = {k: round.start.params[k] + v[k] for k in v}
        round.metrics["speed"] = float(sum(part.square().sum() for part in v.values()))
        return Weights(params, moved.buffers), {"v": v, "steps": state["steps"] + 1, "none": {}}

    return ServerStep("momentum", apply, init, lambda state: {"velocity": state["v"]})


@pytest.mark.parametrize("budget", [2 << 30, 0], ids=["states in memory", "states on disk"])
@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, stop, budget):
    method = fedavg(objective=counting_objective(), aggregate=momentum_server())
    settings = {"seed": 5, "checkpoint_every": 2, "state_budget": budget}
    whole = run(method, rounds=7, run_dir=tmp_path / "whole", **settings)

    class Interrupt(Callback):
        def on_round(self, row):
            if row["round"] == stop + 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(method, rounds=7, run_dir=tmp_path / "cut", callbacks=[Interrupt()], **settings)
    engine = LoopEngine(linear_model(), toy_federation())
    resumed = run(method, rounds=7, run_dir=tmp_path / "cut", engine=engine, resume=True, **settings)
    assert engine.calls[0]["round"] == stop // 2 * 2 + 1
    assert same_bits(resumed.weights, whole.weights)
    assert same_bits(resumed.best_weights, whole.best_weights)
    assert without_clock(resumed.history.rows) == without_clock(whole.history.rows)
    for name in ("metrics.jsonl", "audit.jsonl"):
        assert without_clock(lines(tmp_path / "cut" / name)) == without_clock(lines(tmp_path / "whole" / name))
    assert resumed.seconds >= sum(row["seconds"] for row in resumed.history.rows[:stop])


def test_resuming_a_finished_run_trains_nothing_and_a_longer_one_goes_on(tmp_path):
    settings = {"run_dir": tmp_path, "checkpoint_every": 10}
    done = run(rounds=3, **settings)
    engine = LoopEngine(linear_model(), toy_federation())
    again = run(rounds=3, resume=True, engine=engine, **settings)
    assert engine.calls == []
    assert same_bits(done.weights, again.weights)
    longer = run(rounds=6, resume=True, engine=engine, **settings)
    assert [call["round"] for call in engine.calls] == [4, 5, 6]
    assert same_bits(longer.weights, run(rounds=6).weights)


def test_a_damaged_newest_checkpoint_costs_rounds_but_not_the_run(tmp_path, caplog):
    settings = {"rounds": 5, "run_dir": tmp_path, "checkpoint_every": 2}
    whole = run(**settings)
    with (tmp_path / "checkpoints" / "round-000005.zip").open("r+b") as file:
        file.truncate(100)
    engine = LoopEngine(linear_model(), toy_federation())
    again = run(resume=True, engine=engine, **settings)
    assert [call["round"] for call in engine.calls] == [5]
    assert same_bits(whole.weights, again.weights)
    assert "round-000005.zip does not verify" in (tmp_path / "log.txt").read_text()
    assert [row["round"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_resume_without_any_checkpoint_starts_at_round_one(tmp_path):
    assert same_bits(run(run_dir=tmp_path, resume=True).weights, run().weights)


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    run(run_dir=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(FedstillError, match="already holds a run"):
        run(run_dir=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    with pytest.raises(FedstillError, match="resume needs run_dir"):
        run(resume=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"cohort": 4}, "cohort was 5 and is 4"),
        ({"training": Training()}, r"training\.batch_size was 6 and is 50 now, training\.lr was"),
    ],
)
def test_a_resume_with_other_settings_is_refused(tmp_path, change, told):
    run(run_dir=tmp_path)
    with pytest.raises(FedstillError, match=told):
        run(run_dir=tmp_path, resume=True, **change)


def test_the_run_folder_holds_what_it_promises(tmp_path):
    result = run(run_dir=tmp_path, rounds=4, checkpoint_every=2, tamper=lambda t, c, data: data if c else b"")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.jsonl", "best", "calibration.json", "checkpoints", "last", "log.txt", "metrics.jsonl"]
    assert same_bits(load_weights(tmp_path / "last"), result.weights)
    assert same_bits(load_weights(tmp_path / "best"), result.best_weights)
    assert lines(tmp_path / "metrics.jsonl") == result.history.rows
    assert lines(tmp_path / "audit.jsonl") == result.audit != []
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "round-000002.zip",
        "round-000004.zip",
    ]
    assert "client 0: unreadable message" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("metric", ["accuracy", "loss", "macro_f1"])
def test_best_weights_are_those_of_the_best_round(metric):
    kept = {}

    def remember(candidate, state, round):
        moved, state = average(candidate, state, round)
        moved = Weights({k: -v for k, v in moved.params.items()}, moved.buffers) if round.number % 2 else moved
        kept[round.number] = moved
        return moved, state

    result = run(fedavg(aggregate=ServerStep("remember", remember)), rounds=6, best=metric)
    values = [row[metric] for row in result.history.rows]
    assert result.best[metric] == (min(values) if metric == "loss" else max(values))
    assert same_bits(result.best_weights, kept[result.best["round"]])
    assert same_bits(result.weights, kept[6])


def test_a_best_model_by_no_metric_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(
        FedstillError, match="best: no metric 'macro_f2' in an evaluated round: did you mean 'macro_f1'"
    ):
        run(rounds=1, best="macro_f2")
    run(rounds=2, run_dir=tmp_path, best="loss")
    with pytest.raises(FedstillError, match="best was loss and is accuracy now"):
        run(rounds=3, run_dir=tmp_path, resume=True)


def test_states_are_kept_for_accepted_clients_only():
    federation = toy_federation()
    engine = LoopEngine(linear_model(), federation)

    def drop_client_three(number, client, data):
        if client == 3:
            raise ConnectionError("gone")
        return data

    run(
        fedavg(objective=counting_objective()), federation=federation, engine=engine, cohort=10, rounds=4,
        tamper=drop_client_three,
    )  # fmt: skip
    seen = engine.calls[-1]["states"]["count"].tolist()
    assert seen == [0 if client == 3 else 3 for client in range(10)]


@pytest.mark.parametrize("void", ["quorum", "server"])
def test_a_void_round_changes_nothing_but_the_audit(void):
    federation = toy_federation()
    engine = LoopEngine(linear_model(), federation)

    def spoil(candidate, state, round):
        moved, _ = average(candidate, state, round)
        count = {"count": state["count"] + 1}
        if void == "server" and round.number == 2:
            moved.params["bias"][1] = math.nan
        return moved, count

    def lose_all(number, client, data):
        return b"" if void == "quorum" and number == 2 else data

    server = ServerStep("spoil", spoil, lambda _: {"count": torch.tensor(0)}, lambda state: state)
    result = run(
        fedavg(objective=counting_objective(), aggregate=server), federation=federation, engine=engine, cohort=10,
        tamper=lose_all,
    )  # fmt: skip
    assert [call["received"]["count"].item() for call in engine.calls] == [0, 1, 1]
    assert engine.calls[2]["states"]["count"].tolist() == [1] * 10
    assert result.history.rows[1]["accuracy"] == result.history.rows[0]["accuracy"]
    assert result.audit[-1]["round"] == 2
    assert result.audit[-1]["client"] is None
    assert result.audit[-1]["reason"].endswith("the round keeps the old model")
    assert all(leaf.isfinite().all() for leaf in result.weights.params.values())


def test_a_client_that_diverges_on_its_own_is_quarantined_in_the_simulation_too():
    federation = toy_federation()
    federation.train.x[federation.indices[:12]] = math.inf  # client 0
    result = run(federation=federation, cohort=10)
    assert {(record["client"], record["reason"]) for record in result.audit} == {(0, "params hold NaN or Inf")}
    assert [row["accepted"] for row in result.history.rows] == [9, 9, 9]


def look_at_round(needs=frozenset()):
    seen = []

    def apply(candidate, state, round):
        seen.append(round)
        return average(candidate, state, round)

    return ServerStep("look", apply, needs=frozenset(needs)), seen


def test_what_is_not_declared_is_not_passed():
    server, seen = look_at_round()
    run(fedavg(aggregate=server), federation=toy_federation(unlabeled=True))
    assert all(round.unlabeled is None and round.uploads.label_counts is None for round in seen)


def test_what_is_declared_is_passed():
    server, seen = look_at_round({Need.UNLABELED, Need.LABEL_COUNTS_UPLOADED})
    federation = toy_federation([7, 0, 5, 9], unlabeled=True)
    run(fedavg(aggregate=server), federation=federation, cohort=2)
    for round in seen:
        assert torch.equal(round.unlabeled, federation.unlabeled)
        assert torch.equal(round.uploads.label_counts.sum(dim=1), round.uploads.size.float())
        assert round.population == 4
    assert [round.number for round in seen] == [1, 2, 3]
    assert len({round.seed for round in seen}) == 3


def test_an_unmet_need_is_told_before_round_one():
    server, _ = look_at_round({Need.UNLABELED})
    engine = LoopEngine(linear_model(), toy_federation())
    with pytest.raises(FedstillError, match="feddf' needs unlabeled data"):
        run(fedavg(aggregate=server), engine=engine, label="feddf")
    assert engine.calls == []


def test_what_is_transmitted_is_what_the_server_sees_and_its_seed_changes_with_the_round():
    seeds = []

    def halve(uploads, start, seed):
        seeds.append(seed)
        params = {k: (v + start.params[k]) / 2 for k, v in uploads.weights.params.items()}
        return uploads._replace(weights=uploads.weights._replace(params=params))

    half, full = run(fedavg(way=(Mechanism(per_client=halve),)), rounds=1), run(rounds=1)
    start = linear_model().init(seed_for(0, "model"))
    expected = (full.weights.params["weight"] + start.params["weight"]) / 2
    torch.testing.assert_close(half.weights.params["weight"], expected)
    run(fedavg(way=(Mechanism(per_client=halve),)), rounds=3)
    assert len(set(seeds)) == 3


def test_bytes_are_those_of_what_is_sent():
    """Linear model: 15 float32 params, one int64 and one float32 buffer = 72 bytes; scalars 8 + 3 x 4 = 20."""
    result = run(rounds=2, cohort=5)
    assert [row["bytes_down"] for row in result.history.rows] == [5 * 72] * 2
    assert [row["bytes_up"] for row in result.history.rows] == [5 * 92] * 2
    talkative = fedavg(aggregate=dataclasses.replace(momentum_server(), needs=frozenset({Need.LABEL_COUNTS_UPLOADED})))
    result = run(talkative, rounds=1, cohort=5)
    assert result.history.rows[0]["bytes_down"] == 5 * (72 + 60)
    assert result.history.rows[0]["bytes_up"] == 5 * (92 + 12)


def test_rounds_between_evaluations_have_no_accuracy_but_the_last_has():
    result = run(rounds=8, evaluate_every=3)
    assert [row["round"] for row in result.history.evaluated] == [3, 6, 8]


def test_a_callback_stops_the_run_and_its_last_round_is_evaluated():
    class StopAt(Callback):
        def __init__(self):
            self.events = []

        def on_start(self, info):
            self.events.append(("start", info.rounds, info.population, info.cohort, info.parameters))

        def on_round(self, row):
            self.events.append(("round", row["round"]))
            return row["round"] == 2

        def on_end(self, result):
            self.events.append(("end", len(result.history.rows)))

    watcher = StopAt()
    result = run(rounds=9, evaluate_every=5, callbacks=[watcher])
    assert watcher.events == [("start", 9, 10, 5, 15), ("round", 1), ("round", 2), ("end", 2)]
    assert result.history.last["round"] == 2


def test_a_run_that_stopped_early_stays_stopped_when_resumed(tmp_path):
    settings = {"rounds": 30, "run_dir": tmp_path, "training": Training(lr=1e-9)}
    stopped = run(callbacks=[EarlyStop(2)], **settings)
    assert len(stopped.history.rows) == 3
    again = run(callbacks=[EarlyStop(2)], resume=True, **settings)
    assert len(again.history.rows) == 3


def test_server_metrics_are_in_the_rows():
    result = run(fedavg(aggregate=momentum_server()))
    assert all(row["server/speed"] > 0 for row in result.history.rows)


@pytest.mark.parametrize("key", ["rounds", "evaluate_every", "checkpoint_every"])
def test_a_count_below_one_is_one_line(key):
    with pytest.raises(FedstillError, match=f"{key} = 0: use at least 1"):
        run(**{key: 0})


def test_a_federation_without_data_is_one_line():
    with pytest.raises(FedstillError, match="no client holds any data"):
        run(federation=toy_federation([0, 0]), cohort=1)


def test_the_global_random_streams_are_left_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()
    run(guard=Guard(norm_bound=10.0))
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.testing.assert_equal(np.random.get_state(), numpy_before)


# How many clients a round draws: a number, or a share of the population.


@pytest.mark.parametrize(
    ("cohort", "population", "size"),
    [(0.1, 100, 10), (0.001, 100, 1), (0.25, 10, 2), (1, 10, 1), (10, 10, 10), (7.0, 10, 7)],
)
def test_a_fraction_is_a_share_of_the_population(cohort, population, size):
    assert cohort_size(cohort, population) == size


@pytest.mark.parametrize("cohort", [0, -1, 11, 2.5, 0.0, 1.0, math.nan, math.inf])
def test_an_impossible_cohort_is_one_line(cohort):
    with pytest.raises(FedstillError, match=f"cohort = {cohort}"):
        cohort_size(cohort, 10)
