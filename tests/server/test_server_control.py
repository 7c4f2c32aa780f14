import pytest
from by_hand import number, round_of, scalar, uploads_of

from fedstill.server import dynamic_correction, update_control


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
