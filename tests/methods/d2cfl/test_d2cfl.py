"""D2C-FL in real runs: when it is FedAvg, what it keeps, what it trains with, and that it goes with other methods."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import toy
from quick import EITHER_ENGINE, first_quick
from running import federate
from students import form
from toy import network, same_bits
from whole_server import watched

import fedstill
from fedstill.compose.combine import targets
from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Phase, Training, Weights
from fedstill.engine import engine as engine_module
from fedstill.methods import fedavg
from fedstill.methods.lookup import build_method

CLASSES, FEATURES = 4, 6
TRAINING = Training(batch_size=8, epochs=2, lr=0.1)
QUICK: dict[str, Any] = {"past": 2, "threshold": 0.5, "epochs": 2, "batch_size": 8, "lr": 0.02}
WRITTEN = 'past=2, rule="max", threshold=0.5, feedback=true, student.epochs=2, student.batch_size=8, student.lr=0.02'
PAPER = (
    'd2cfl(rule="max", labels="hard", threshold=0.75, beta=0.7, student_start="carried", student_share="fixed", '
    'feedback=true, student.lr=1e-3, student.lr_schedule="constant", student.lr_epoch_decay=0.95)'
)
either_engine = pytest.mark.parametrize("engine", EITHER_ENGINE)
either_rule = pytest.mark.parametrize("rule", first_quick(["max", "mean"]))


def samples(count: int, use: str) -> toy.Points:
    return toy.points(0, "d2cfl", use, count=count)


def federation(clients: int = 6, size: int = 20) -> Federation:
    """Neighbouring clients hold neighbouring classes."""
    unlabeled, truth = samples(60, "unlabeled")
    sizes = [size] * clients
    train, test = samples(sum(sizes), "train"), samples(40, "test")
    return toy.federation_of(train, test, sizes, unlabeled=unlabeled, unlabeled_truth=truth)


class Seen(NamedTuple):
    """What a run sent and believed after each round, and its result."""

    sent: list[Weights]
    states: list[dict]
    kept: list[torch.Tensor]
    result: Any


def run(method, *, net: str = "mlp", rounds: int = 5, engine: str = "batched", **how: Any) -> Seen:
    seen = Seen([], [], [], None)

    def watch(one):
        def look(moved, state, _):
            seen.sent.append(moved)
            seen.states.append(state)
            belief = targets(one, state)
            seen.kept.append(torch.zeros(60, dtype=torch.bool) if belief is None else belief.kept)

        return watched(one, look)

    phases = (Phase(method),) if not isinstance(method, tuple) else method
    result = federate(
        method=[phase._replace(method=watch(phase.method)) for phase in phases],
        model=network(net), federation=federation(), training=TRAINING, rounds=rounds, cohort=3, seed=4,
        engine=engine, device="cpu", **how,
    )  # fmt: skip
    return seen._replace(result=result)


def distance(found: Weights, wanted: Weights) -> float:
    return max(float((leaf - found.params[name]).abs().max()) for name, leaf in wanted.params.items())


def rounds_like_fedavg(seen: Seen, net: str = "mlp", engine: str = "batched", **how: Any) -> list[bool]:
    plain = run(fedavg(), net=net, engine=engine, rounds=len(seen.sent), **how)
    return [same_bits(ours, theirs) for ours, theirs in zip(seen.sent, plain.sent, strict=True)]


@either_engine
@pytest.mark.parametrize("past", [1, 3])
def test_while_teachers_are_collected_it_is_fedavg_and_no_longer(past, engine):
    ours = run(form("d2cfl", "paper", **{**QUICK, "past": past}), engine=engine)
    assert rounds_like_fedavg(ours, engine=engine) == [r <= past for r in range(1, 6)]


@either_engine
def test_labels_begin_when_the_warm_up_is_over_and_there_is_a_teacher(engine):
    for warm_up, first in ((0, 2), (1, 2), (2, 3), (4, 5)):
        ours = run(form("d2cfl", "paper", **{**QUICK, "past": 3, "warm_up": warm_up}), engine=engine)
        assert [bool(kept.any()) for kept in ours.kept] == [r >= first for r in range(1, 6)]
        assert rounds_like_fedavg(ours, engine=engine) == [r < first for r in range(1, 6)]
        assert [len(state["migrate"]["past_labels"]["sure"]) for state in ours.states] == [1, 2, 3, 3, 3]


def test_a_warm_up_as_long_as_there_are_teachers_is_the_default():
    ours, default = run(form("d2cfl", "paper", **QUICK, warm_up=2)), run(form("d2cfl", "paper", **QUICK))
    assert all(same_bits(a, b) for a, b in zip(ours.sent, default.sent, strict=True))


def test_at_alpha_one_every_model_that_is_sent_is_fedavgs_to_the_last_bit():
    ours = run(form("d2cfl", "paper", **QUICK, mix_alpha=1.0))
    assert all(rounds_like_fedavg(ours))
    assert bool(ours.kept[-1].any())  # though it labels, and its student learns


def test_with_fewer_labels_than_the_least_number_a_round_is_fedavgs_and_learns_none():
    """At alpha = 1 the labels do not depend on what is learnt from them."""
    counts = [int(kept.sum()) for kept in run(form("d2cfl", "paper", **QUICK, mix_alpha=1.0)).kept]
    least = sorted(set(counts))[-2] + 1
    assert 0 < least <= max(counts)
    held = run(form("d2cfl", "paper", **QUICK, mix_alpha=1.0, least=least))
    assert [int(kept.sum()) for kept in held.kept] == [count if count >= least else 0 for count in counts]
    learnt = ["server/student_loss" in row for row in held.result.history.rows]
    assert learnt == [count >= least for count in counts]
    for count, state, sent in zip(counts, held.states, held.sent, strict=True):
        assert same_bits(state["migrate"]["student"], sent) == (count < least)


def test_no_round_is_fedavgs_for_having_just_enough_labels():
    first = int(run(form("d2cfl", "paper", **QUICK)).kept[2].sum())
    assert rounds_like_fedavg(run(form("d2cfl", "paper", **QUICK, least=first), rounds=3)) == [True, True, False]
    assert rounds_like_fedavg(run(form("d2cfl", "paper", **QUICK, least=first + 1), rounds=3)) == [True, True, True]


@pytest.mark.parametrize(("option", "value"), [("least", 0), ("least", -1), ("warm_up", -1)])
def test_impossible_warm_ups_and_numbers_of_labels_are_refused(option, value):
    with pytest.raises(FedstillError, match=f"method.{option} = {value}"):
        form("d2cfl", "paper", **{option: value})


def test_what_the_mean_keeps_the_maximum_keeps_in_every_round():
    """At alpha = 1 both rules have the same teachers."""
    by_max, by_mean = (
        run(form("d2cfl", "paper", **{**QUICK, "rule": rule, "mix_alpha": 1.0}), rounds=8) for rule in ("max", "mean")
    )
    pairs = list(zip(by_max.kept, by_mean.kept, strict=True))
    assert not any(bool((mean & ~most).any()) for most, mean in pairs)
    assert any(int(most.sum()) > int(mean.sum()) > 0 for most, mean in pairs)


def test_the_students_learning_rate_starts_anew_every_round_and_falls_from_epoch_to_epoch(monkeypatch):
    rates = []

    def watched(*args, **how):
        plan = make_plan(*args, **how)
        if how["training"].optimizer == "adam":
            rates.append(list(dict.fromkeys(plan.lr[:, 0].tolist())))
        return plan

    make_plan = engine_module.make_plan
    monkeypatch.setattr(engine_module, "make_plan", watched)
    run(form("d2cfl", "paper", batch_size=8, past=2, threshold=0.35), rounds=5)
    assert len(rates) == 3
    for one in rates:
        assert one == pytest.approx([1e-3, 9.5e-4, 9.025e-4, 8.57375e-4, 8.1450625e-4], rel=1e-12)


def test_the_optimiser_is_the_one_asked_for(monkeypatch):
    asked = []

    def watched(*args, **how):
        asked.append(how["training"])
        return make_plan(*args, **how)

    make_plan = engine_module.make_plan
    monkeypatch.setattr(engine_module, "make_plan", watched)
    run(form("d2cfl", "paper", **{**QUICK, "optimizer": "sgd", "lr_epoch_decay": 1.0, "epochs": 3}), rounds=3)
    student = asked[-1]
    assert (student.optimizer, student.lr, student.lr_epoch_decay, student.epochs) == ("sgd", 0.02, 1.0, 3)
    assert (student.momentum, student.batch_size) == (0.0, 8)


@either_rule
@pytest.mark.parametrize("net", first_quick(["mlp", "norm"]))
@pytest.mark.parametrize("cut", first_quick([1, 2, 3, 4], 2), ids=lambda cut: f"stopped after round {cut}")
def test_a_run_resumed_while_teachers_are_collected_or_later_equals_an_uninterrupted_one(tmp_path, rule, net, cut):
    method = form("d2cfl", "paper", **{**QUICK, "past": 3, "rule": rule, "rollback": "fixed" if cut % 2 else "fresh"})
    how = {"net": net, "checkpoint_every": 1}
    whole = run(method, rounds=6, run_dir=tmp_path / "whole", **how)
    run(method, rounds=cut, run_dir=tmp_path / "cut", **how)
    resumed = run(method, rounds=6, run_dir=tmp_path / "cut", resume=True, **how)
    assert len(resumed.sent) == 6 - cut
    assert same_bits(resumed.sent[-1], whole.sent[-1])
    assert same_bits(resumed.states[-1], whole.states[-1])
    timeless = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in one.result.history.rows]
        for one in (whole, resumed)
    ]
    assert timeless[0] == timeless[1]


@either_engine
def test_after_a_switch_it_collects_its_own_teachers_before_it_labels(engine):
    ours = run(build_method(f"fedavg until 3 then d2cfl({WRITTEN})"), rounds=7, engine=engine)
    assert rounds_like_fedavg(ours, engine=engine) == [True] * 5 + [False] * 2
    assert [len(state["migrate"]["past_labels"]["sure"]) for state in ours.states[3:]] == [1, 2, 2, 2]
    assert [int(kept.sum()) for kept in ours.kept[:5]] == [0] * 5
    assert all(bool(kept.any()) for kept in ours.kept[5:])


def test_without_feedback_the_average_is_sent_and_the_teacher_reported():
    ours, fed_back = run(form("d2cfl", "paper", **QUICK, feedback=False)), run(form("d2cfl", "paper", **QUICK))
    assert all(rounds_like_fedavg(ours))
    assert not same_bits(ours.result.weights, ours.sent[-1])
    assert same_bits(fed_back.result.weights, fed_back.sent[-1])


@either_rule
def test_the_log_tells_how_many_labels_there_are_of_which_class_and_how_many_are_right(rule):
    ours = run(form("d2cfl", "paper", **{**QUICK, "rule": rule}))
    for row, kept, state in zip(ours.result.history.rows, ours.kept, ours.states, strict=True):
        answer = state["migrate"]["targets"]["probabilities"].argmax(1)[kept]
        assert row["pseudo_labels"] == int(kept.sum())
        assert row["pseudo_label_counts"] == [int((answer == c).sum()) for c in range(CLASSES)]
        assert row["server/kept_share"] == pytest.approx(row["pseudo_labels"] / 60)
        labels = row["round"] > 2
        assert (row["pseudo_labels"] > 0) == labels
        assert ({"accuracy_student", "accuracy_aggregated", "server/student_loss"} <= row.keys()) == labels
        if labels:
            right = (answer == federation().unlabeled_truth[kept]).double().mean()
            assert row["pseudo_label_accuracy"] == pytest.approx(right.item())
        else:
            assert row["pseudo_label_accuracy"] is None


def test_what_a_warming_server_believes_is_what_its_model_says():
    ours = run(form("d2cfl", "paper", **QUICK), rounds=1)
    weights, model = ours.sent[0], network("mlp")
    belief = torch.softmax(model.apply(weights, federation().unlabeled)[0].logits, 1)
    torch.testing.assert_close(ours.result.targets.probabilities, belief)
    assert not bool(ours.result.targets.kept.any())


def test_by_default_clients_get_fedavgs_average_and_the_mix_with_the_student_is_reported():
    ours = run(build_method("d2cfl(past=2, student.batch_size=8, student.lr=0.02)")[0].method)
    assert all(rounds_like_fedavg(ours))
    assert not same_bits(ours.result.weights, ours.sent[-1])
    shares = [row.get("server/student_share") for row in ours.result.history.rows]
    assert shares[:2] == [None, None]
    assert all(0 < share <= 0.8 for share in shares[2:])


def test_by_default_every_row_is_learnt_from_the_mean_of_the_teachers_answers():
    ours = run(build_method("d2cfl(past=2, student.batch_size=8, student.lr=0.02)")[0].method)
    before, after = ours.states[-2]["migrate"], ours.states[-1]["migrate"]
    assert bool(ours.kept[-1].all())
    mean = before["past_probabilities"]["probabilities"].mean(0)
    assert torch.equal(after["targets"]["probabilities"], mean)


@pytest.mark.slow
def test_the_default_is_not_below_fedavg_where_the_form_of_the_paper_collapses():
    """Digits on 20 clients, Dirichlet 0.1, 5 a round; the mean accuracy of rounds 16 to 20, over three seeds."""
    found: dict[str, list[float]] = {"fedavg": [], "d2cfl": [], "paper": []}
    for seed in range(3):
        setting = fedstill.Experiment(
            rounds=20, cohort=5, seed=seed, data={"source": "digits", "unlabeled": 300},
            partition={"scheme": "lda", "clients": 20, "alpha": 0.1, "min_size": 5},
            model={"name": "mlp", "hidden": [64]}, local={"epochs": 2, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
        )  # fmt: skip
        for name, method in (("fedavg", "fedavg"), ("d2cfl", "d2cfl"), ("paper", PAPER)):
            rows = fedstill.run(setting.replace(method=method)).history.rows
            found[name].append(sum(row["accuracy"] for row in rows[-5:]) / 5)
    assert all(ours > plain for ours, plain in zip(found["d2cfl"], found["fedavg"], strict=True))
    assert all(paper < plain - 0.2 for paper, plain in zip(found["paper"], found["fedavg"], strict=True))
