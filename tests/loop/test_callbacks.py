from __future__ import annotations

import pytest

from fedstill.core.errors import FedstillError
from fedstill.loop.callbacks import Callback, EarlyStop, RunInfo


def info(past: tuple = ()) -> RunInfo:
    return RunInfo("fedavg", 10, 10, 5, "loop", "cpu", "linear", 15, None, past)


def stops_at(stop: EarlyStop, values: list[float | None], past: int = 0) -> int | None:
    rows = [{"round": i + 1, stop.metric: value} for i, value in enumerate(values)]
    if stop.on_start(info(tuple(rows[:past]))):
        return past
    return next((row["round"] for row in rows[past:] if stop.on_round(row)), None)


def test_early_stop_waits_for_patience_evaluations_without_a_new_best():
    assert stops_at(EarlyStop(2), [0.1, 0.3, 0.3, 0.2, 0.9]) == 4
    assert stops_at(EarlyStop(3), [0.1, 0.3, 0.3, 0.2, 0.9]) is None


def test_early_stop_counts_evaluations_not_rounds():
    assert stops_at(EarlyStop(2), [0.3, None, None, 0.2, None, 0.1]) == 6


def test_early_stop_knows_that_a_loss_should_fall():
    assert stops_at(EarlyStop(2, "loss"), [3.0, 2.0, 1.0, 0.5]) is None
    assert stops_at(EarlyStop(2, "loss"), [1.0, 2.0, 3.0]) == 3


def test_a_gain_within_the_margin_is_no_gain():
    assert stops_at(EarlyStop(2, margin=0.05), [0.5, 0.54, 0.55, 0.9]) == 3


@pytest.mark.parametrize("past", range(5))
def test_early_stop_after_a_resume_stops_where_it_would_have_stopped(past):
    assert stops_at(EarlyStop(2), [0.1, 0.3, 0.3, 0.2, 0.9], past) == 4


def test_patience_must_be_positive():
    with pytest.raises(FedstillError, match=r"early_stop.patience = 0"):
        EarlyStop(0)


def test_a_callback_writes_only_the_methods_it_needs():
    class Silent(Callback):
        pass

    assert Silent().on_start(info()) is None
    assert Silent().on_round({}) is None
    assert Silent().on_end(None) is None


def test_a_misspelt_metric_is_told_in_the_first_evaluated_round():
    stop = EarlyStop(1, "acuracy")
    assert stop.on_round({"round": 1}) is False
    with pytest.raises(FedstillError, match="no metric 'acuracy' in an evaluated round: did you mean 'accuracy'"):
        stop.on_round({"round": 2, "accuracy": 0.5})
    with pytest.raises(FedstillError, match="no metric 'confusion' in an evaluated round"):
        EarlyStop(1, "confusion").on_round({"round": 1, "accuracy": 0.5, "confusion": [[1]]})
