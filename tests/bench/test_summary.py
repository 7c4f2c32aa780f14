"""Figures of learning curves, against numbers done by hand."""

import math

import pytest
from bench_cases import FEDAVG, LMD, RUNS, recipe_of, small, summary_rows

from fedstill.bench import Cell
from fedstill.bench.results import Curve
from fedstill.bench.summary import (
    best,
    first_round,
    last_known,
    last_round,
    last_ten,
    rounds_ratio,
    speed_up,
    spread,
    summarize_table,
)


def rising(rounds, *, to=100.0):
    """Accuracy `to` * n / rounds in round n."""
    return Curve(rounds, 1, [to * number / rounds for number in range(1, rounds + 1)])


def reaching(target, number, rounds=200):
    """Zero before round `number`, `target` from there on."""
    return Curve(rounds, 1, [0.0] * (number - 1) + [target] * (rounds - number + 1))


def test_best_is_over_all_rounds_and_the_last_ten_are_the_last_ten():
    curve = Curve(12, 1, [90.0, 80.0, *range(1, 11)])
    assert best(curve) == 90.0
    assert last_ten(curve) == 5.5
    assert last_round(curve) == 10.0


def test_fewer_than_ten_rounds_are_all_taken():
    assert last_ten(Curve(2, 1, [10.0, 30.0])) == 20.0


def test_what_a_round_has_not_logged_does_not_count():
    """Eleven values: the first is too old, two were not there."""
    assert last_known([99.0, 10.0, None, None, *[20.0] * 7]) == (10 + 7 * 20) / 8
    assert last_known([5.0, *[None] * 10]) is None
    assert last_known([]) is None


def test_evaluated_rounds_are_every_nth_and_the_last():
    assert Curve(25, 10, [1.0, 2.0, 3.0]).at == [10, 20, 25]
    assert first_round(Curve(25, 10, [1.0, 2.0, 3.0]), 2.5) == 25
    assert first_round(Curve(25, 10, [1.0, 2.0, 3.0]), 3.5) is None


@pytest.mark.parametrize(("number", "printed"), [(81, 2.47), (200, 1.0), (1, 200.0), (134, 1.49)])
def test_speed_up_is_all_rounds_over_the_round_that_reaches_fedavgs_best(number, printed):
    """2.47 and 1.49 are printed in FedLMD's table 3: 200 / 81 and 200 / 134."""
    fedavg = reaching(40.0, 150)
    assert round(speed_up(reaching(40.0, number), fedavg), 2) == printed
    assert rounds_ratio(reaching(40.0, number), fedavg) == 150 / number


def test_fedavgs_best_that_is_never_reached_is_speed_up_1_and_no_ratio():
    fedavg = rising(200, to=40.0)
    assert speed_up(rising(200, to=39.9), fedavg) == 1.0
    assert rounds_ratio(rising(200, to=39.9), fedavg) is None


def test_fedavgs_own_speed_up_is_1_wherever_its_best_is():
    fedavg = reaching(40.0, 50)
    assert speed_up(fedavg, fedavg) == 1.0


def test_an_equal_accuracy_counts_as_reached():
    assert first_round(Curve(3, 1, [10.0, 20.0, 30.0]), 20.0) == 2


def test_spread_has_n_minus_1():
    found = spread([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.std == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2))
    assert spread([5.0]).std is None
    assert spread([]) is None


def test_speed_ups_are_those_of_each_seed_against_the_same_seeds_fedavg_then_averaged():
    fedntd = summary_rows()["fedntd"]
    assert fedntd.speedup.mean == 1.5
    assert fedntd.speedup.std == pytest.approx(0.5**0.5)
    assert (fedntd.ratio.mean, fedntd.ratio.seeds) == (2.0, 1), "only over seeds that reach it: round 4 over round 2"
    assert (summary_rows()["fedavg"].speedup.mean, summary_rows()["fedavg"].ratio.mean) == (1.0, 1.0)


def test_best_last_ten_and_their_differences_to_the_paper():
    fedntd = summary_rows()["fedntd"]
    assert (fedntd.best.mean, fedntd.last.mean) == (55.0, 35.0)
    assert fedntd.best.std == pytest.approx(50**0.5)
    assert (fedntd.above(fedntd.best), fedntd.above(fedntd.last)) == (5.0, -15.0)


def test_a_seed_without_its_fedavg_has_an_accuracy_and_no_speed_up():
    fedntd = summary_rows(RUNS[:1] + RUNS[2:])["fedntd"]
    assert fedntd.seeds == 2
    assert (fedntd.speedup.mean, fedntd.speedup.seeds) == (2.0, 1)
    alone = summary_rows(RUNS[2:], cells=(LMD,))["fedntd"]
    assert alone.speedup is None


def test_a_cell_shows_the_runs_of_its_own_engine_and_the_default_one_any_where_it_has_none():
    """Seed 0 of the default and of float64, seed 1 of float64 only."""
    exact = {"precision": "float64"}
    runs = [RUNS[0], {**RUNS[0], "accuracy": [1.0, 2.0, 3.0, 4.0], "engine": exact}, {**RUNS[1], "engine": exact}]
    other = Cell("fedavg64", "digits", small(engine=exact))
    third = Cell("looped", "digits", small(engine={"name": "looped"}))
    for order in (runs, runs[::-1]):
        found = summary_rows(order, cells=(FEDAVG, other, third))
        assert (found["fedavg"].best.mean, found["fedavg"].seeds) == ((50.0 + 60.0) / 2, 2)
        assert (found["fedavg64"].best.mean, found["fedavg64"].seeds) == ((4.0 + 60.0) / 2, 2)
        assert found["looped"].seeds == 0
    assert found["fedavg"].speedup.mean == 1.0, "it is the measure"
    assert found["fedavg"].as_json()["engines"] == ["", "precision = float64"]


def test_a_gain_does_not_depend_on_the_rows_that_are_shown():
    table = recipe_of(FEDAVG, LMD).tables["paper"]["1"]
    (column,) = summarize_table(table, RUNS, {}, rows=["fedntd"])
    assert [(row.row, row.gain) for row in column.rows] == [("fedntd", 3.75)]
