"""Steps that wrap another: in which rounds it runs, what it sends, reports and remembers."""

from __future__ import annotations

import pytest
import torch
from adding_steps import adding, at_round, believing, method_of, model_at

from fedstill.compose.combine import first_state, reported, run_steps, targets
from fedstill.compose.wrappers import after, every, remember, report_only, rollback
from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten, unflatten
from fedstill.core.types import Need, Outlook, ServerStep, Stage, Weights
from fedstill.loop.checkpoint import RunState, load_newest, save_checkpoint


@pytest.mark.parametrize(
    ("wrap", "rounds"),
    [(lambda step: every(3, step), [3, 6]), (lambda step: after(4, step), [5, 6, 7]), (lambda step: step, range(1, 8))],
    ids=["every", "after", "always"],
)
def test_a_wrapped_step_runs_in_its_rounds_and_passes_model_and_state_through_in_the_others(wrap, rounds):
    step = wrap(adding(1.0))
    state, ran = step.init(model_at(0.0)), []
    for number in range(1, 8):
        before = model_at(10.0)
        moved, new = step.apply(before, state, at_round(number))
        if float(moved.params["w"]) == 11.0:
            ran.append(number)
        else:
            assert moved is before
            assert new is state
        state = new
    assert ran == list(rounds)
    assert int(state["runs"]) == len(ran)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_rollback_mixes_the_models_before_and_after(share):
    step = rollback(adding(4.0), share)
    moved, state = step.apply(model_at(1.0), step.init(model_at(0.0)), at_round(1))
    assert float(moved.params["w"]) == share * 1.0 + (1 - share) * 5.0
    assert int(state["runs"]) == 1


@pytest.mark.parametrize(("share", "sent"), [(0.2, 2.6), (0.0, 3.0), (1.0, 1.0)])
def test_rollback_mixes_as_worked_for_a_teacher(share, sent):
    """D2C-FL: the average 1 and the student 3."""
    moved, _ = rollback(adding(2.0), share).apply(model_at(1.0), {"runs": torch.tensor(0)}, at_round(1))
    assert float(moved.params["w"]) == pytest.approx(sent)
    assert int(moved.buffers["count"]) == 3


def shown(step: ServerStep, state) -> float | None:
    """The parameter of the model that a step with this state reports."""
    model = reported(method_of(step), {step.name: state})
    return None if model is None else float(model.params["w"])


def strength(step: ServerStep, state) -> float | None:
    belief = targets(method_of(step), {step.name: state})
    return None if belief is None else float(belief.probabilities[0, 0])


def test_a_step_that_only_reports_sends_what_came_in_and_shows_what_it_made():
    step = report_only(adding(4.0))
    state, sent = step.init(model_at(1.0)), model_at(1.0)
    assert shown(step, state) is None
    for number in (1, 2):
        moved, state = step.apply(sent, state, at_round(number))
        assert moved is sent
    assert shown(step, state) == 5.0
    assert int(state["reported"].buffers["count"]) == 3
    assert int(state["runs"]) == 2


def test_a_step_that_only_reports_still_broadcasts_believes_and_needs():
    plain = believing(1.0)
    step = report_only(plain)
    state = step.init(model_at(0.0))
    assert strength(step, state) is None
    _, state = step.apply(model_at(0.0), state, at_round(1))
    assert strength(step, state) == 1.0
    assert step.broadcast(state) == {"runs of 1.0": torch.tensor(1)}
    assert (step.name, step.needs, step.stage) == (plain.name, plain.needs, Stage.REPORT)


def test_the_reported_model_and_the_belief_survive_a_checkpoint(tmp_path):
    method = method_of(adding(1.0), report_only(believing(2.0)))
    sent, state = run_steps(method, model_at(0.0), first_state(method, model_at(0.0)), at_round(1))
    save_checkpoint(RunState(1, sent, state), tmp_path)
    again = load_newest(tmp_path).server
    assert isinstance(reported(method, again), Weights)
    assert float(sent.params["w"]) == 1.0
    assert float(reported(method, again).params["w"]) == 3.0
    assert int(reported(method, again).buffers["count"]) == 3
    assert float(targets(method, again).probabilities[0, 0]) == 1.0
    moved, after_two = run_steps(method, sent, again, at_round(2))
    assert float(moved.params["w"]) == 2.0
    assert float(targets(method, after_two).probabilities[0, 0]) == 2.0


@pytest.mark.parametrize(
    "wrap",
    [lambda step: every(2, step), lambda step: after(1, step), lambda step: rollback(step, 0.25)],
    ids=["every", "after", "rollback"],
)
def test_wrapped_steps_still_show_what_they_show(wrap):
    step = wrap(believing(4.0))
    state = step.init(model_at(0.0))
    for number in (1, 2, 3):
        if number == 3:  # whatever the third round does, the answer of the second is there
            assert float(state["reported"].params["w"]) == 4.0
            assert strength(step, state) == float(state["runs"])
        _, state = step.apply(model_at(0.0), state, at_round(number))
    assert strength(step, state) == float(state["runs"])
    assert (step.name, step.needs) == ("believing", {Need.UNLABELED})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda step: after(1, step),
        lambda step: rollback(step, 0.25),
        lambda step: report_only(step),
        lambda step: remember(lambda past: step, size=2),
    ],
    ids=["after", "rollback", "report_only", "remember"],
)
def test_what_a_step_refuses_before_a_run_starts_a_wrapped_one_refuses_too(wrap):
    def check(outlook):
        if outlook.round > 1:
            raise FedstillError("too late")

    step = wrap(ServerStep("check", check=check))
    step.check(Outlook(1, None))
    with pytest.raises(FedstillError, match="too late"):
        step.check(Outlook(2, None))


def test_what_is_reported_stays_in_rounds_in_which_the_step_rests():
    step = every(2, report_only(adding(1.0)))
    state, seen = step.init(model_at(0.0)), []
    for number in range(1, 6):
        _, state = step.apply(model_at(float(number)), state, at_round(number))
        seen.append(shown(step, state))
    assert seen == [None, 3.0, 3.0, 5.0, 5.0]


def test_a_step_that_remembers_shows_what_its_inner_step_shows():
    step = remember(lambda past: believing(1.0), 2)
    state = step.init(model_at(0.0))
    assert strength(step, state) is None
    _, state = step.apply(model_at(0.0), state, at_round(1))
    assert strength(step, state) == 1.0
    assert shown(step, state) == 1.0


def watching(seen: list):
    """A step that is told the past models, adds 1 and counts."""

    def step(past: list[Weights]) -> ServerStep:
        inner = adding(1.0)

        def apply(candidate, state, round):
            seen.append([float(model.params["w"]) for model in past])
            assert all(set(model.buffers) == {"count"} for model in past)
            return inner.apply(candidate, state, round)

        return ServerStep("watching", apply, inner.init, lambda state: {"runs": state["runs"]}, {Need.FEATURES})

    return step


@pytest.mark.parametrize("size", [0, 1, 3, 12])
def test_remember_hands_out_the_last_models_oldest_first(size):
    seen: list = []
    step = remember(watching(seen), size)
    state, model = step.init(model_at(0.0)), model_at(0.0)
    for number in range(1, 16):
        model, state = step.apply(model, unflatten(flatten(state)), at_round(number))
    history = [float(n) for n in range(1, 15)]
    assert seen == [history[max(0, n - size) : n] if size else [] for n in range(15)]
    assert int(state["runs"]) == 15
    assert step.broadcast(state) == {"runs": state["runs"]}
    assert step.needs == {Need.FEATURES}


def test_a_remembered_model_without_buffers_survives_a_checkpoint():
    seen: list = []

    def step(past):
        seen.append([set(model.buffers) for model in past])
        return ServerStep("idle")

    bare = Weights({"w": torch.ones(1)}, {})
    remembering = remember(step, 2)
    _, state = remembering.apply(bare, remembering.init(bare), at_round(1))
    remembering.apply(bare, unflatten(flatten(state)), at_round(2))
    assert seen[-1] == [set()]
