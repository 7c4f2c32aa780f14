import pytest
from by_hand import number, round_of, scalar, uploads_of

from fedstill.core.types import Stage
from fedstill.methods.fedcurv import sum_curvature
from fedstill.methods.feddyn import dynamic_correction
from fedstill.methods.scaffold import update_control


def control_after(deltas, sizes, *, population, weighting="uniform", control=1.0):
    uploads = uploads_of([scalar(0.0)] * len(deltas), sizes, extra={"control_delta": {"w": number(deltas)}})
    step = update_control(weighting)
    candidate, state = step.apply(
        scalar(5.0), {"control": {"w": number(control)}}, round_of(scalar(0.0), uploads, population=population)
    )
    assert candidate.params["w"].item() == 5.0
    assert step.broadcast(state) == {"control": state["control"]}
    return state["control"]["w"].item()


def test_the_control_moves_by_the_sum_of_changes_over_the_population():
    assert control_after([2.0, -6.0], [1, 9], population=8) == pytest.approx(1.0 + (2.0 - 6.0) / 8)


def test_size_weights_apply_to_controls_too():
    assert control_after([2.0, -6.0], [1, 3], population=2, weighting="size") == pytest.approx(1.0 + 0.5 - 4.5)


def test_a_client_without_samples_does_not_count_as_a_participant():
    assert control_after([2.0, float("nan")], [1, 0], population=4) == pytest.approx(1.0 + 2.0 / 4)


def test_the_first_control_is_zero():
    assert update_control().init(scalar(3.0))["control"]["w"].item() == 0.0


def test_feddyn_with_one_of_two_clients_lands_where_the_card_says():
    step = dynamic_correction(0.5)
    this = round_of(scalar(1.0), uploads_of([scalar(1 / 3)], [1]), population=2)
    moved, state = step.apply(scalar(1 / 3), step.init(scalar(1.0)), this)
    assert state["dyn_mean"]["w"].item() == pytest.approx(1 / 6)
    assert moved.params["w"].item() == pytest.approx(0.0, abs=1e-15)


def extra(fisher, weights):
    return {"fisher_delta": {"w": number(fisher)}, "fisher_weights_delta": {"w": number(weights)}}


def after(state, fisher, weights, sizes):
    uploads = uploads_of([scalar(0.0)] * len(sizes), sizes, extra=extra(fisher, weights))
    step = sum_curvature()
    candidate, state = step.apply(scalar(5.0), state, round_of(scalar(0.0), uploads, population=9))
    assert candidate.params["w"].item() == 5.0
    assert step.broadcast(state) == state
    return state


def values(state):
    return [state[slot]["w"].item() for slot in ("fisher", "fisher_weights")]


def test_the_first_sums_are_zero():
    assert values(sum_curvature().init(scalar(3.0))) == [0.0, 0.0]


def test_changes_are_added_unweighted_whatever_the_sizes():
    """The card's three clients, u = (2, 1, 0.5) and theta = (1, -1, 3): U = 3.5, V = 2.5."""
    state = after(sum_curvature().init(scalar(3.0)), [2.0, 1.0, 0.5], [2.0, -1.0, 1.5], [1, 100, 7])
    assert values(state) == pytest.approx([3.5, 2.5])
    assert values(after(state, [-1.5], [0.25], [4])) == pytest.approx([2.0, 2.75])


def test_a_client_without_samples_does_not_count():
    state = after(sum_curvature().init(scalar(3.0)), [2.0, float("nan")], [1.0, float("nan")], [3, 0])
    assert values(state) == [2.0, 1.0]


def test_it_stands_after_the_average_and_needs_no_client_alone():
    assert sum_curvature().stage is Stage.KEEP
    assert sum_curvature().needs == frozenset()
