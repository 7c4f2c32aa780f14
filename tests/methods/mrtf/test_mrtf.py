"""MrTF in real runs: when it is FedAvg, what it sends and reports, what it remembers, and what its paper claims."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import toy
from quick import EITHER_ENGINE, first_quick
from running import federate
from students import form
from torch import nn
from toy import furthest, same_bits
from weighed import weighed

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Training
from fedstill.data import Unlabeled, load, make_federation
from fedstill.methods import fedavg
from fedstill.methods.lookup import build_method
from fedstill.models import build_model, from_module
from fedstill.partition import PARTITIONS

CLASSES, FEATURES = 4, 6
TRAINING = Training(batch_size=8, epochs=2, lr=0.1)
QUICK: dict[str, Any] = {"steps": 6, "batch_size": 8, "lr": 0.01, "warm_up": 1}
CODE: dict[str, Any] = {key: value for key, value in QUICK.items() if key != "warm_up"}  # has no warm-up
WRITTEN = "student.steps=6, student.batch_size=8, student.lr=0.01, warm_up=1"
either_engine = pytest.mark.parametrize("engine", EITHER_ENGINE)


def federation() -> Federation:
    """Neighbouring clients hold neighbouring classes; the server wants the test inputs labelled."""
    sizes = (20, 5, 30, 12, 8, 25)
    train, test = (toy.points(0, "mrtf", use, count=n) for n, use in ((sum(sizes), "train"), (50, "test")))
    return toy.federation_of(train, test, sizes, unlabeled=test[0], unlabeled_truth=test[1])


def run(method, **how):
    settings = {
        "model": toy.network(),
        "federation": federation(), "training": TRAINING, "rounds": 4, "cohort": 3, "seed": 2, "engine": "batched",
        "device": "cpu",
    }  # fmt: skip
    return federate(method=method, **{**settings, **how})


def told(result, key: str) -> list:
    return [row.get(key) for row in result.history.rows]


@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("preset", ["correct", "released"])
def test_without_steps_it_is_fedavg_of_the_same_weighting_bit_for_bit(preset, weighting):
    ours = run(weighed(form("mrtf", preset, steps=0), weighting))
    assert same_bits(ours.weights, run(weighed(fedavg(), weighting)).weights)


def test_without_feedback_clients_get_the_average_and_the_refined_model_is_reported():
    ours, plain, fed = (
        run(method)
        for method in (form("mrtf", **QUICK), weighed(fedavg(), "uniform"), form("mrtf", feedback=True, **QUICK))
    )
    assert told(ours, "train_loss") == told(plain, "train_loss")
    assert told(ours, "accuracy_aggregated") == told(plain, "accuracy")
    assert told(fed, "train_loss")[1:] != told(plain, "train_loss")[1:]
    assert furthest(ours.weights, plain.weights) > 1e-3
    data = federation()
    model = toy.network()
    answer = model.apply(ours.weights, data.test.x)[0].logits.argmax(1)
    assert float((answer == data.test.y).double().mean()) == told(ours, "accuracy")[-1]


def test_rows_tell_how_many_pseudo_labels_are_right_and_what_the_average_alone_is_worth():
    result, data = run(form("mrtf", **QUICK)), federation()
    keys = {"pseudo_label_accuracy", "accuracy_aggregated", "server/u", "server/teacher_agreement"}
    keys |= {"server/distill_loss_before", "server/distill_loss_after"}
    assert all(keys <= row.keys() and row["pseudo_labels"] == 50 for row in result.history.rows)
    right = (result.targets.probabilities.argmax(1) == data.unlabeled_truth).double().mean()
    assert told(result, "pseudo_label_accuracy")[-1] == pytest.approx(float(right))
    unknown = run(form("mrtf", **QUICK), federation=dataclasses.replace(data, unlabeled_truth=None))
    assert told(unknown, "pseudo_label_accuracy") == [None] * 4
    assert same_bits(unknown.weights, result.weights)


def test_the_more_clients_have_learnt_the_more_the_global_models_count():
    result = run(form("mrtf", **QUICK), rounds=8)
    expected = [0.25 + 0.75 * loss / np.log(CLASSES) for loss in told(result, "train_loss")]
    assert told(result, "server/u") == pytest.approx(expected)
    assert told(result, "server/u")[-1] < told(result, "server/u")[0] - 0.1


def test_the_printed_u_and_the_bounded_one_are_the_same_while_the_loss_is_below_that_of_a_guess():
    sent = form("mrtf", feedback=True, refine_sharpness=4.0, refine_share="all", lr_schedule="constant", **QUICK)
    assert same_bits(run(form("mrtf", "paper", **QUICK)).weights, run(sent).weights)
    bold = {"training": dataclasses.replace(TRAINING, lr=20.0), "rounds": 1}
    printed, bounded = (run(method, **bold) for method in (form("mrtf", "paper", **QUICK), sent))
    assert told(printed, "server/u")[0] > 1.0 == told(bounded, "server/u")[0]
    assert not same_bits(printed.weights, bounded.weights)
    assert printed.audit == []  # its model is finite and was taken


@pytest.mark.parametrize("feedback", [True, False])
def test_every_second_round_the_rest_is_fedavg(feedback):
    result = run(form("mrtf", every=2, feedback=feedback, **QUICK), rounds=5)
    assert [value is not None for value in told(result, "server/u")] == [False, True, False, True, False]
    assert [value is not None for value in told(result, "accuracy_aggregated")] == [False, True, False, True, False]
    plain = run(weighed(fedavg(), "uniform"), rounds=5)
    assert told(result, "accuracy")[0] == told(plain, "accuracy")[0]
    assert same_bits(result.weights, plain.weights) != feedback


def test_the_released_form_logs_losses_only_of_rounds_that_it_refines():
    result = run(form("mrtf", "released", every=2, **CODE), rounds=6)
    losses, trust = told(result, "train_loss"), told(result, "server/u")
    assert trust[1] == 1.0
    assert trust[3] == pytest.approx(0.25 + 0.75 * losses[1] / np.log(CLASSES), rel=1e-5)
    assert trust[5] == pytest.approx(0.25 + 0.75 * (losses[1] + losses[3]) / 2 / np.log(CLASSES), rel=1e-5)


@either_engine
def test_a_resumed_run_remembers_its_targets_and_losses(tmp_path, engine):
    method, how = form("mrtf", "released", **CODE), {"engine": engine, "checkpoint_every": 1}
    whole = run(method, rounds=6, **how)
    run(method, rounds=3, run_dir=tmp_path / "cut", **how)
    resumed = run(form("mrtf", "released", **CODE), rounds=6, run_dir=tmp_path / "cut", resume=True, **how)
    assert same_bits(resumed.weights, whole.weights)
    assert torch.equal(resumed.targets.probabilities, whole.targets.probabilities)
    assert told(resumed, "server/u") == told(whole, "server/u")


class NoisyNet(nn.Module):
    """BatchNorm and dropout: a model that answers differently in train mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.body, self.head = nn.Sequential(*layers), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_teachers_in_train_mode_say_the_same_on_both_engines():
    model = from_module(NoisyNet, input_shape=(FEATURES,), classes=CLASSES, check=False)
    for batch in (640, 49):  # at 49 the last batch is one row
        method = form("mrtf", "released", teacher_batch=batch, **CODE)
        batched, looped = (run(method, model=model, engine=engine, rounds=2) for engine in ("batched", "looped"))
        assert furthest(batched.targets.probabilities, looped.targets.probabilities) < 1e-5


@pytest.mark.parametrize(
    ("option", "value"),
    [("floor", 1.5), ("warm_up", -1), ("sharpness", 0.0), ("refine_sharpness", -4.0), ("every", 0), ("refine", 1)],
)
def test_an_impossible_option_is_one_line_that_names_it(option, value):
    with pytest.raises(FedstillError, match=rf"method\.{option} = ") as caught:
        build_method("mrtf", {option: value})
    assert "\n" not in str(caught.value)


MODULES: dict[str, dict[str, Any]] = {
    "mean logits": {"stabilise": False, "rectify": False, "refine": False},
    "rectified": {"refine": False},
    "all": {},
}


@cache
def transductive(modules: str, seed: int):
    """Digits on 20 clients, Dir(0.1), 4 of them a round; the test digits are to be labelled. -> (labels, average)."""
    source = load("digits")
    parts = PARTITIONS["mrtf"](source.train.y.numpy(), 20, seed=seed, alpha=0.1)
    wanted = Unlabeled(source.test.x, tuple(str(row) for row in range(len(source.test.x))), source.test.y)
    result = run(
        form("mrtf", steps=40, lr=1e-3, warm_up=2, feedback=True, **MODULES[modules]), rounds=6, cohort=4, seed=seed,
        model=build_model("mlp", input_shape=(1, 8, 8), classes=10, hidden=(32,), init="torch"),
        federation=make_federation(source, parts, unlabeled=wanted),
        training=Training(batch_size=16, epochs=3, lr=0.05, momentum=0.9),
    )  # fmt: skip
    late = result.history.rows[2:]
    return tuple(float(np.mean([row[key] for row in late])) for key in ("pseudo_label_accuracy", "accuracy"))


def check_transduction(seed: int) -> None:
    (mean_teacher, student), (rectified, _), (all_three, refined) = (transductive(modules, seed) for modules in MODULES)
    assert mean_teacher + 0.05 < rectified < all_three - 0.05
    assert refined > student + 0.1


def test_rectified_and_refined_labels_are_better_than_the_mean_teachers():
    check_transduction(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_quick([1, 2, 3]))
def test_so_they_are_in_other_federations(seed):
    check_transduction(seed)
