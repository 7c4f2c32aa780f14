from __future__ import annotations

import pytest
import torch
from adding_steps import adding, at_round, believing, method_of, model_at, term

from fedstill.compose.combine import broadcast_of, combine, first_state, reported, run_steps, targets, weighted_mean
from fedstill.core.errors import FedstillError
from fedstill.core.tree import flatten, unflatten
from fedstill.core.types import Batch, Local, Need, Objective, Output, ServerStep


def local_at(value: float) -> Local:
    empty = Local(*[None] * len(Local._fields))
    return empty._replace(params={"w": torch.tensor(value)})


def keeping(**slots: float) -> Objective:
    tree = {name: torch.tensor(value) for name, value in slots.items()}
    return term(init=lambda weights: tree, finish=lambda local, measured: (tree, {}))


def sending(**slots: float) -> Objective:
    tree = {name: torch.tensor(value) for name, value in slots.items()}
    return term(finish=lambda local, measured: ({}, tree))


def measuring(**slots: float) -> Objective:
    tree = {name: torch.tensor(value) for name, value in slots.items()}
    return term(measure=lambda model, batch, local: tree, finish=lambda local, measured: ({}, dict(measured)))


def test_a_combination_is_the_sum_of_its_terms():
    output, batch = Output(torch.zeros(1, 2), torch.zeros(1, 2)), Batch(*[torch.zeros(1)] * 3)
    together = combine(term(1.0), term(-0.25), term(4.0))
    assert float(together.loss(output, batch, local_at(2.0))) == 2.0 * 4.75


def test_terms_keep_and_send_their_own_slots_and_declare_the_union_of_needs():
    together = combine(
        keeping(control=1.0), sending(delta=2.0), keeping(past=3.0), term(needs=frozenset({Need.FEATURES}))
    )
    assert set(together.init({})) == {"control", "past"}
    state, extra = together.finish(local_at(0.0), {})
    assert (set(state), set(extra)) == ({"control", "past"}, {"delta"})
    assert together.needs == {Need.FEATURES}


def test_what_terms_measure_is_merged_and_every_term_may_read_it():
    together = combine(term(), measuring(fisher=1.0), term(measure=lambda model, batch, local: {"mean": torch.ones(1)}))
    measured = together.measure(None, None, local_at(0.0))
    assert set(measured) == {"fisher", "mean"}
    assert set(together.finish(local_at(0.0), measured)[1]) == {"fisher", "mean"}
    assert combine(term(), keeping(a=1.0)).measure is None


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: combine(keeping(c=1.0), keeping(c=2.0)).init({}), "client state"),
        (lambda: combine(keeping(c=1.0), keeping(c=2.0)).finish(local_at(0.0), {}), "client state"),
        (lambda: combine(sending(c=1.0), sending(c=2.0)).finish(local_at(0.0), {}), "upload"),
        (lambda: combine(measuring(c=1.0), measuring(c=2.0)).measure(None, None, None), "measure"),
        (
            lambda: broadcast_of(
                method_of(*(ServerStep(name, broadcast=lambda state: {"c": torch.ones(1)}) for name in "ab")), {}
            ),
            "broadcast",
        ),
    ],
    ids=["init", "state", "upload", "measure", "broadcast"],
)
def test_two_parts_that_write_one_slot_are_an_error_that_names_it(call, kind):
    with pytest.raises(FedstillError, match=f"both write the {kind} slot 'c': use one of them"):
        call()


def test_a_frozen_model_that_several_terms_name_is_one_model():
    def start(local):
        return local.start

    def other(local):
        return local.start

    together = combine(term(frozen={"start": start}), term(frozen={"start": start, "past": other}))
    assert dict(together.frozen) == {"start": start, "past": other}
    with pytest.raises(FedstillError, match="'start' but mean different weights"):
        combine(term(frozen={"start": start}), term(frozen={"start": other}))


def test_steps_run_in_order_and_each_keeps_its_own_state():
    def doubling(candidate, state, round):
        return candidate._replace(params={"w": 2 * candidate.params["w"]}), state

    method = method_of(adding(1.0, "first"), ServerStep("double", doubling), adding(0.5, "last"))
    state = {**first_state(method, model_at(0.0)), "waiting": {"slot": torch.tensor(4)}}
    for _ in range(2):
        moved, state = run_steps(method, model_at(1.0), state, at_round(1))
    assert float(moved.params["w"]) == (1.0 + 1.0) * 2 + 0.5
    assert [int(state[name]["runs"]) for name in ("first", "last")] == [2, 2]
    assert int(state["waiting"]["slot"]) == 4  # of a step that another phase has


@pytest.mark.parametrize("twice", [("average", "average"), ("average", "control", "control")])
def test_two_steps_of_one_name_are_an_error_that_names_them(twice):
    with pytest.raises(FedstillError, match=rf"are named '{twice[-1]}' \({', '.join(twice)}\): give each its own name"):
        method_of(*map(ServerStep, twice))


@pytest.mark.parametrize("name", ["", None, adding])
def test_a_step_without_a_name_is_refused(name):
    with pytest.raises(FedstillError, match="a step's name comes first"):
        ServerStep(name)


def test_a_state_survives_a_checkpoint_that_forgets_empty_states():
    method = method_of(ServerStep("idle"), adding(1.0), ServerStep("send", broadcast=lambda state: dict(state)))
    state = unflatten(flatten(first_state(method, model_at(0.0))))
    assert set(state) == {"adding"}
    moved, after_round = run_steps(method, model_at(1.0), state, at_round(1))
    assert float(moved.params["w"]) == 2.0
    assert int(after_round["adding"]["runs"]) == 1
    assert broadcast_of(method, state) == {}


def test_a_method_shows_what_its_last_step_with_an_answer_shows():
    method = method_of(believing(1.0, "first"), believing(10.0, "second"), adding(100.0, "silent"))
    state = first_state(method, model_at(0.0))
    assert reported(method, state) is None
    assert targets(method, state) is None
    for number in (1, 2):
        _, state = run_steps(method, model_at(0.0), state, at_round(number))
    assert float(reported(method, state).params["w"]) == 11.0  # of the second, not of the model that is sent (111)
    state["later"] = state.pop("second")  # a step of another phase, whose answers are not this method's
    assert float(reported(method, state).params["w"]) == 1.0
    assert float(targets(method, state).probabilities[0, 0]) == 2.0


def test_the_weighted_mean_counts_real_samples_only():
    values = torch.tensor([1.0, 2.0, 6.0, 1e9])
    assert float(weighted_mean(values, torch.tensor([1.0, 1.0, 1.0, 0.0]))) == 3.0
    assert float(weighted_mean(values, torch.zeros(4))) == 0.0
    assert float(weighted_mean(values[:3], torch.ones(3))) == float(values[:3].mean())
